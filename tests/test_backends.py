"""Back ends with kernels of their own: what they declare, and what their graphs read."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

from torchvm.backends.base import VerifyBatch, VerifyConfig
from torchvm.backends.chain import CHAIN
from torchvm.backends.cpu import CPUBackend
from torchvm.backends.deepseek_v4 import DeepSeekV4Backend
from torchvm.backends.flash_attention import FlashAttentionBackend
from torchvm.backends.flashinfer import FlashInferBackend
from torchvm.backends.layers import GroupedQuery, Latent, LayerKind
from torchvm.backends.linear import LinearAttnBackend
from torchvm.backends.mla import FlashMLABackend, TRTLLMMLABackend
from torchvm.backends.registry import BACKENDS, LEAVES, make_backend
from torchvm.backends.triton import TritonBackend, TritonUnifiedBackend
from torchvm.engine.small_model import SmallConfig, SmallModel
from torchvm.engine.verifier import plan_backend, start_verifier
from torchvm.errors import MaskContractError
from torchvm.ops.contracts import MaskRead
from torchvm.ops.layout import TreeMaskMode, mask_storage

if TYPE_CHECKING:
    from torchvm.planning import MaskPlan

FULL, QLEN, PACKED = TreeMaskMode
BS, N, CONTEXT = 4, 6, 1 << 20

# (declares a read, mask dtype, what the graph reads, readers of the mask, layout)
NOTHING_READ: Any = (False, torch.bool, None, [], QLEN)
TABLE: dict[tuple[type[Any], int], Any] = {
    (CPUBackend, 1): (False, torch.bool, MaskRead.NOTHING, ["tree_attention"], QLEN),
    (CPUBackend, 2): (True, torch.bool, MaskRead.TREE_BLOCK, ["tree_attention"], PACKED),
    (TritonBackend, 1): (True, torch.uint8, MaskRead.TREE_BLOCK, ["tree_attention"], PACKED),
    (TritonBackend, 2): (True, torch.uint8, MaskRead.TREE_BLOCK, ["tree_attention"], PACKED),
    (TritonUnifiedBackend, 1): (True, torch.uint8, MaskRead.FULL, ["unified_attention"], FULL),
    (TritonUnifiedBackend, 2): (True, torch.uint8, MaskRead.FULL, ["unified_attention"], FULL),
    (FlashAttentionBackend, 1): NOTHING_READ,
    (FlashAttentionBackend, 2): (
        True, torch.bool, MaskRead.TREE_BLOCK, ["expand_tree_pages"], PACKED,
    ),
    (FlashInferBackend, 1): (True, torch.bool, MaskRead.FULL, ["pack_mask_bits"], FULL),
    (FlashInferBackend, 2): (True, torch.bool, MaskRead.FULL, ["pack_mask_bits"], FULL),
    (FlashMLABackend, 1): NOTHING_READ,
    (TRTLLMMLABackend, 1): NOTHING_READ,
    (DeepSeekV4Backend, 1): NOTHING_READ,
    (LinearAttnBackend, 1): NOTHING_READ,
    (LinearAttnBackend, 2): NOTHING_READ,
}  # fmt: skip


def config(topk: int, **options: Any) -> VerifyConfig:
    sizes: dict[str, Any] = {"num_draft_tokens": N, "max_context_len": CONTEXT, "topk": topk}
    return VerifyConfig(**(sizes | options))


def plan_of(leaf: type[Any], topk: int) -> MaskPlan:
    """Plan a model of one layer, as a start of the engine does."""
    backend = leaf(config(topk))
    model = SmallModel(SmallConfig(kinds=tuple(backend.layer_kinds)))
    return plan_backend(model, backend, config=config(topk), max_bs=BS)


PLANS: dict[tuple[type[Any], int], MaskPlan] = {}


def planned(leaf: type[Any], topk: int) -> MaskPlan:
    if (leaf, topk) not in PLANS:
        PLANS[leaf, topk] = plan_of(leaf, topk)
    return PLANS[leaf, topk]


def test_the_table_speaks_of_every_back_end() -> None:
    assert {leaf for leaf, _ in TABLE} == set(LEAVES)
    assert {leaf for leaf, topk in TABLE if topk > 1} == {x for x in LEAVES if x.takes_trees}


@pytest.mark.parametrize(("leaf", "topk"), TABLE, ids=lambda x: getattr(x, "label", str(x)))
def test_what_is_declared_is_what_the_graph_reads(leaf: type[Any], topk: int) -> None:
    declared, dtype, read, readers, layout = TABLE[leaf, topk]
    backend = leaf(config(topk))
    assert (backend.is_read, backend.mask_dtype) == (declared, dtype)
    plan = planned(leaf, topk)
    assert [r.op for r in plan.readers] == [f"torchvm::{op}" for op in readers]
    assert max((r.reads for r in plan.readers), default=None) == read
    assert (plan.is_read, plan.mode) == (declared, layout)
    assert plan.nbytes == mask_storage(layout, BS, N, CONTEXT)[0]


@pytest.mark.parametrize(("leaf", "topk"), TABLE, ids=lambda x: getattr(x, "label", str(x)))
def test_a_flipped_declaration_is_found(
    leaf: type[Any], topk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared, _, _, readers, layout = TABLE[leaf, topk]
    monkeypatch.setattr(leaf, "is_read", property(lambda _: not declared))
    if declared:
        with pytest.raises(
            MaskContractError,
            match=rf"False, .*::{readers[0]} \(node {readers[0]}\w*\) at .*\.py:\d+ reads",
        ):
            plan_of(leaf, topk)
    else:
        saved = mask_storage(FULL, BS, N, CONTEXT)[0] - mask_storage(layout, BS, N, CONTEXT)[0]
        with pytest.warns(UserWarning, match=f"nothing in the graph reads.*saves {saved} bytes"):
            plan_of(leaf, topk)


def test_rows_that_differ_have_other_readers() -> None:
    """Where two rows of the table claim different things, two graphs show why."""
    compared = 0
    for (leaf, topk), row in TABLE.items():
        for (other, other_topk), other_row in TABLE.items():
            # What is declared of reading, and what is read.
            if topk == other_topk and row[0::2] != other_row[0::2]:
                graphs = [
                    [(r.op, r.reads) for r in planned(x, topk).readers] for x in (leaf, other)
                ]
                assert graphs[0] != graphs[1], (leaf, other, topk)
                compared += 1
    assert compared > 20


@pytest.mark.parametrize("leaf", [leaf for leaf in LEAVES if not leaf.takes_trees])
def test_kernels_without_a_mask_verify_chains_alone(leaf: type[Any]) -> None:
    message = (
        f"topk must be 1 for the back end '{leaf.label}', whose kernels read no mask and verify "
        "chains alone, got 2: trees are verified, in grouped-query layers, by cpu, triton, "
        "triton-unified, flash-attention, flashinfer"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        leaf(config(2))
    with pytest.raises(ValueError, match="topk must be >= 1, got 0"):
        leaf(config(0))


@pytest.mark.parametrize("leaf", LEAVES)
def test_a_layer_of_another_kind_is_refused(leaf: type[Any]) -> None:
    empty = torch.empty(1)
    latent = Latent(empty, empty, empty, empty, 1.0)
    grouped = GroupedQuery(empty, empty, empty, 1.0)
    backend = leaf(config(1))
    layer = grouped if LayerKind.grouped_query not in backend.layer_kinds else latent
    batch = VerifyBatch(empty, 1, empty, empty.view(1, 1), empty, 0, empty, empty)
    metadata: Any = (batch, empty, empty) if leaf is FlashInferBackend else batch
    if leaf is LinearAttnBackend:
        metadata = backend.init_forward_metadata(batch)
    with pytest.raises(TypeError, match=rf"layer must be \w+ for .*'{leaf.label}', got \w+"):
        backend.forward_verify(layer, metadata)


@pytest.mark.parametrize("leaf", [leaf for leaf in LEAVES if leaf is not LinearAttnBackend])
def test_the_mask_has_one_address_and_the_planned_layout(leaf: type[Any]) -> None:
    backend: Any = leaf(config(1, max_context_len=32))
    assert leaf(config(1)).verify_mask is None
    backend.init_cuda_graph_state(5)
    mask = backend.verify_mask
    # The CPU's default, and that of an unread mask; but what is only read in full is full.
    default = FULL if backend.is_read and QLEN not in leaf.modes else QLEN
    assert mask.buffer.numel() == mask_storage(default, 5, N, 32)[0]
    assert (mask.max_bs, mask.mode, mask.is_read) == (5, default, backend.is_read)
    assert mask.buffer.dtype == backend.mask_dtype
    for fewer in (5, 3):
        backend.init_cuda_graph_state(fewer)
        assert backend.verify_mask is mask
    backend.init_cuda_graph_state(6)
    assert backend.verify_mask.max_bs == 6
    full: Any = leaf(config(1, max_context_len=32, tree_mask_mode=FULL))
    full.init_cuda_graph_state(5)
    assert full.verify_mask.buffer.numel() == 5 * N * (32 + N)


@pytest.mark.parametrize(
    "option", [{"is_draft_runner": True}, {"skip_prefill": True}, {"owns_mask": False}]
)
def test_who_verifies_nothing_owns_no_mask(option: dict[str, bool]) -> None:
    backend = CPUBackend(config(2, **option))
    backend.init_cuda_graph_state(5)
    assert backend.verify_mask is None


def test_the_chain_back_end_owns_nothing() -> None:
    CHAIN.init_cuda_graph_state(8)
    assert CHAIN.verify_mask is None
    assert not CHAIN.is_read
    assert CHAIN.verifier is CHAIN
    assert CHAIN.layer_kinds == frozenset(LayerKind)


def test_names_are_those_of_the_command_line() -> None:
    for name in BACKENDS:
        assert make_backend(name, config(1)).name.partition("(")[0] == name
    with pytest.raises(ValueError, match=r"backend must be one of cpu, triton, .*, got 'cuda'"):
        make_backend("cuda", config(1))


def test_a_model_of_other_layers_is_refused() -> None:
    model = SmallModel(SmallConfig(kinds=(LayerKind.latent, LayerKind.grouped_query)))
    message = (
        "backend must attend in grouped-query, latent layers for this model, got 'flashmla', "
        "which attends in latent"
    )
    for backend in ("flashmla", FlashMLABackend):
        with pytest.raises(ValueError, match=message):
            start_verifier(model, backend, config=config(1), max_bs=1, mask_mode=FULL)
    with pytest.raises(ValueError, match="got 'cpu', which attends in grouped-query"):
        start_verifier(model, None, config=config(1), max_bs=1, mask_mode=FULL)


@pytest.mark.parametrize("leaf", [TritonUnifiedBackend, FlashInferBackend])
def test_what_reads_prefixes_refuses_a_mask_without_them(leaf: type[Any]) -> None:
    message = rf"tree_mask_mode must be FULL_MASK for the back end '{leaf.label}', got QLEN_ONLY"
    with pytest.raises(ValueError, match=message):
        leaf(config(2, tree_mask_mode=QLEN))
    backend = leaf(config(2, max_context_len=32))
    lengths = torch.tensor([3])
    batch = VerifyBatch(
        torch.zeros(1, 1, dtype=torch.int32), 16, lengths, lengths + torch.arange(N).view(1, N),
        torch.ones(N * N, dtype=torch.bool), int(QLEN),
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        backend.init_forward_metadata(batch)


def test_flash_attention_refuses_windows_of_trees() -> None:
    backend = FlashAttentionBackend(config(2, max_context_len=32))
    mask = torch.ones(N * N, dtype=torch.bool)
    lengths = torch.tensor([3])
    positions = lengths.unsqueeze(1) + torch.arange(N)
    pages = torch.zeros(1, 1, dtype=torch.int32)
    batch = VerifyBatch(pages, 16, lengths, positions, mask, int(QLEN))
    side = torch.zeros(1, 16, 1, 8)
    layer = GroupedQuery(torch.zeros(1, N, 1, 8), side, side, 1.0, sliding_window=4)
    with pytest.raises(ValueError, match=r"sliding_window must be 0 for trees .*, got 4"):
        backend.forward_verify(layer, backend.init_forward_metadata(batch))


def test_a_plan_without_a_flipped_claim_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan_of(CPUBackend, 2)
