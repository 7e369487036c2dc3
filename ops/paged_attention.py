"""torchvm::paged_attention: attention that knows no masks, with the logarithm of its sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchvm.ops.checks import int64
from torchvm.ops.library import register_op
from torchvm.ops.paged import check_attention, check_options, check_pages, must_be

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["merge_attention", "paged_attention"]

_SCHEMA = (
    "paged_attention(Tensor query, Tensor k_cache, Tensor v_cache, Tensor page_table, "
    "Tensor kv_lens, bool is_causal, float scale, int sliding_window=0, float logit_cap=0.0) "
    "-> (Tensor output, Tensor lse)"
)


def _fake(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    is_causal: bool,
    scale: float,  # noqa: ARG001
    sliding_window: int = 0,
    logit_cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Output like the query, contiguous; lse (B, n, num_q_heads) float32."""
    check_attention(query, k_cache, v_cache, page_table, kv_lens, lengths_name="kv_lens")
    others = {"k_cache": k_cache, "v_cache": v_cache, "page_table": page_table, "kv_lens": kv_lens}
    for name, tensor in others.items():
        must_be(tensor.device == query.device, name, f"on {query.device}", tensor.device)
    check_options(sliding_window, logit_cap)
    must_be(
        is_causal or sliding_window == 0,
        "sliding_window", "0 without is_causal, which places the queries", sliding_window,
    )  # fmt: skip
    return query.new_empty(query.shape), query.new_empty(query.shape[:3], dtype=torch.float32)


def _cpu(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    is_causal: bool,
    scale: float,
    sliding_window: int = 0,
    logit_cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    from torchvm.ops.kernels import cpu_paged

    out, lse = _fake(
        query, k_cache, v_cache, page_table, kv_lens, is_causal, scale, sliding_window, logit_cap
    )
    lengths = kv_lens.tolist()
    pages = check_pages(
        page_table, lengths, 0, k_cache.shape[0], k_cache.shape[1], lengths_name="kv_lens"
    )
    return cpu_paged.paged_attention(
        query, k_cache, v_cache, pages, lengths, is_causal, scale, sliding_window, logit_cap,
        out, lse,
    )  # fmt: skip


def _cuda(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    is_causal: bool,
    scale: float,
    sliding_window: int = 0,
    logit_cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    from torchvm.ops.kernels import triton_paged

    out, lse = _fake(
        query, k_cache, v_cache, page_table, kv_lens, is_causal, scale, sliding_window, logit_cap
    )
    most = triton_paged.MOST_HEAD_DIM
    must_be(query.shape[3] <= most, "query", f"of head_dim <= {most} on a GPU", query.shape[3])
    return triton_paged.paged_attention(
        query, k_cache, v_cache, page_table, kv_lens, is_causal, scale, sliding_window, logit_cap,
        out, lse,
    )  # fmt: skip


_OP = register_op(_SCHEMA, fake=_fake, kernels={"CPU": _cpu, "CUDA": _cuda})


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    *,
    is_causal: bool,
    scale: float,
    sliding_window: int = 0,
    logit_cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attend the first `kv_lens` positions of each request, without any mask.

    Args:
        query: (B, n, num_q_heads, head_dim) float32, float16 or bfloat16; on a GPU
            head_dim <= 512.
        k_cache: (num_pages, page_size, num_kv_heads, head_dim), the query's dtype; num_q_heads is
            a multiple of num_kv_heads. A GPU copies a cache whose last dimension is strided.
        v_cache: like `k_cache`.
        page_table: (B, max_pages) int32, see `tree_attention`; entries past the last position are
            not looked at.
        kv_lens: (B,) int64 (int32 is converted), positions of each request, which may be fewer
            than n.
        is_causal: query i stands at position kv_len - n + i and sees up to it; otherwise every
            query sees all positions.
        scale: factor on query times key.
        sliding_window: with `is_causal`, only what lies less than this many positions before a
            query; 0 is no limit.
        logit_cap: c > 0 replaces a scaled score s by c * tanh(s / c).

    Returns:
        output like `query`, contiguous, zeros where nothing is seen; lse (B, n, num_q_heads)
        float32, the natural logarithm of the sum of exp(score), -inf where nothing is seen. Sums
        run in float32 and are rounded once; on a GPU the weights are rounded to the caches' dtype
        before they meet the values.

    Raises:
        ValueError: for a shape, dtype or device that does not fit, and on the CPU for a negative
            length, too few pages or a page id out of range. A GPU attends to no such position.
    """
    output, lse = _OP(
        query, k_cache, v_cache, page_table, int64(kv_lens), is_causal, scale, sliding_window,
        logit_cap,
    )  # fmt: skip
    return output, lse


def merge_attention(
    output: Tensor, lse: Tensor, other_output: Tensor, other_lse: Tensor
) -> Tensor:
    """Join attention over two disjoint sets of positions.

    Args:
        output: (..., heads, head_dim) over the one set.
        lse: (..., heads) float32, as `paged_attention` returns it.
        other_output: over the other set.
        other_lse: likewise.

    Returns:
        Like `output`: weights exp(lse) of each side, in float32, rounded once.
    """
    top = torch.maximum(lse, other_lse)
    # Both sides may be empty: exp(-inf - -inf) is no number.
    top = torch.where(top == -torch.inf, 0.0, top)
    weight, other_weight = torch.exp(lse - top), torch.exp(other_lse - top)
    total = (weight + other_weight).clamp_min(torch.finfo(torch.float32).tiny)
    joined = output.float() * (weight / total).unsqueeze(-1) + other_output.float() * (
        other_weight / total
    ).unsqueeze(-1)
    return joined.to(output.dtype)
