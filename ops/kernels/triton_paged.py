"""GPU kernel of attention without a mask, with the logarithm of its sums."""

# Compile-time arguments are in capitals, as everywhere in Triton, whose decorator has no types.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from torchvm.ops.kernels.triton_launch import OPTIONS, device_of
from torchvm.ops.kernels.triton_softmax import (
    LOG2_E,
    NOTHING,
    accumulate,
    block_of,
    dense_rows,
    log_sum_of,
    mean_of,
    pages_of,
    tile_of,
    tile_shape,
)
from torchvm.ops.kernels.triton_tiles import tanh

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MOST_HEAD_DIM", "paged_attention", "paged_kernel", "paged_tile"]

MOST_HEAD_DIM = 512


@triton.jit(
    do_not_specialize=[
        "page_table", "kv_lens", "scale", "sliding_window", "logit_cap", "num_queries",
        "num_pages", "page_size", "max_pages",
    ]
)  # fmt: skip
def paged_kernel(
    query: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    page_table: tl.tensor,
    kv_lens: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    scale: tl.float32,
    sliding_window: tl.int64,
    logit_cap: tl.float32,
    num_queries: tl.int32,
    num_pages: tl.int32,
    page_size: tl.int32,
    max_pages: tl.int32,
    head_dim: tl.int32,
    k_page_stride: tl.int64,
    k_slot_stride: tl.int64,
    k_head_stride: tl.int64,
    v_page_stride: tl.int64,
    v_slot_stride: tl.int64,
    v_head_stride: tl.int64,
    GROUP: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Attend BLOCK_M rows of one request and kv head: a row is a query and one of its heads.

    The grid is (B, num_kv_heads, blocks of rows).

    Args:
        query: (B, n, num_kv_heads * GROUP, head_dim), contiguous as `out` and `lse`.
        k_cache: (num_pages, page_size, num_kv_heads, head_dim), the last dimension dense.
        v_cache: the values, likewise.
        page_table: int32 (B, max_pages).
        kv_lens: int64 (B,).
        out: like `query`, written.
        lse: float32 (B, n, num_kv_heads * GROUP), written.
        scale: factor on query times key.
        sliding_window: positions that a query sees, with HAS_WINDOW.
        logit_cap: soft cap of a score, with HAS_CAP.
        num_queries: n.
        num_pages: pages of the caches.
        page_size: positions of a page.
        max_pages: columns of the page table.
        head_dim: elements of a head.
        k_page_stride: elements from page to page; all strides count elements.
        k_slot_stride: from position to position.
        k_head_stride: from head to head.
        v_page_stride: from page to page.
        v_slot_stride: from position to position.
        v_head_stride: from head to head.
        GROUP: query heads of a kv head.
        IS_CAUSAL: the last query stands at the last position; otherwise all see all.
        HAS_WINDOW: whether there is a window; with IS_CAUSAL.
        HAS_CAP: whether there is a cap.
        BLOCK_M: rows of a program.
        BLOCK_T: positions of a tile.
        BLOCK_D: power of two, at least head_dim.
    """
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1).to(tl.int64)
    first_row = tl.program_id(2) * BLOCK_M
    row = first_row + tl.arange(0, BLOCK_M)
    num_rows = num_queries * GROUP
    live_row = row < num_rows
    head = kv_head * GROUP + row % GROUP
    place = (request * num_queries + row // GROUP) * (tl.num_programs(1) * GROUP) + head
    heads = tile_of(query, place * head_dim, live_row, head_dim, BLOCK_D)
    # No length is negative, and none so large that a position would wrap.
    length = tl.minimum(tl.maximum(tl.load(kv_lens + request), 0), 1 << 62)
    begin = tl.cast(0, tl.int64)
    end = length
    own = length - num_queries + row // GROUP
    if IS_CAUSAL:
        last_row = tl.minimum(first_row + BLOCK_M, num_rows) - 1
        end = length - num_queries + last_row // GROUP + 1
        if HAS_WINDOW:
            first = tl.maximum(length - num_queries + first_row // GROUP, 0)
            begin = tl.maximum(first - sliding_window + 1, 0)
    end = tl.minimum(end, max_pages.to(tl.int64) * page_size)
    page_table += request * max_pages
    k_cache += kv_head * k_head_stride
    v_cache += kv_head * v_head_stride
    factor = scale if HAS_CAP else scale * LOG2_E
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    largest = tl.full([BLOCK_M], NOTHING, tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    for start in range(begin, end, BLOCK_T):
        position = start + tl.arange(0, BLOCK_T).to(tl.int64)
        page, slot, live = pages_of(page_table, position, position < end, num_pages, page_size)
        offset = page * k_page_stride + slot * k_slot_stride
        keys = tile_of(k_cache, offset, live, head_dim, BLOCK_D)
        scores = tl.dot(heads, tl.trans(keys), input_precision="ieee") * factor
        if HAS_CAP:
            scores = tanh(scores / logit_cap) * (logit_cap * LOG2_E)
        visible = live[None, :] & live_row[:, None]
        if IS_CAUSAL:
            visible &= position[None, :] <= own[:, None]
        if HAS_WINDOW:
            visible &= own[:, None] - position[None, :] < sliding_window
        scores = tl.where(visible, scores, NOTHING)
        offset = page * v_page_stride + slot * v_slot_stride
        values = tile_of(v_cache, offset, live, head_dim, BLOCK_D)
        total, largest, weight = accumulate(scores, values, total, largest, weight)
    column = tl.arange(0, BLOCK_D)[None, :]
    tl.store(
        out + place[:, None] * head_dim + column,
        mean_of(total, weight).to(out.dtype.element_ty),
        mask=live_row[:, None] & (column < head_dim),
    )
    tl.store(lse + place, log_sum_of(largest, weight), mask=live_row)


def paged_tile(num_rows: int, head_dim: int, itemsize: int, *, is_hip: bool) -> dict[str, int]:
    """Compile-time sizes of a launch, its warps and stages.

    Args:
        num_rows: n times the query heads of a kv head.
        head_dim: elements of a head.
        itemsize: bytes of an element of the caches.
        is_hip: for an AMD GPU.
    """
    shape = tile_shape(num_rows, head_dim, itemsize, is_hip=is_hip)
    # Of 8 warps at 256 wide, ptxas keeps two programs a multiprocessor and spills for it.
    warps = {"num_warps": 4} if head_dim <= 256 else {}
    return {"BLOCK_D": block_of(head_dim)} | shape | warps


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    is_causal: bool,
    scale: float,
    sliding_window: int,
    logit_cap: float,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel; arguments are checked by the op.

    Args:
        query: (B, n, num_q_heads, head_dim).
        k_cache: (num_pages, page_size, num_kv_heads, head_dim).
        v_cache: like `k_cache`.
        page_table: (B, max_pages) int32.
        kv_lens: (B,) int64.
        is_causal: query i sees positions up to kv_len - n + i.
        scale: factor on query times key.
        sliding_window: 0 is no limit.
        logit_cap: 0 is no cap.
        out: like `query`, contiguous, written.
        lse: (B, n, num_q_heads) float32, contiguous, written.

    Returns:
        `out` and `lse`.
    """
    batch, n, num_heads, head_dim = query.shape
    if lse.numel() == 0:
        return out, lse
    num_pages, page_size, num_kv_heads, _ = k_cache.shape
    k_cache, v_cache = dense_rows(k_cache), dense_rows(v_cache)
    rows = n * (num_heads // num_kv_heads)
    is_hip = torch.version.hip is not None
    tile = paged_tile(rows, head_dim, query.element_size(), is_hip=is_hip)
    grid = (batch, num_kv_heads, triton.cdiv(rows, tile["BLOCK_M"]))
    with device_of(query):
        paged_kernel[grid](
            query.contiguous(), k_cache, v_cache, page_table.contiguous(), kv_lens.contiguous(),
            out, lse, scale, sliding_window, logit_cap, n, num_pages, page_size,
            page_table.shape[1], head_dim, *k_cache.stride()[:3], *v_cache.stride()[:3],
            GROUP=num_heads // num_kv_heads, IS_CAUSAL=is_causal, HAS_WINDOW=sliding_window > 0,
            HAS_CAP=logit_cap > 0, **tile, **OPTIONS,
        )  # fmt: skip
    return out, lse
