"""torchvm::sparse_window_attention against plain loops in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests import maskless_reference
from tests.maskless_cases import Sparse, draw_sparse
from torchvm.ops.sparse_attention import sparse_window_attention

if TYPE_CHECKING:
    from collections.abc import Callable

LENGTHS = [0, 23, 1, 8]


def run(case: Sparse) -> torch.Tensor:
    return sparse_window_attention(
        *case[:-2], scale=case.scale, sliding_window=case.sliding_window
    )


@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_equals_plain_loops_rounded_once(dtype: torch.dtype, page_size: int) -> None:
    case = draw_sparse(LENGTHS, 3, dtype=dtype, page_size=page_size)
    # A page before the window has been given back.
    assert (case.page_table[1, 0] == -7) == (page_size < 16)
    out = run(case)
    assert out.dtype == dtype
    assert out.is_contiguous()
    once = 0.51 * torch.finfo(dtype).eps
    want = maskless_reference.sparse_window_attention(*case)
    torch.testing.assert_close(out.double(), want, rtol=once, atol=1e-5)


@pytest.mark.parametrize("window", [1, 2, 7, 1000])
@pytest.mark.parametrize("num_selected", [0, 1, 6])
def test_any_window_and_any_number_of_blocks(window: int, num_selected: int) -> None:
    case = draw_sparse(
        LENGTHS, 4, window=window, num_selected=num_selected, heads=3, kv_heads=3, seed=window
    )
    want = maskless_reference.sparse_window_attention(*case)
    torch.testing.assert_close(run(case).double(), want, rtol=0, atol=1e-5)


def test_nodes_may_stand_at_any_positions() -> None:
    case = draw_sparse([12, 9], 4, window=13)
    moved = case._replace(positions=torch.tensor([[12, 3, 15, 3], [0, 12, 5, 9]]))
    want = maskless_reference.sparse_window_attention(*moved)
    torch.testing.assert_close(run(moved).double(), want, rtol=0, atol=1e-5)


def test_a_small_case_by_hand() -> None:
    """Scores are all equal, so that a node gets the mean of what it sees."""
    values = torch.tensor([1.0, 2.0, 4.0, 8.0]).view(1, 4, 1, 1)
    made = torch.tensor([100.0, 1000.0]).view(1, 2, 1, 1)
    case = Sparse(
        torch.zeros(1, 3, 1, 1), values, values, torch.zeros(1, 1, dtype=torch.int32),
        torch.tensor([[0, 2, 3]]), made, made,
        torch.tensor([[[-1, -1], [1, -1], [1, 0]]], dtype=torch.int32), 1.0, 2,
    )  # fmt: skip
    expected = torch.tensor([1.0, 1006 / 3, 1112 / 4])
    torch.testing.assert_close(run(case).flatten(), expected)


def test_inputs_may_be_strided_and_positions_int32() -> None:
    case = draw_sparse(LENGTHS, 3)
    strided = case._replace(
        query=case.query.transpose(1, 2).contiguous().transpose(1, 2),
        k_cache=case.k_cache.transpose(1, 2).contiguous().transpose(1, 2),
        compressed_v=case.compressed_v.transpose(0, 1).contiguous().transpose(0, 1),
        selected=torch.stack([case.selected, case.selected], -1)[..., 0],
        positions=case.positions.int(),
    )
    assert torch.equal(run(strided), run(case))
    with pytest.raises(ValueError, match=r"positions must be torch\.int64, got torch\.int32"):
        torch.ops.torchvm.sparse_window_attention(*strided)


@pytest.mark.parametrize("lengths", [[3, 0], []])
def test_opcheck(lengths: list[int]) -> None:
    case = draw_sparse(lengths or [1], 3)
    count = len(lengths)
    shared = ("k_cache", "v_cache", "scale", "sliding_window")
    batch = case._replace(
        **{name: part[:count] for name, part in case._asdict().items() if name not in shared}
    )
    torch.library.opcheck(torch.ops.torchvm.sparse_window_attention.default, tuple(batch))
    assert run(batch).shape == (count, 3, 6, 20)


def test_one_compile_serves_every_size() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def attend(*case: Any) -> torch.Tensor:
        out: torch.Tensor = torch.ops.torchvm.sparse_window_attention(*case, 0.3, 5)
        return out

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend=backend, fullgraph=True, dynamic=True)
    # No two sizes of the first batch are equal, or they would be taken for the same symbol.
    for lengths, n, blocks, named in (([3, 9, 40, 1, 0], 7, 11, 3), ([2] * 9, 2, 5, 6)):
        case = draw_sparse(lengths, n, num_blocks=blocks, num_selected=named, page_size=8)
        assert torch.equal(compiled(*case[:-2]), run(case))
    assert len(graphs) == 1


ERRORS: list[tuple[Callable[[Sparse], dict[str, Any]], str]] = [
    (lambda c: {"query": c.query[0]}, "query must be 4-D"),
    (lambda c: {"query": c.query[:, :, :5]}, "multiple of k_cache's 2 heads"),
    (lambda c: {"v_cache": c.v_cache[:1]}, "v_cache must be of k_cache's shape"),
    (lambda c: {"v_cache": c.v_cache.to("meta")}, "v_cache must be on cpu, got meta"),
    (lambda c: {"page_table": c.page_table.long()}, r"page_table must be torch\.int32"),
    (lambda c: {"page_table": c.page_table[0]}, "page_table must be 2-D"),
    (lambda c: {"page_table": c.page_table[:, :3]}, r"positions must be in \[0, 12\), which"),
    (lambda c: {"page_table": c.page_table + 99}, r"page_table must be of page ids in \[0, "),
    (lambda c: {"positions": c.positions[:, :2]}, "positions must be of shape"),
    (lambda c: {"positions": c.positions - 1}, r"positions must be in \[0, .* from -1 to 24"),
    (lambda c: {"compressed_k": c.compressed_k[..., :3]}, "compressed_k must be of shape"),
    (lambda c: {"compressed_v": c.compressed_v[:, :3]}, "compressed_v must be of shape"),
    (lambda c: {"compressed_v": c.compressed_v.half()}, r"compressed_v must be torch\.float32"),
    (lambda c: {"selected": c.selected.long()}, r"selected must be torch\.int32"),
    (lambda c: {"selected": c.selected[:, 0]}, "selected must be 3-D"),
    (lambda c: {"selected": c.selected - 1}, r"selected must be -1 or in \[0, 9\), got"),
    (lambda c: {"selected": c.selected.clamp(min=9)}, r"selected must be -1 or in \[0, 9\), got"),
    (lambda c: {"sliding_window": 0}, "sliding_window must be >= 1, got 0"),
]


@pytest.mark.parametrize(("change", "message"), ERRORS)
def test_errors_name_the_argument(
    change: Callable[[Sparse], dict[str, Any]], message: str
) -> None:
    case = draw_sparse(LENGTHS, 3)
    with pytest.raises(ValueError, match=message):
        run(case._replace(**change(case)))
