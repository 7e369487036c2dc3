"""torchvm::pack_mask_bits: a FULL_MASK as bits, each request starting on a byte."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import torchvm
from tests.prefix_reference import bits, draw_batch, full_mask
from torchvm import MaskRead, PackedMask, Reason, TreeMaskMode, pack_mask_bits
from torchvm.ops.contracts import mask_readers
from torchvm.ops.layout import packed_bits_numel, packed_bits_offsets
from torchvm.testing import check_mask_contract

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

OP = torch.ops.torchvm.pack_mask_bits


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
@pytest.mark.parametrize(
    ("lengths", "n"),
    [([5, 0, 12], 3), ([0], 1), ([7], 1), ([8, 8], 2), ([3, 1, 0, 40], 9), ([100], 65), ([], 4)],
)
def test_equals_the_reference(lengths: list[int], n: int, dtype: torch.dtype) -> None:
    batch = draw_batch(lengths, n)
    octets, offsets = bits(batch)
    mask = full_mask(batch, dtype, spare=9)
    for context in (max(lengths, default=0), 100):
        found = pack_mask_bits(mask, batch.seq_lens, num_draft_tokens=n, max_context_len=context)
        assert isinstance(found, PackedMask)
        size = len(lengths) * -(-n * (context + n) // 8)
        assert found.packed_mask.dtype is torch.uint8
        assert found.packed_mask.tolist() == octets + [0] * (size - len(octets))
        assert found.mask_indptr.dtype is torch.int64
        assert found.mask_indptr.tolist() == offsets


def test_literal_case() -> None:
    """Rows 110 and 101 are bits 3 and 5 of one byte: 0b101011; rows 01000 and 10001 are ten."""
    cells = [1, 1, 0, 1, 0, 1, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1]
    mask = torch.tensor([*cells, 1, 1, 1], dtype=torch.bool)
    packed, indptr = pack_mask_bits(
        mask, torch.tensor([1, 3]), num_draft_tokens=2, max_context_len=5
    )
    assert packed.tolist() == [0b101011, 0b00100010, 0b10, 0]
    assert indptr.tolist() == [0, 1, 3]


def test_sizes() -> None:
    assert packed_bits_numel(2, 3, 5) == 6
    assert packed_bits_numel(1, 8, 1 << 20) == 1_048_584
    assert packed_bits_numel(0, 8, 9) == 0
    assert packed_bits_numel(256, 64, 1 << 24) == 256 * 8 * ((1 << 24) + 64)
    assert packed_bits_offsets(torch.tensor([5, 0, 12]), 3).tolist() == [0, 3, 5, 11]
    assert packed_bits_offsets(torch.tensor([], dtype=torch.int64), 3).tolist() == [0]


@pytest.mark.parametrize("lengths", [[3, 0], [2], []])
def test_opcheck(lengths: list[int]) -> None:
    batch = draw_batch(lengths, 3)
    torch.library.opcheck(OP.default, (full_mask(batch), batch.seq_lens, 3, 7))


def test_one_compile_serves_every_size() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def run(mask: Tensor, seq_lens: Tensor, n: int, context: int) -> list[Tensor]:
        packed, indptr = OP(mask, seq_lens, n, context)
        return [packed.to(torch.int64) * 2, indptr]

    torch._dynamo.reset()
    compiled = torch.compile(run, backend=backend, fullgraph=True, dynamic=True)
    for lengths, n, context in (([3, 9, 40], 9, 50), ([2, 8, 5, 4, 0], 7, 8), ([20] * 4, 11, 21)):
        batch = draw_batch(lengths, n)
        args = (full_mask(batch), batch.seq_lens, n, context)
        assert all(map(torch.equal, compiled(*args), run(*args)))
    assert len(graphs) == 1


def test_contract_says_full_and_holds() -> None:
    (reader,) = mask_readers("torchvm::pack_mask_bits")
    assert (reader.arg, reader.mode_arg, reader.causal_arg) == ("tree_mask", None, None)
    assert reader.read({}) is MaskRead.FULL
    assert reader.modes == {TreeMaskMode.FULL_MASK}
    batch = draw_batch([5, 0, 3], 4)
    for dtype in (torch.bool, torch.uint8):
        check_mask_contract(
            OP, (full_mask(batch, dtype), batch.seq_lens, 4, 6), {}, mask_arg="tree_mask",
            seq_lens=batch.seq_lens, num_draft_tokens=4, tree_mask_mode=0,
        )  # fmt: skip


def test_every_live_cell_is_a_bit_and_no_other() -> None:
    batch = draw_batch([3, 2], 2)
    mask = full_mask(batch, spare=6)
    expected, indptr = OP(mask, batch.seq_lens, 2, 9)
    for cell in range(len(mask)):
        changed = mask.clone()
        changed[cell] = not changed[cell]
        flipped = OP(changed, batch.seq_lens, 2, 9)[0] ^ expected
        request = int(cell >= 10)
        bit = cell - 10 * request
        want = [0] * len(expected)
        if cell < 18:
            want[int(indptr[request]) + bit // 8] = 1 << bit % 8
        assert flipped.tolist() == want


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_compiled_graph_keeps_the_full_mask(inner: str) -> None:
    batch = draw_batch([9, 4], 3)

    def step(parents: Tensor, *tensors: Tensor) -> Tensor:
        bs, n = parents.shape
        mask = torchvm.alloc_verify_mask(bs, n, 20, 0)
        torch.ops.torchvm.build_tree_from_parents(parents, tensors[4], mask, n, 0)
        out: Tensor = torch.ops.torchvm.packed_attention(
            *tensors, *OP(mask, tensors[4], n, 20), 0.3
        )
        return out

    parents = torch.tensor([[0, 0, 0], [0, 0, 1]])
    torch._dynamo.reset()
    torchvm.clear_reports()
    compiled = torch.compile(step, backend="torchvm", fullgraph=True, options={"inner": inner})
    assert torch.equal(compiled(parents, *batch.tensors), step(parents, *batch.tensors))
    (report,) = torchvm.reports()
    assert report.verdict is Reason.FULL_READ
    assert report.final_mode is report.declared_mode is TreeMaskMode.FULL_MASK
    assert report.final_bytes == report.declared_bytes == 2 * 3 * 23
    assert [(r.op, r.reads) for r in report.readers] == [
        ("torchvm::pack_mask_bits", MaskRead.FULL)
    ]


def test_int32_lengths_are_converted_by_the_function_and_refused_by_the_op() -> None:
    batch = draw_batch([5, 3], 3)
    mask, lengths = full_mask(batch), batch.seq_lens.int()
    found = pack_mask_bits(mask, lengths, num_draft_tokens=3, max_context_len=5)
    assert all(map(torch.equal, found, OP(mask, batch.seq_lens, 3, 5)))
    with pytest.raises(ValueError, match=r"seq_lens must be torch\.int64, got torch\.int32"):
        OP(mask, lengths, 3, 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_draft_tokens": 0}, "num_draft_tokens must be >= 1, got 0"),
        ({"max_context_len": -1}, "max_context_len must be >= 0, got -1"),
        ({"max_context_len": 4}, "max_context_len must be >= all seq_lens, of which one is 5"),
        ({"seq_lens": torch.tensor([5, -1])}, r"seq_lens must be >= 0, got \[5, -1\]"),
        ({"seq_lens": torch.tensor([[5, 3]])}, "seq_lens must be 1-D"),
        ({"seq_lens": torch.tensor([5.0, 3])}, "seq_lens must be torch.int64"),
        ({"tree_mask": torch.ones(42)}, "tree_mask must be torch.bool or torch.uint8"),
        ({"tree_mask": torch.ones(6, 7) > 0}, "tree_mask must be 1-D"),
        ({"tree_mask": torch.ones(17) > 0}, "tree_mask must be of at least 18 elements"),
        ({"tree_mask": torch.ones(41) > 0}, "tree_mask must be of at least 42 elements"),
        ({"tree_mask": (torch.ones(90) > 0)[::2]}, "tree_mask must be contiguous"),
    ],
)
def test_errors_say_what_was_expected_and_what_came(changes: dict[str, Any], message: str) -> None:
    batch = draw_batch([5, 3], 3)
    given = {
        "tree_mask": full_mask(batch), "seq_lens": batch.seq_lens, "num_draft_tokens": 3,
        "max_context_len": 5,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        pack_mask_bits(**{**given, **changes})
