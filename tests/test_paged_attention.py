"""torchvm::paged_attention and merge_attention against plain loops in float64."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests import maskless_reference
from tests.maskless_cases import Paged, draw_paged
from torchvm.ops.paged_attention import merge_attention, paged_attention

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

OP = torch.ops.torchvm.paged_attention
LENGTHS = [0, 37, 1, 16, 3]
SEEN = [
    {"causal": False},
    {"causal": False, "cap": 0.5},
    {"causal": True},
    {"causal": True, "window": 1},
    {"causal": True, "window": 6, "cap": 2.0},
    {"causal": True, "window": 400},
]


def run(case: Paged) -> tuple[Tensor, Tensor]:
    return paged_attention(
        *case[:5], is_causal=case.is_causal, scale=case.scale,
        sliding_window=case.sliding_window, logit_cap=case.logit_cap,
    )  # fmt: skip


def check(case: Paged, found: tuple[Tensor, Tensor]) -> None:
    """Float32's error of sums, and one rounding of the output."""
    dtype = case.query.dtype
    out, lse = found
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert out.is_contiguous()
    assert lse.is_contiguous()
    want, sums = maskless_reference.paged_attention(*case)
    once = 0.51 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), want, rtol=once, atol=2e-6)
    torch.testing.assert_close(lse.double(), sums, rtol=0, atol=2e-6)


@pytest.mark.parametrize("seen", SEEN, ids=str)
@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_equals_plain_loops_rounded_once(
    dtype: torch.dtype, page_size: int, seen: dict[str, Any]
) -> None:
    case = draw_paged(LENGTHS, 5, dtype=dtype, page_size=page_size, seed=page_size, **seen)
    check(case, run(case))


@pytest.mark.parametrize(
    ("n", "heads", "kv_heads", "head_dim"),
    [(1, 1, 1, 1), (1, 8, 2, 3), (9, 3, 3, 33), (4, 5, 1, 8)],
)
@pytest.mark.parametrize("causal", [True, False])
def test_any_size(causal: bool, n: int, heads: int, kv_heads: int, head_dim: int) -> None:
    case = draw_paged(
        [3, 0, 11], n, causal=causal, heads=heads, kv_heads=kv_heads, head_dim=head_dim, seed=n
    )
    check(case, run(case))


def _tiny(length: int, **seen: Any) -> tuple[list[float], list[float]]:
    """Two queries, values 1, 2, 4 and 8 and every score log 2: means, and exp(lse)."""
    keys, values = torch.full((1, 4, 1, 1), math.log(2)), torch.tensor([1.0, 2, 4, 8])
    table = torch.zeros(1, 1, dtype=torch.int32)
    out, lse = paged_attention(
        torch.ones(1, 2, 1, 1), keys, values.view(1, 4, 1, 1), table, torch.tensor([length]),
        scale=1.0, **seen,
    )  # fmt: skip
    return out.flatten().tolist(), lse.exp().flatten().tolist()


@pytest.mark.parametrize(
    ("length", "seen", "means", "sums"),
    [
        (4, {"is_causal": False}, [15 / 4, 15 / 4], [8.0, 8.0]),
        (3, {"is_causal": False}, [7 / 3, 7 / 3], [6.0, 6.0]),
        (4, {"is_causal": True}, [7 / 3, 15 / 4], [6.0, 8.0]),
        (2, {"is_causal": True}, [1.0, 3 / 2], [2.0, 4.0]),
        (4, {"is_causal": True, "sliding_window": 2}, [3.0, 6.0], [4.0, 4.0]),
        (4, {"is_causal": True, "sliding_window": 1}, [4.0, 8.0], [2.0, 2.0]),
        # One position for two queries: it is the last one's, and the first stands before it.
        (1, {"is_causal": True}, [0.0, 1.0], [0.0, 2.0]),
        (0, {"is_causal": True}, [0.0, 0.0], [0.0, 0.0]),
        (0, {"is_causal": False}, [0.0, 0.0], [0.0, 0.0]),
        # log 2 through a cap of log 2 is log 2 * tanh 1.
        (1, {"is_causal": False, "logit_cap": math.log(2)}, [1.0] * 2, [2 ** math.tanh(1)] * 2),
    ],
)
def test_literal_cases(
    length: int, seen: dict[str, Any], means: list[float], sums: list[float]
) -> None:
    found, weights = _tiny(length, **seen)
    assert found == pytest.approx(means)
    assert weights == pytest.approx(sums)


