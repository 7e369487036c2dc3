"""The host's side of a batch: tokens of each request, and which of them still decode."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torch import Tensor

__all__ = ["Batch", "check_prompts", "prompts_of"]


class Batch:
    """Grows sequences until the end token, the token budget or the context limit.

    Args:
        prompts: tokens of each request, at least one.
        max_new_tokens: budget of each request.
        eos_token_ids: a request ends with the first of these, which it keeps.
        max_context_len: most tokens of a request, prompt included.
        stop_when: is given a request's number and its new tokens, after each of them; True ends
            the request, which keeps the token.
        idle: rows behind the prompts' that decode nothing, for a batch of a fixed size.

    Raises:
        ValueError: when a prompt leaves no room for a token, or the budget is below 1.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        eos_token_ids: Collection[int],
        max_context_len: int,
        stop_when: Callable[[int, Sequence[int]], bool] | None = None,
        idle: int = 0,
    ) -> None:
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be >= 1, got {max_new_tokens}")
        check_prompts(prompts, max_context_len)
        self.sequences = [*(list(prompt) for prompt in prompts), *([0] for _ in range(idle))]
        self.active = [True] * len(prompts) + [False] * idle
        self._starts = [len(prompt) for prompt in prompts]
        self._ends = [min(s + max_new_tokens, max_context_len) for s in self._starts]
        self._eos = frozenset(eos_token_ids)
        self._stop_when = stop_when

    def seq_lens(self) -> list[int]:
        """Committed tokens: all but the last. 0 when finished, which costs attention least."""
        return [
            len(sequence) - 1 if on else 0
            for sequence, on in zip(self.sequences, self.active, strict=True)
        ]

    def extend(self, b: int, tokens: Sequence[int]) -> list[int]:
        """Append tokens to request b up to the one that ends it; return those appended."""
        for count, token in enumerate(tokens, start=1):
            self.sequences[b].append(token)
            if self._has_ended(b, token):
                self.active[b] = False
                return list(tokens[:count])
        return list(tokens)

    def _has_ended(self, b: int, last: int) -> bool:
        sequence = self.sequences[b]
        if last in self._eos or len(sequence) == self._ends[b]:
            return True
        return self._stop_when is not None and self._stop_when(b, sequence[self._starts[b] :])

    def new_tokens(self) -> list[list[int]]:
        """Return what was appended to each prompt."""
        return [
            sequence[start:] for sequence, start in zip(self.sequences, self._starts, strict=False)
        ]


def check_prompts(
    prompts: Sequence[Sequence[int]], max_context_len: int, *, start: int = 0
) -> None:
    """Require prompts that leave room for a token; the message counts them from `start`."""
    for b, prompt in enumerate(prompts, start):
        if not 1 <= len(prompt) < max_context_len:
            raise ValueError(
                f"prompt {b} must have 1 to {max_context_len - 1} tokens, so that one more "
                f"fits the context of {max_context_len}, got {len(prompt)}"
            )


def prompts_of(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """Take the padding off a batch of prompts.

    Args:
        input_ids: (B, P) int64.
        attention_mask: (B, P), 1 at the tokens of each prompt, which are adjacent; padding may be
            on either side. None means that there is none.

    Raises:
        ValueError: when the shapes are not these, or a row's tokens are not adjacent.
    """
    if input_ids.dim() != 2 or input_ids.dtype != torch.int64:
        raise ValueError(
            f"input_ids must be (B, P) int64, got {list(input_ids.shape)} {input_ids.dtype}"
        )
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask must be of input_ids's shape {list(input_ids.shape)}, "
            f"got {list(attention_mask.shape)}"
        )
    kept = attention_mask.bool()
    if kept.shape[1]:
        starts = kept[:, 0].int() + (kept[:, 1:] & ~kept[:, :-1]).sum(1)
        if bool((starts > 1).any()):
            raise ValueError("attention_mask must have one run of ones in each row")
    return [row[on].tolist() for row, on in zip(input_ids, kept, strict=True)]
