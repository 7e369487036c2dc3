"""torchvm::mla_attention against plain loops in float64."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests import maskless_reference
from tests.maskless_cases import Mla, draw_mla
from torchvm.ops.mla_attention import mla_attention

if TYPE_CHECKING:
    from collections.abc import Callable

LENGTHS = [0, 7, 1, 16]


def run(case: Mla) -> torch.Tensor:
    return mla_attention(*case[:-1], scale=case.scale)


@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_equals_plain_loops_rounded_once(dtype: torch.dtype, page_size: int) -> None:
    case = draw_mla(LENGTHS, 3, dtype=dtype, page_size=page_size)
    out = run(case)
    assert out.dtype == dtype
    assert out.is_contiguous()
    once = 0.51 * torch.finfo(dtype).eps
    want = maskless_reference.mla_attention(*case)
    torch.testing.assert_close(out.double(), want, rtol=once, atol=1e-5)


@pytest.mark.parametrize(
    ("n", "heads", "rank", "rope"), [(1, 1, 1, 1), (1, 5, 8, 3), (9, 2, 33, 0), (4, 1, 2, 64)]
)
def test_any_size(n: int, heads: int, rank: int, rope: int) -> None:
    case = draw_mla([3, 0, 11], n, heads=heads, rank=rank, rope=rope, seed=n)
    want = maskless_reference.mla_attention(*case)
    torch.testing.assert_close(run(case).double(), want, rtol=0, atol=1e-5)


def test_a_small_case_by_hand() -> None:
    """Two committed and two draft tokens; a score of log 3 weighs three times a score of 0."""
    latents = torch.tensor([1.0, 2.0, 4.0, 8.0]).view(1, 4, 1)
    ropes = torch.tensor([0.0, 1.0, 0.0, 1.0]).view(1, 4, 1)
    case = Mla(
        torch.zeros(1, 2, 2, 1), torch.tensor([0.0, 1.0, 0.0, 1.0]).view(1, 2, 2, 1),
        latents, ropes, torch.zeros(1, 1, dtype=torch.int32), torch.tensor([2]), math.log(3),
    )  # fmt: skip
    expected = torch.tensor([[7 / 3, 11 / 5], [15 / 4, 35 / 8]])
    torch.testing.assert_close(run(case).view(2, 2), expected)


def test_lengths_may_be_int32_and_inputs_strided() -> None:
    case = draw_mla(LENGTHS, 3)
    both = torch.cat([case.latent_cache, case.rope_cache], -1)
    strided = case._replace(
        query_latent=case.query_latent.transpose(1, 2).contiguous().transpose(1, 2),
        latent_cache=both[..., :20],
        rope_cache=both[..., 20:],
        page_table=torch.stack([case.page_table, case.page_table], -1)[..., 0],
        seq_lens=case.seq_lens.int(),
    )
    assert torch.equal(run(strided), run(case))
    with pytest.raises(ValueError, match=r"seq_lens must be torch\.int64, got torch\.int32"):
        torch.ops.torchvm.mla_attention(*strided)


@pytest.mark.parametrize("lengths", [[3, 0], []])
def test_opcheck(lengths: list[int]) -> None:
    case = draw_mla(lengths or [1], 3)
    count = len(lengths)
    batch = case._replace(
        query_latent=case.query_latent[:count],
        query_rope=case.query_rope[:count],
        page_table=case.page_table[:count],
        seq_lens=case.seq_lens[:count],
    )
    torch.library.opcheck(torch.ops.torchvm.mla_attention.default, tuple(batch))
    assert run(batch).shape == (count, 3, 3, 20)


def test_one_compile_serves_every_size() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def attend(*case: Any) -> torch.Tensor:
        out: torch.Tensor = torch.ops.torchvm.mla_attention(*case, 0.3)
        return out

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend=backend, fullgraph=True, dynamic=True)
    # No two sizes of the first batch are equal, or they would be taken for the same symbol.
    for lengths, n, heads, rank in (([3, 9, 40, 1, 0], 7, 3, 20), ([2] * 9, 2, 5, 12)):
        case = draw_mla(lengths, n, heads=heads, rank=rank)
        assert torch.equal(compiled(*case[:-1]), run(case))
    assert len(graphs) == 1


ERRORS: list[tuple[Callable[[Mla], dict[str, Any]], str]] = [
    (lambda c: {"query_latent": c.query_latent[0]}, "query_latent must be 4-D, got"),
    (lambda c: {"query_latent": c.query_latent.double()}, "query_latent must be float32, float16"),
    (lambda c: {"query_latent": c.query_latent[:, :0]}, "query_latent must be of at least one"),
    (lambda c: {"query_rope": c.query_rope[:, :, :2]}, "query_rope must be of shape"),
    (lambda c: {"query_rope": c.query_rope.half()}, r"query_rope must be torch\.float32"),
    (lambda c: {"latent_cache": c.latent_cache[..., :3]}, "latent_cache must be of shape"),
    (lambda c: {"latent_cache": c.latent_cache[0]}, "latent_cache must be 3-D"),
    (lambda c: {"latent_cache": c.latent_cache[:, :0]}, "latent_cache must be of page_size >= 1"),
    (lambda c: {"rope_cache": c.rope_cache[:1]}, "rope_cache must be of shape"),
    (lambda c: {"rope_cache": c.rope_cache.to("meta")}, "rope_cache must be on cpu, got meta"),
    (lambda c: {"page_table": c.page_table.long()}, r"page_table must be torch\.int32"),
    (lambda c: {"page_table": c.page_table[:1]}, "page_table must be of shape"),
    (lambda c: {"page_table": c.page_table[:, :1]}, "page_table must be of at least"),
    (lambda c: {"page_table": c.page_table + 99}, r"page_table must be of page ids in \[0, "),
    (lambda c: {"seq_lens": c.seq_lens.float()}, r"seq_lens must be torch\.int64"),
    (lambda c: {"seq_lens": c.seq_lens - 1}, "seq_lens must be >= 0"),
]


@pytest.mark.parametrize(("change", "message"), ERRORS)
def test_errors_name_the_argument(change: Callable[[Mla], dict[str, Any]], message: str) -> None:
    case = draw_mla(LENGTHS, 3)
    with pytest.raises(ValueError, match=message):
        run(case._replace(**change(case)))
