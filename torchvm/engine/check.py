"""Does speculation give the tokens of plain decoding? Where not, how close was the choice?"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torchvm.engine.decoders import Generation, PlainDecoder

__all__ = ["NEAR_TIE", "Divergence", "compare_with_plain"]

NEAR_TIE = 1e-2
"""Kernels for one token and for n round differently; a smaller gap of logits is their doing."""


class Divergence(NamedTuple):
    """The first place where a request's tokens differ from those of plain decoding."""

    request: int
    position: int
    """Index among the new tokens."""
    plain_token: int | None
    """None: plain decoding had ended there."""
    token: int | None
    """None: the compared tokens had ended there."""
    gap: float
    """Plain decoding's logit of its own token minus that of the other; inf when one is missing."""

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.gap < NEAR_TIE


def compare_with_plain(
    decoder: PlainDecoder,
    prompts: Sequence[Sequence[int]],
    sequences: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_token_ids: Collection[int] = (),
    on_step: Callable[[list[list[int]]], None] | None = None,
    stop_when: Callable[[int, Sequence[int]], bool] | None = None,
) -> tuple[Generation, list[Divergence | None]]:
    """Decode plainly and compare on the way.

    Args:
        decoder: compiled as the compared run was, for the same batch size.
        prompts: tokens of each request.
        sequences: new tokens of each request, to be compared.
        max_new_tokens: as in the compared run.
        eos_token_ids: as in the compared run.
        on_step: is given the new tokens of each request after every step.
        stop_when: as in the compared run.

    Returns:
        The plain run, and for each request its first divergence or None.
    """
    first: list[Divergence | None] = [None] * len(prompts)
    counts = [0] * len(prompts)

    def compare(appended: list[list[int]]) -> None:
        for b, tokens in enumerate(appended):
            for plain in tokens:
                position = counts[b]
                counts[b] += 1
                other = sequences[b][position] if position < len(sequences[b]) else None
                if first[b] is None and other != plain:
                    logits = decoder.last_logits[b]
                    gap = math.inf if other is None else float(logits[plain] - logits[other])
                    first[b] = Divergence(b, position, plain, other, gap)
        if on_step:
            on_step(appended)

    generation = decoder.decode(
        prompts, max_new_tokens=max_new_tokens, eos_token_ids=eos_token_ids, on_step=compare,
        stop_when=stop_when,
    )  # fmt: skip
    for b, count in enumerate(counts):
        if first[b] is None and count < len(sequences[b]):
            first[b] = Divergence(b, count, None, sequences[b][count], math.inf)
    return generation, first