def test_scores_far_from_zero() -> None:
    """Scores of -1000 and 1000: their exponentials underflow and overflow, their sums do not."""
    for score in (-1000.0, 1000.0):
        case = draw_paged([3], 1, causal=False, heads=1, kv_heads=1, head_dim=1)
        case.query.fill_(score)
        live = case.page_table[0, 0]
        case.k_cache[live] = 1.0
        out, lse = run(case._replace(scale=1.0))
        assert lse.item() == pytest.approx(score + math.log(3))
        assert out.item() == pytest.approx(case.v_cache[live, :3].mean().item())


def test_lengths_may_be_int32_and_inputs_strided() -> None:
    case = draw_paged(LENGTHS, 3)
    both = torch.cat([case.k_cache, case.v_cache], -1)
    strided = case._replace(
        query=case.query.transpose(1, 2).contiguous().transpose(1, 2),
        k_cache=both[..., :20],
        v_cache=both[..., 20:].transpose(1, 2).contiguous().transpose(1, 2),
        page_table=torch.stack([case.page_table, case.page_table], -1)[..., 0],
        kv_lens=case.kv_lens.int(),
    )
    for mine, other in zip(run(strided), run(case), strict=True):
        assert torch.equal(mine, other)
    with pytest.raises(ValueError, match=r"kv_lens must be torch\.int64, got torch\.int32"):
        OP(*strided)


@pytest.mark.parametrize("seen", [SEEN[1], SEEN[4]], ids=str)
@pytest.mark.parametrize("lengths", [[3, 0], []])
def test_opcheck(lengths: list[int], seen: dict[str, Any]) -> None:
    case = draw_paged(lengths, 3, **seen)
    torch.library.opcheck(OP.default, tuple(case))
    out, lse = run(case)
    assert (out.shape, lse.shape) == ((len(lengths), 3, 6, 20), (len(lengths), 3, 6))


def test_one_compile_serves_every_size() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def attend(*tensors: Tensor) -> Tensor:
        causal = OP(*tensors, True, 0.3, 4, 1.5)
        joined: Tensor = merge_attention(*causal, *OP(*tensors, False, 0.3))
        return joined

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend=backend, fullgraph=True, dynamic=True)
    # No two sizes of the first batch are equal, or they would be taken for the same symbol.
    for lengths, n, heads, head_dim in (([3, 9, 40, 1, 0], 7, 6, 20), ([2] * 9, 2, 8, 12)):
        case = draw_paged(lengths, n, heads=heads, head_dim=head_dim)
        assert torch.equal(compiled(*case[:5]), attend(*case[:5]))
    assert len(graphs) == 1


