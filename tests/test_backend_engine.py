"""Speculative decoding on every back end: the tokens of plain decoding, for each kind of layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.tiny_models import KnowingDrafter, tiny_llama
from torchvm.backends.cpu import CPUBackend
from torchvm.backends.layers import LayerKind
from torchvm.backends.registry import BACKENDS
from torchvm.backends.two_batch import TboAttnBackend
from torchvm.engine import PlainDecoder, SpeculativeDecoder, generate
from torchvm.engine.small_model import SmallConfig, SmallModel
from torchvm.errors import MaskContractError
from torchvm.ops.layout import TreeMaskMode

if TYPE_CHECKING:
    from torchvm.backends.base import AttentionBackend, VerifyConfig

CONTEXT, NEW, BS = 192, 12, 3
GROUPED = (LayerKind.grouped_query, LayerKind.grouped_query)
KINDS = {
    "flashmla": (LayerKind.latent, LayerKind.latent),
    "trtllm-mla": (LayerKind.latent, LayerKind.latent),
    "deepseek-v4": (LayerKind.sparse_window, LayerKind.sparse_window),
    "hybrid-linear": (LayerKind.recurrent, LayerKind.grouped_query),
}
CHAINS = {"flashmla", "trtllm-mla", "deepseek-v4"}
PLAIN: dict[Any, tuple[SmallModel, list[list[int]]]] = {}


def prompts() -> list[list[int]]:
    """Of 1, 38 and 75 tokens: longer than a window and its blocks."""
    generator = torch.Generator().manual_seed(9)
    return [torch.randint(97, (1 + 37 * b,), generator=generator).tolist() for b in range(BS)]


def plain(kinds: Any) -> tuple[SmallModel, list[list[int]]]:
    """A model and what it says to the prompts."""
    if kinds not in PLAIN:
        model = SmallModel(SmallConfig(kinds=kinds))
        decoder = PlainDecoder(model, batch_size=BS, max_context_len=CONTEXT, inner="aot_eager")
        PLAIN[kinds] = model, decoder.decode(prompts(), max_new_tokens=NEW).sequences
    return PLAIN[kinds]


@pytest.mark.parametrize("name", list(BACKENDS))
def test_every_back_end_gives_the_tokens_of_plain_decoding(name: str) -> None:
    model, truth = plain(KINDS.get(name, GROUPED))
    assert min(len(set(row)) for row in truth) > 2
    topk = 1 if name in CHAINS else 3
    answers = [p + row + [0] * 9 for p, row in zip(prompts(), truth, strict=True)]
    decoder = SpeculativeDecoder(
        model,
        KnowingDrafter(answers, topk=topk),
        batch_size=BS,
        max_context_len=CONTEXT,
        inner="aot_eager",
        backend=name,
    )
    mask = decoder.verifier.backend.verify_mask
    assert mask is not None
    address = mask.buffer.data_ptr()
    found = decoder.decode(prompts(), max_new_tokens=NEW)
    assert found.sequences == truth
    assert found.accepted_per_step > 1.5
    assert mask.buffer.data_ptr() == address
    # Rows of a mask begin with the root's: something was built into the buffer.
    assert bool(mask.buffer.any())


def test_plain_decoding_of_each_kind_is_uncached_decoding() -> None:
    """One token after the other is what all of them in one forward give."""
    for kinds in {*KINDS.values(), GROUPED}:
        model, truth = plain(kinds)
        decoder = PlainDecoder(model, batch_size=1, max_context_len=CONTEXT, inner="aot_eager")
        for prompt, row in zip(prompts(), truth, strict=True):
            longer = prompt + row[:5]
            (again,) = decoder.decode([longer], max_new_tokens=NEW - 5).sequences
            assert again == row[5:]


def test_a_drafter_that_is_wrong_changes_nothing() -> None:
    kinds = KINDS["hybrid-linear"]
    model, truth = plain(kinds)
    answers = [p + [(token + 1) % 97 for token in row] + [0] * 9
               for p, row in zip(prompts(), truth, strict=True)]  # fmt: skip
    found = SpeculativeDecoder(
        model, KnowingDrafter(answers), batch_size=BS, max_context_len=CONTEXT,
        inner="aot_eager", backend="hybrid-linear",
    ).decode(prompts(), max_new_tokens=NEW)  # fmt: skip
    assert found.sequences == truth


def test_a_false_claim_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CPUBackend, "is_read", property(lambda _: False))
    drafter = KnowingDrafter([[0] * 30])
    with pytest.raises(MaskContractError, match=r"declared False, .*tree_attention .*reads the"):
        generate(
            tiny_llama(), torch.tensor([[1, 2]]), drafter=drafter, max_new_tokens=2, backend="cpu"
        )


def test_a_back_end_of_ones_own_is_made_from_a_config() -> None:
    made: list[VerifyConfig] = []

    def make(config: VerifyConfig) -> AttentionBackend:
        made.append(config)
        return CPUBackend(config)

    found = generate(
        tiny_llama(), torch.tensor([[1, 2]]), drafter=KnowingDrafter([[0] * 30]),
        max_new_tokens=2, backend=make, inner="aot_eager",
    )  # fmt: skip
    assert len(found.sequences[0]) == 2
    assert [c.tree_mask_mode for c in made] == [None, TreeMaskMode.QLEN_ONLY_BITPACKING]


def test_windows_must_hold_a_draft() -> None:
    model, _ = plain(KINDS["deepseek-v4"])
    with pytest.raises(ValueError, match="at most the sliding window of 16, got 17"):
        model.allocate(1, 32, 17)


def test_one_request_runs_on_the_primary() -> None:
    model, truth = plain(GROUPED)
    answers = [prompts()[2] + truth[2] + [0] * 9]
    decoder = SpeculativeDecoder(
        model, KnowingDrafter(answers), batch_size=1, max_context_len=CONTEXT,
        inner="aot_eager", backend="two-batch",
    )  # fmt: skip
    assert isinstance(decoder.verifier.backend, TboAttnBackend)
    assert decoder.decode(prompts()[2:], max_new_tokens=NEW).sequences == truth[2:]
