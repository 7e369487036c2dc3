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
from torchvm.engine.batch import check_prompts
from torchvm.engine.check import compare_with_plain
from torchvm.engine.decoders import Generation
from torchvm.engine.speculative import context_for
from torchvm.engine.transformers_target import as_target
from torchvm.ops.layout import TreeMaskMode
from torchvm.sampling import SamplingParams
from torchvm.tools.generate_report import Outcome
from torchvm.tools.messages import printable, progress
from torchvm.tools.text_stream import TextStream, cut

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedModel

    from torchvm.engine.check import Divergence
    from torchvm.engine.drafts import Drafter
    from torchvm.engine.target import TargetModel
    from torchvm.tools.models import Tokenizer
    from torchvm.tools.step_record import Recorder

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
    batch_size: int
    """Requests that decode together."""
    recorder: Recorder | None = None
    """Is given every step of the speculative run."""


def run(
    model: PreTrainedModel | TargetModel,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    settings: Settings,
) -> Outcome:
    """Decode prompts, so many at a time.

    Args:
        model: the target.
        tokenizer: of its texts.
        prompts: tokens of each.
        settings: the command's options.

    Raises:
        MaskContractError: when the back end's claim is false.
        ValueError: for options that do not go together.
    """
    torch.set_num_threads(settings.threads or _available_cores())
    target = as_target(model)
    context = settings.max_context_len or context_for(
        target.max_position_embeddings, prompts, settings.max_new_tokens
    )
    check_prompts(prompts, context, start=1)
    speculative = SpeculativeDecoder(
        target,
        _drafter(model, settings, context),
        batch_size=settings.batch_size,
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
    texts = _Texts(model, tokenizer, settings)
    generation = _speculate(speculative, prompts, texts, settings)
    divergences: list[Divergence | None] = [None] * len(prompts)
    plain, plain_compile_seconds = None, 0.0
    if settings.compare:
        decoder = PlainDecoder(
            target,
            batch_size=settings.batch_size,
            max_context_len=context,
            inner=settings.inner,
        )
        with progress(f"Compiling plain decoding ({settings.inner})"):
            plain_compile_seconds = decoder.warm_up()
        plain, divergences = _compare(decoder, prompts, generation.sequences, texts, settings)
    return Outcome(
        decode=texts.decode,
        stop=settings.stop,
        prompt_tokens=[len(prompt) for prompt in prompts],
        batch_size=settings.batch_size,
        drafting=settings.drafting,
        draft_layers=settings.draft_layers,
        sampling=_sampling(settings),
        generation=generation,
        compile_seconds=compile_seconds,
        backend=verifier.backend.name,
        declares_read=verifier.backend.is_read if verifier.plan else None,
        masks=masks,
        ledger=speculative.runner.ledger(),
        plain=plain,
        plain_compile_seconds=plain_compile_seconds,
        divergences=divergences,
        inner=settings.inner,
        threads=torch.get_num_threads(),
        context=context,
    )


class _Texts:
    """Where texts end, and how they are written."""

    def __init__(
        self, model: PreTrainedModel | TargetModel, tokenizer: Tokenizer, settings: Settings
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = settings.stop
        self.limits: dict[str, Any] = {
            "max_new_tokens": settings.max_new_tokens,
            "eos_token_ids": _eos_token_ids(model, tokenizer),
            "stop_when": self._has_stopped if settings.stop else None,
        }
        """What ends a request, as `Decoder.decode` takes it."""

    def decode(self, ids: list[int]) -> str:
        """Text of tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def stream(self) -> TextStream:
        """A text that is written to stdout as it comes."""
        return TextStream(self.decode, self._stop, _write)

    def _has_stopped(self, _: int, new: Sequence[int]) -> bool:
        text = self.decode(list(new))
        return cut(text, self._stop) != text


def _speculate(
    decoder: SpeculativeDecoder, prompts: list[list[int]], texts: _Texts, settings: Settings
) -> Generation:
    """Decode batch by batch."""
    stream = texts.stream()
    with progress("Decoding") as show:
        on_step = _feed(stream) if settings.stream else _counter(show)
        found: list[Generation] = []
        for batch in _batches(prompts, settings):
            done = sum(len(run.sequences) for run in found)
            if settings.recorder is not None:
                decoder.runner.on_verified = settings.recorder.batch(done)
            found.append(
                decoder.decode(batch, on_step=on_step, first_request=done, **texts.limits)
            )
    if settings.stream:
        stream.finish()
        _write("\n")
    return _joined(found)


def _compare(
    decoder: PlainDecoder,
    prompts: list[list[int]],
    sequences: list[list[int]],
    texts: _Texts,
    settings: Settings,
) -> tuple[Generation, list[Divergence | None]]:
    """Decode plainly batch by batch; find where each request differs first."""
    found: list[Generation] = []
    divergences: list[Divergence | None] = []
    with progress("Decoding plainly") as show:
        on_step = _counter(show)
        for batch in _batches(prompts, settings):
            done = len(divergences)
            compared = sequences[done : done + len(batch)]
            generation, differences = compare_with_plain(
                decoder, batch, compared, on_step=on_step, **texts.limits
            )
            found.append(generation)
            divergences += differences
    return _joined(found), divergences


def _batches(prompts: list[list[int]], settings: Settings) -> list[list[list[int]]]:
    size = settings.batch_size
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]


def _joined(found: list[Generation]) -> Generation:
    """One run of all batches, one behind the other."""
    return Generation(
        [row for run in found for row in run.sequences],
        [row for run in found for row in run.accepted],
        sum(run.steps for run in found),
        sum(run.prefill_seconds for run in found),
        sum(run.decode_seconds for run in found),
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
        batch_size=settings.batch_size,
        max_context_len=context,
    )


def _sampling(settings: Settings) -> SamplingParams | None:
    if settings.sampling is None:
        return None
    temperature, top_p, top_k, seed = settings.sampling
    return SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)


def _write(text: str) -> None:
    sys.stdout.write(printable(text))
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
