"""torchvm::sparse_window_attention: a window and selected blocks, by position, with no mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchvm.ops.checks import check_tensor, int64
from torchvm.ops.library import register_op
from torchvm.ops.paged import check_caches, must_be

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["sparse_window_attention"]

_SCHEMA = (
    "sparse_window_attention(Tensor query, Tensor k_cache, Tensor v_cache, Tensor page_table, "
    "Tensor positions, Tensor compressed_k, Tensor compressed_v, Tensor selected, float scale, "
    "int sliding_window) -> Tensor"
)


def _check(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    positions: Tensor,
    compressed_k: Tensor,
    compressed_v: Tensor,
    selected: Tensor,
    sliding_window: int,
) -> None:
    """Check dtypes, shapes and devices; positions, page ids and block indices are data."""
    check_caches(query, k_cache, v_cache)
    must_be(sliding_window >= 1, "sliding_window", ">= 1", sliding_window)
    names = ("page_table", "compressed_k", "selected")
    tensors = (page_table, compressed_k, selected)
    for name, tensor, dims in zip(names, tensors, (2, 4, 3), strict=True):
        must_be(tensor.dim() == dims, name, f"{dims}-D", list(tensor.shape))
    device, dtype = query.device, query.dtype
    batch, n, _, head_dim = query.shape
    blocks = (batch, compressed_k.shape[1], k_cache.shape[2], head_dim)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        must_be(cache.device == device, name, f"on {device}", cache.device)
    check_tensor("page_table", page_table, device, batch, page_table.shape[1], dtype=torch.int32)
    check_tensor("positions", positions, device, batch, n)
    check_tensor("compressed_k", compressed_k, device, *blocks, dtype=dtype)
    check_tensor("compressed_v", compressed_v, device, *blocks, dtype=dtype)
    check_tensor("selected", selected, device, batch, n, selected.shape[2], dtype=torch.int32)


def _fake(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    positions: Tensor,
    compressed_k: Tensor,
    compressed_v: Tensor,
    selected: Tensor,
    scale: float,  # noqa: ARG001
    sliding_window: int,
) -> Tensor:
    """Contiguous, of the query's shape and dtype."""
    _check(
        query, k_cache, v_cache, page_table, positions, compressed_k, compressed_v, selected,
        sliding_window,
    )  # fmt: skip
    return query.new_empty(query.shape)


def _cpu(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    positions: Tensor,
    compressed_k: Tensor,
    compressed_v: Tensor,
    selected: Tensor,
    scale: float,
    sliding_window: int,
) -> Tensor:
    from torchvm.ops.kernels import cpu_sparse

    _check(
        query, k_cache, v_cache, page_table, positions, compressed_k, compressed_v, selected,
        sliding_window,
    )  # fmt: skip
    _check_windows(page_table, positions, k_cache.shape[0], k_cache.shape[1], sliding_window)
    num_blocks = compressed_k.shape[1]
    inside = ((selected >= -1) & (selected < num_blocks)).all()
    must_be(bool(inside), "selected", f"-1 or in [0, {num_blocks})", selected.tolist())
    return cpu_sparse.sparse_window_attention(
        query, (k_cache, v_cache), (compressed_k, compressed_v), page_table, positions.tolist(),
        selected.tolist(), scale, sliding_window,
    )  # fmt: skip


def _cuda(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    positions: Tensor,
    compressed_k: Tensor,
    compressed_v: Tensor,
    selected: Tensor,
    scale: float,
    sliding_window: int,
) -> Tensor:
    from torchvm.ops.kernels import triton_sparse

    _check(
        query, k_cache, v_cache, page_table, positions, compressed_k, compressed_v, selected,
        sliding_window,
    )  # fmt: skip
    most, width = triton_sparse.MOST_HEAD_DIM, query.shape[3]
    must_be(width <= most, "query", f"of head_dim <= {most} on a GPU", width)
    return triton_sparse.sparse_window_attention(
        query, (k_cache, v_cache), (compressed_k, compressed_v), page_table, positions, selected,
        scale, sliding_window,
    )  # fmt: skip


_OP = register_op(_SCHEMA, fake=_fake, kernels={"CPU": _cpu, "CUDA": _cuda})


def sparse_window_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    positions: Tensor,
    compressed_k: Tensor,
    compressed_v: Tensor,
    selected: Tensor,
    *,
    scale: float,
    sliding_window: int,
) -> Tensor:
    """Attend each node to the positions just before it and to compressed blocks selected for it.

    In the manner of DeepSeek-V4's sparse attention: node i of request b sees the positions p with
    positions[b, i] - sliding_window < p <= positions[b, i] of the caches, and the entries
    selected[b, i] of the compressed keys and values, each of which the caller made out of a
    block of committed tokens. One softmax runs over both.

    What a node sees follows from its position alone and no mask is read. Siblings share a
    position, and so an entry of the cache: only chains can be verified with this op.

    Args:
        query: (B, n, num_q_heads, head_dim) float32, float16 or bfloat16; on a GPU head_dim <=
            512.
        k_cache: (num_pages, page_size, num_kv_heads, head_dim), the query's dtype; num_q_heads is
            a multiple of num_kv_heads. The draft tokens' keys already stand at their positions.
        v_cache: like `k_cache`.
        page_table: (B, max_pages) int32; entry p of row b is the page that holds positions
            p * page_size and on. Entries of pages outside the windows are not looked at.
        positions: (B, n) int64 (int32 is converted), position of each node, >= 0.
        compressed_k: (B, max_blocks, num_kv_heads, head_dim), the query's dtype.
        compressed_v: like `compressed_k`.
        selected: (B, n, S) int32, indices of compressed blocks, -1 for none; a block that is
            named twice counts twice.
        scale: factor on query times key.
        sliding_window: how many positions a node sees, its own included, >= 1.

    Returns:
        Like `query`, contiguous. Sums run in float32 and are rounded once; on a GPU the weights
        are rounded to the caches' dtype before they meet the values.

    Raises:
        ValueError: for a shape, dtype, device or window that does not fit, and on the CPU for a
            position, page id or block index out of range. A GPU attends to no such entry.
    """
    out: Tensor = _OP(
        query, k_cache, v_cache, page_table, int64(positions), compressed_k, compressed_v,
        selected, scale, sliding_window,
    )  # fmt: skip
    return out


def _check_windows(
    page_table: Tensor, positions: Tensor, num_pages: int, page_size: int, sliding_window: int
) -> None:
    """Require that every position of every window lies in a page that exists."""
    if positions.numel() == 0:
        return
    first, last = (int(end) for end in positions.aminmax())
    held = page_table.shape[1] * page_size
    must_be(
        first >= 0 and last < held, "positions",
        f"in [0, {held}), which the page table's {page_table.shape[1]} columns of {page_size} "
        "hold,", f"positions from {first} to {last}",
    )  # fmt: skip
    columns = torch.arange(page_table.shape[1])
    begins = (positions - sliding_window + 1).clamp(min=0) // page_size
    ends = positions // page_size
    looked_at = (begins[..., None] <= columns) & (columns <= ends[..., None])
    ids = page_table[looked_at.any(1)]
    lowest, highest = (int(end) for end in ids.aminmax())
    must_be(
        lowest >= 0 and highest < num_pages, "page_table",
        f"of page ids in [0, {num_pages})", f"ids from {lowest} to {highest}",
    )  # fmt: skip
