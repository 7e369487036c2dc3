"""GPU kernel of attention to a window of positions and to selected compressed blocks."""

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
    mean_of,
    pages_of,
    tile_of,
    tile_shape,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MOST_HEAD_DIM", "sparse_kernel", "sparse_tile", "sparse_window_attention"]

MOST_HEAD_DIM = 512


@triton.jit(
    do_not_specialize=[
        "scale", "sliding_window", "num_draft_tokens", "num_kv_heads", "group", "num_pages",
        "page_size", "max_pages", "max_blocks", "num_selected",
    ]
)  # fmt: skip
def sparse_kernel(
    query: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    compressed_k: tl.tensor,
    compressed_v: tl.tensor,
    page_table: tl.tensor,
    positions: tl.tensor,
    selected: tl.tensor,
    out: tl.tensor,
    scale: tl.float32,
    sliding_window: tl.int64,
    num_draft_tokens: tl.int32,
    num_kv_heads: tl.int32,
    group: tl.int32,
    num_pages: tl.int32,
    page_size: tl.int32,
    max_pages: tl.int32,
    max_blocks: tl.int32,
    num_selected: tl.int32,
    head_dim: tl.int32,
    k_page_stride: tl.int64,
    k_slot_stride: tl.int64,
    k_head_stride: tl.int64,
    v_page_stride: tl.int64,
    v_slot_stride: tl.int64,
    v_head_stride: tl.int64,
    ck_request_stride: tl.int64,
    ck_block_stride: tl.int64,
    ck_head_stride: tl.int64,
    cv_request_stride: tl.int64,
    cv_block_stride: tl.int64,
    cv_head_stride: tl.int64,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Attend up to BLOCK_M query heads of one node that share a key head.

    Args:
        query: (B, n, num_kv_heads * group, head_dim), contiguous as `out`.
        k_cache: (num_pages, page_size, num_kv_heads, head_dim), as `v_cache`; the last dimension
            of it and of the next three is dense.
        v_cache: the values.
        compressed_k: (B, max_blocks, num_kv_heads, head_dim), as `compressed_v`.
        compressed_v: the values.
        page_table: int32 (B, max_pages).
        positions: int64 (B, n).
        selected: int32 (B, n, num_selected).
        out: like `query`, written.
        scale: factor on query times key.
        sliding_window: positions that a node sees, its own included.
        num_draft_tokens: n.
        num_kv_heads: heads of the caches.
        group: query heads of a key head.
        num_pages: pages of the caches.
        page_size: positions of a page.
        max_pages: columns of the page table.
        max_blocks: compressed blocks of a request.
        num_selected: blocks named for a node.
        head_dim: elements of a head.
        k_page_stride: elements from page to page; all strides count elements.
        k_slot_stride: from position to position.
        k_head_stride: from head to head.
        v_page_stride: from page to page.
        v_slot_stride: from position to position.
        v_head_stride: from head to head.
        ck_request_stride: from request to request.
        ck_block_stride: from block to block.
        ck_head_stride: from head to head.
        cv_request_stride: from request to request.
        cv_block_stride: from block to block.
        cv_head_stride: from head to head.
        BLOCK_M: query heads of a program.
        BLOCK_T: positions or blocks of a tile.
        BLOCK_D: power of two, at least head_dim.
    """
    num_tiles = tl.cdiv(group, BLOCK_M)
    within = tl.program_id(0) % num_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    kv_head = (tl.program_id(0) // num_tiles % num_kv_heads).to(tl.int64)
    node = (tl.program_id(0) // num_tiles // num_kv_heads).to(tl.int64)
    request = node // num_draft_tokens
    live_row = within < group
    place = (node * num_kv_heads + kv_head) * group + within
    heads = tile_of(query, place * head_dim, live_row, head_dim, BLOCK_D)
    factor = scale * LOG2_E
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    largest = tl.full([BLOCK_M], NOTHING, tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    own = tl.load(positions + node)
    end = tl.minimum(own, max_pages.to(tl.int64) * page_size - 1) + 1
    for start in range(tl.maximum(own - sliding_window + 1, 0), end, BLOCK_T):
        position = start + tl.arange(0, BLOCK_T).to(tl.int64)
        page, slot, live = pages_of(
            page_table + request * max_pages, position, position < end, num_pages, page_size
        )
        offset = page * k_page_stride + slot * k_slot_stride + kv_head * k_head_stride
        keys = tile_of(k_cache, offset, live, head_dim, BLOCK_D)
        scores = tl.dot(heads, tl.trans(keys), input_precision="ieee") * factor
        offset = page * v_page_stride + slot * v_slot_stride + kv_head * v_head_stride
        values = tile_of(v_cache, offset, live, head_dim, BLOCK_D)
        scores = tl.where(live[None, :], scores, NOTHING)
        total, largest, weight = accumulate(scores, values, total, largest, weight)
    compressed_k += request * ck_request_stride + kv_head * ck_head_stride
    compressed_v += request * cv_request_stride + kv_head * cv_head_stride
    for start in range(0, num_selected, BLOCK_T):
        entry = start + tl.arange(0, BLOCK_T)
        named = selected + node * num_selected + entry
        block = tl.load(named, mask=entry < num_selected, other=-1).to(tl.int64)
        live = (block >= 0) & (block < max_blocks)
        block = tl.where(live, block, 0)
        keys = tile_of(compressed_k, block * ck_block_stride, live, head_dim, BLOCK_D)
        scores = tl.dot(heads, tl.trans(keys), input_precision="ieee") * factor
        values = tile_of(compressed_v, block * cv_block_stride, live, head_dim, BLOCK_D)
        scores = tl.where(live[None, :], scores, NOTHING)
        total, largest, weight = accumulate(scores, values, total, largest, weight)
    column = tl.arange(0, BLOCK_D)[None, :]
    tl.store(
        out + place[:, None] * head_dim + column,
        mean_of(total, weight).to(out.dtype.element_ty),
        mask=live_row[:, None] & (column < head_dim),
    )


def sparse_tile(group: int, head_dim: int, itemsize: int, *, is_hip: bool) -> dict[str, int]:
    """Compile-time sizes of a launch, its warps and stages.

    Args:
        group: query heads of a key head.
        head_dim: elements of a head.
        itemsize: bytes of an element of the caches.
        is_hip: for an AMD GPU.
    """
    return {"BLOCK_D": block_of(head_dim)} | tile_shape(group, head_dim, itemsize, is_hip=is_hip)


def sparse_window_attention(
    query: Tensor,
    caches: tuple[Tensor, Tensor],
    compressed: tuple[Tensor, Tensor],
    page_table: Tensor,
    positions: Tensor,
    selected: Tensor,
    scale: float,
    sliding_window: int,
) -> Tensor:
    """Launch the kernel, a program a node, key head and BLOCK_M query heads of it.

    Args:
        query: (B, n, num_q_heads, head_dim).
        caches: keys and values, (num_pages, page_size, num_kv_heads, head_dim) each.
        compressed: keys and values of blocks, (B, max_blocks, num_kv_heads, head_dim) each.
        page_table: (B, max_pages) int32.
        positions: (B, n) int64.
        selected: (B, n, S) int32, blocks of each node, -1 for none.
        scale: factor on query times key.
        sliding_window: positions that a node sees, its own included.

    Returns:
        Like `query`, contiguous; arguments are checked by the op.
    """
    batch, n, num_q_heads, head_dim = query.shape
    out = query.new_empty(query.shape)
    if out.numel() == 0:
        return out
    num_pages, page_size, num_kv_heads, _ = caches[0].shape
    sources = [dense_rows(source) for source in (*caches, *compressed)]
    group = num_q_heads // num_kv_heads
    tile = sparse_tile(group, head_dim, query.element_size(), is_hip=torch.version.hip is not None)
    num_programs = batch * n * num_kv_heads * triton.cdiv(group, tile["BLOCK_M"])
    with device_of(query):
        sparse_kernel[(num_programs,)](
            query.contiguous(), *sources, page_table.contiguous(), positions.contiguous(),
            selected.contiguous(), out, scale, sliding_window, n, num_kv_heads, group, num_pages,
            page_size, page_table.shape[1], compressed[0].shape[1], selected.shape[2], head_dim,
            *(stride for source in sources for stride in source.stride()[:3]),
            **tile, **OPTIONS,
        )  # fmt: skip
    return out