ERRORS: list[tuple[Callable[[Paged], dict[str, Any]], str]] = [
    (lambda c: {"query": c.query[0]}, "query must be 4-D"),
    (lambda c: {"query": c.query.double()}, "query must be one of float32, float16, bfloat16"),
    (lambda c: {"query": c.query[:, :0]}, "query must be of at least one draft token"),
    (lambda c: {"query": c.query[:, :, :5]}, "query must be of a multiple of k_cache's 2 heads"),
    (lambda c: {"k_cache": c.k_cache[0]}, "k_cache must be 4-D"),
    (lambda c: {"k_cache": c.k_cache.half()}, r"k_cache must be of query's dtype torch\.float32"),
    (lambda c: {"v_cache": c.v_cache[:1]}, "v_cache must be of k_cache's shape"),
    (lambda c: {"v_cache": c.v_cache.to("meta")}, "v_cache must be on cpu, got meta"),
    (lambda c: {"page_table": c.page_table.long()}, r"page_table must be torch\.int32"),
    (lambda c: {"page_table": c.page_table[:1]}, "page_table must be 2-D with query's 5 rows"),
    (lambda c: {"page_table": c.page_table[:, :9]}, "page_table must be of at least 10 columns"),
    (lambda c: {"page_table": c.page_table + 99}, r"page_table must be of page ids in \[0, "),
    (lambda c: {"kv_lens": c.kv_lens.float()}, r"kv_lens must be torch\.int64"),
    (lambda c: {"kv_lens": c.kv_lens[:, None]}, "kv_lens must be 1-D with query's 5 rows"),
    (lambda c: {"kv_lens": c.kv_lens - 1}, "kv_lens must be >= 0"),
    (lambda c: {"sliding_window": -1}, r"sliding_window must be >= 0"),
    (lambda c: {"logit_cap": -0.5}, r"logit_cap must be >= 0"),
    (
        lambda c: {"is_causal": False, "sliding_window": 2},
        "sliding_window must be 0 without is_causal, which places the queries, got 2",
    ),
]


@pytest.mark.parametrize(("change", "message"), ERRORS)
def test_errors_name_the_argument(change: Callable[[Paged], dict[str, Any]], message: str) -> None:
    case = draw_paged(LENGTHS, 3)
    with pytest.raises(ValueError, match=message):
        run(case._replace(**change(case)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_two_parts_joined_are_attention_to_all(dtype: torch.dtype) -> None:
    """Positions up to a cut and from it on, the cut in every place, both ends included."""
    whole = draw_paged([12, 12, 12], 2, causal=False, page_size=1, cap=3.0, dtype=dtype)
    want, _ = maskless_reference.paged_attention(*whole)
    for cut in ([0, 12, 5], [1, 11, 6]):
        first = whole._replace(kv_lens=torch.tensor(cut))
        rows = zip(whole.page_table.tolist(), cut, strict=True)
        table = torch.tensor([row[k:] + row[:k] for row, k in rows], dtype=torch.int32)
        second = whole._replace(page_table=table, kv_lens=12 - first.kv_lens)
        joined = merge_attention(*run(first), *run(second))
        assert joined.dtype == dtype
        # Each side is rounded, and their sum.
        bound = 1.1 * torch.finfo(dtype).eps
        torch.testing.assert_close(joined.double(), want, rtol=bound, atol=max(bound, 2e-6))
        swapped = merge_attention(*run(second), *run(first))
        assert torch.equal(swapped, joined)


def test_parts_that_are_empty_join_to_zeros_and_leave_the_other_as_it_is() -> None:
    case = draw_paged([0, 9], 3, causal=False)
    some, nothing = run(case), run(case._replace(kv_lens=torch.zeros(2, dtype=torch.int64)))
    assert torch.equal(nothing[0], torch.zeros_like(case.query))
    assert torch.equal(merge_attention(*some, *nothing), some[0])
    assert torch.equal(merge_attention(*nothing, *some), some[0])
    assert torch.equal(merge_attention(*nothing, *nothing), torch.zeros_like(case.query))


def test_weights_that_overflow_join_by_their_difference() -> None:
    """A side counts e times as much as another whose sum is e times smaller, at any size."""
    one, other = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1)
    share = math.e / (math.e + 1)
    for size in (-1e4, 0.0, 1e4):
        lse = torch.full((1, 1, 1), size)
        assert merge_attention(one, lse + 1, other, lse).item() == pytest.approx(share)
    assert merge_attention(one, lse, other, lse - 1e4).item() == 1.0
