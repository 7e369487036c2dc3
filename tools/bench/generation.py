"""Decoding with draft trees beside plain decoding, of a small random model or a real one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torchvm.engine import PlainDecoder, PromptLookupDrafter, SpeculativeDecoder
from torchvm.tools.bench.measure import Case, Contender
from torchvm.tools.messages import progress
from torchvm.tools.models import SMALL, load_model, small_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchvm.engine.decoders import Decoder, Generation
    from torchvm.tools.bench.measure import Spread

__all__ = ["TITLE", "Sizes", "cases"]

TITLE = "generate: one prompt decoded; sizes are topk x depth x n of the drafts"
NOTES = (
    "drafts by prompt lookup; prefill and compiling are not in the times",
    "the tokens must equal those of plain decoding",
)
_PROMPT = "Colours of the flags: red, green, blue, red, green, blue, red, green, blue,"


class Sizes(NamedTuple):
    """What is timed."""

    drafts: tuple[tuple[int, int, int], ...] = ((1, 4, 5), (2, 4, 8))
    """(topk, depth, n)."""
    max_new_tokens: int = 64
    inner: str = "inductor"


SIZES = Sizes()
QUICK = Sizes(((2, 2, 4),), 8, "aot_eager")


def cases(sizes: Sizes = SIZES, model: str = SMALL) -> Iterator[Case]:
    """Every shape of drafts.

    Args:
        sizes: of the drafts and of the text.
        model: see `torchvm generate --model`.

    Raises:
        CommandError: when there is no such model.
    """
    target: Any
    target, tokenizer = small_model(None) if model == SMALL else load_model(model)
    prompt = list(tokenizer(_PROMPT).input_ids)
    context = len(prompt) + sizes.max_new_tokens
    fixed: dict[str, Any] = {
        "batch_size": 1, "max_context_len": context, "inner": sizes.inner
    }  # fmt: skip
    plain = PlainDecoder(target, **fixed)
    with progress("Compiling plain decoding"):
        plain.warm_up()
    for topk, depth, n in sizes.drafts:
        drafter = PromptLookupDrafter(topk=topk, depth=depth, num_draft_tokens=n)
        speculative = SpeculativeDecoder(target, drafter, **fixed)
        with progress("Compiling verification"):
            speculative.warm_up()
        yield _case(
            f"{model} model", f"{topk} x {depth} x {n}", (speculative, plain), prompt,
            sizes.max_new_tokens,
        )  # fmt: skip


def _case(
    what: str, size: str, decoders: tuple[Decoder, Decoder], prompt: list[int], count: int
) -> Case:
    """Time decoding alone, per token."""
    speculative, plain = (_runner(decoder, prompt, count) for decoder in decoders)

    def contender(name: str, run: Callable[[], Generation]) -> Contender:
        return Contender(
            name,
            run,
            lambda: run().sequences,
            lambda calls: [1e6 / run().tokens_per_second for _ in range(calls)],
        )

    def facts(times: dict[str, Spread]) -> dict[str, float]:
        rates = {f"tokens/s by {name}": 1e6 / spread.median for name, spread in times.items()}
        return {"accepted a step": speculative().accepted_per_step, **rates}

    return Case(
        what,
        size,
        (contender("speculation", speculative), contender("plain decoding", plain)),
        lambda: plain().sequences,
        "plain decoding",
        unit="us a token",
        facts=facts,
    )


def _runner(decoder: Decoder, prompt: list[int], count: int) -> Callable[[], Generation]:
    return lambda: decoder.decode([prompt], max_new_tokens=count)
