"""The run behind torchvm generate: speculative decoding, then plain, each compiled before."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchvm.compilation import reports
from torchvm.engine import (
    EarlyExitDrafter,
    PlainDecoder,
    PromptLookupDrafter,
    SpeculativeDecoder,
)
from torchvm.engine.check import compare_with_plain
from torchvm.engine.speculative import context_for
from torchvm.engine.transformers_target import as_target
from torchvm.ops.layout import TreeMaskMode
from torchvm.sampling import SamplingParams
from torchvm.tools.generate_report import Outcome
from torchvm.tools.messages import progress
from torchvm.tools.text_stream import TextStream, cut

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedModel

    from torchvm.engine.drafts import Drafter
    from torchvm.engine.target import TargetModel
    from torchvm.tools.models import Tokenizer

__all__ = ["Settings", "run"]

_MODES = {
    "full": TreeMaskMode.FULL_MASK,
    "qlen": TreeMaskMode.QLEN_ONLY,
    "packed": TreeMaskMode.QLEN_ONLY_BITPACKING,
}


class Settings(NamedTuple):
    """The options of one run."""

    drafting: tuple[int, int, int]
    """topk, depth and num_draft_tokens."""
    max_new_tokens: int
    max_context_len: int | None
    mask_mode: str
    backend: str | None
    inner: str
    threads: int | None
    compare: bool
    draft_layers: int | None
    """Layers of the model that draft; None looks the prompt up."""
    sampling: tuple[float, float, int, int] | None
    """temperature, top_p, top_k and seed."""
    stop: tuple[str, ...]
    stream: bool


def run(
    model: PreTrainedModel | TargetModel,
    tokenizer: Tokenizer,
    tokens: list[int],
    settings: Settings,
) -> Outcome:
    """Decode one prompt.

    Args:
        model: the target.
        tokenizer: of its texts.
        tokens: the prompt.
        settings: the command's options.

    Raises:
        MaskContractError: when the back end's claim is false.
        ValueError: for options that do not go together.
    """
    torch.set_num_threads(settings.threads or _available_cores())
    target = as_target(model)
    context = settings.max_context_len or context_for(
        target.max_position_embeddings, [tokens], settings.max_new_tokens
    )
    speculative = SpeculativeDecoder(
        target,
        _drafter(model, settings, context),
        batch_size=1,
        max_context_len=context,
        inner=settings.inner,
        mask_mode=_MODES[settings.mask_mode],
        backend=settings.backend,
        sampling=_sampling(settings),
    )
    before = len(reports())
    with progress(f"Compiling verification ({settings.inner})"):
        compile_seconds = speculative.warm_up()
    verifier = speculative.verifier
    masks = reports()[before:] if verifier.plan is None else (verifier.plan.report(),)
    eos = _eos_token_ids(model, tokenizer)

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    def has_stopped(_: int, new: Sequence[int]) -> bool:
        text = decode(list(new))
        return cut(text, settings.stop) != text

    stop_when = has_stopped if settings.stop else None
    with progress("Decoding") as show:
        stream = TextStream(decode, settings.stop, _write)
        generation = speculative.decode(
            [tokens],
            max_new_tokens=settings.max_new_tokens,
            eos_token_ids=eos,
            on_step=_feed(stream) if settings.stream else _counter(show),
            stop_when=stop_when,
        )
    if settings.stream:
        stream.finish()
        _write("\n")
    plain = divergence = None
    plain_compile_seconds = 0.0
    if settings.compare:
        decoder = PlainDecoder(target, batch_size=1, max_context_len=context, inner=settings.inner)
        with progress(f"Compiling plain decoding ({settings.inner})"):
            plain_compile_seconds = decoder.warm_up()
        with progress("Decoding plainly") as show:
            plain, (divergence,) = compare_with_plain(
                decoder,
                [tokens],
                generation.sequences,
                max_new_tokens=settings.max_new_tokens,
                eos_token_ids=eos,
                on_step=_counter(show),
                stop_when=stop_when,
            )
    return Outcome(
        decode=decode,
        stop=settings.stop,
        prompt_tokens=len(tokens),
        drafting=settings.drafting,
        draft_layers=settings.draft_layers,
        sampling=_sampling(settings),
        generation=generation,
        compile_seconds=compile_seconds,
        backend=verifier.backend.name,
        declares_read=verifier.backend.is_read if verifier.plan else None,
        masks=masks,
        plain=plain,
        plain_compile_seconds=plain_compile_seconds,
        divergence=divergence,
        inner=settings.inner,
        threads=torch.get_num_threads(),
        context=context,
    )


def _drafter(model: PreTrainedModel | TargetModel, settings: Settings, context: int) -> Drafter:
    """Make what the options ask for."""
    topk, depth, num_draft_tokens = settings.drafting
    if settings.draft_layers is None:
        return PromptLookupDrafter(topk=topk, depth=depth, num_draft_tokens=num_draft_tokens)
    layered: Any = model
    return EarlyExitDrafter(
        layered,
        settings.draft_layers,
        topk=topk,
        depth=depth,
        num_draft_tokens=num_draft_tokens,
        batch_size=1,
        max_context_len=context,
    )


def _sampling(settings: Settings) -> SamplingParams | None:
    if settings.sampling is None:
        return None
    temperature, top_p, top_k, seed = settings.sampling
    return SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _feed(stream: TextStream) -> Callable[[list[list[int]]], None]:
    """Make a step callback that writes text."""

    def on_step(appended: list[list[int]]) -> None:
        stream.add(appended[0])

    return on_step


def _counter(show: Callable[[str], None]) -> Callable[[list[list[int]]], None]:
    """Make a step callback that shows how many tokens there are."""
    count = 0

    def on_step(appended: list[list[int]]) -> None:
        nonlocal count
        count += sum(map(len, appended))
        show(f"{count} tokens")

    return on_step


def _eos_token_ids(model: PreTrainedModel | TargetModel, tokenizer: Tokenizer) -> set[int]:
    """End tokens of the model's generation config and of its tokenizer."""
    found: set[int] = set()
    of_model = getattr(model, "generation_config", None)
    for ids in (getattr(of_model, "eos_token_id", None), tokenizer.eos_token_id):
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
    return found


def _available_cores() -> int:
    """Cores this process may run on, but no more than torch would take by itself."""
    return max(1, min(torch.get_num_threads(), len(os.sched_getaffinity(0))))
