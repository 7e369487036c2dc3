"""GPU attention in one loop over prefix and tree that reads every cell of its mask."""

# Compile-time arguments are in capitals, as everywhere in Triton, whose decorator has no types.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from torchvm.ops.kernels.triton_launch import OPTIONS, device_of
from torchvm.ops.kernels.triton_rows import length_of, live_cells
from torchvm.ops.kernels.triton_softmax import dense_rows
from torchvm.ops.kernels.triton_tiles import tanh

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PrefixTile", "prefix_attention", "prefix_kernel", "prefix_tile"]

HIDDEN = tl.constexpr(float("-inf"))


class PrefixTile(NamedTuple):
    """How the kernel is cut for one head size and group of query heads."""

    BLOCK_M: int
    """Rows, a node and a query head each, of a program."""
    BLOCK_T: int
    """Positions of a step."""
    BLOCK_D: int
    """Power of two, at least head_dim."""
    BLOCK_K: int
    """Columns of the query that are multiplied at once."""
    num_warps: int
    num_stages: int


def prefix_tile(rows: int, head_dim: int, item_bytes: int) -> PrefixTile:
    """Choose the tile for `rows` rows a kv head: the largest whose step stays in registers.

    Float32 is multiplied without tensor cores, and its operands live in registers too.
    """
    dim = max(16, triton.next_power_of_2(head_dim))
    if item_bytes == 4:
        return PrefixTile(16, 16, dim, min(dim, 32 if dim <= 128 else 16), 4, 1)
    if dim <= 128:
        return PrefixTile(16 if rows <= 16 else 32, 32, dim, dim, 4, 2)
    return PrefixTile(32, 32, dim, dim, 4, 1) if dim == 256 else PrefixTile(16, 16, dim, 64, 4, 1)


@triton.jit
def cells_of(
    mask: tl.tensor, origin: tl.tensor, first: tl.tensor, step: tl.tensor, live: tl.tensor,
    numel: tl.tensor, PACKED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Which cells of some rows of one request are set; those outside the buffer are not.

    Args:
        mask: uint8 pointer.
        origin: byte of the request's first cell, int64.
        first: int64 [R], a cell of each row, counted from the request's first.
        step: int32 [C], how many cells further on.
        live: bool [R, C], which of them to read.
        numel: bytes of the buffer.
        PACKED: one bit a cell; otherwise one byte.

    Returns:
        bool [R, C].
    """
    begin = origin + (first >> 3 if PACKED else first)
    # Bytes from each row's cell to the buffer's end; what a tile spans is far below the bound.
    room = tl.where(begin < 0, 0, tl.maximum(numel - begin, 0))
    room = tl.minimum(room, 1 << 30).to(tl.int32)
    if PACKED:
        bit = (first & 7).to(tl.int32)[:, None] + step[None, :]
        inside = live & (bit >> 3 < room[:, None])
        byte = tl.load((mask + begin)[:, None] + (bit >> 3), mask=inside, other=0)
        return (byte.to(tl.int32) >> (bit & 7)) & 1 == 1
    inside = live & (step[None, :] < room[:, None])
    return tl.load((mask + begin)[:, None] + step[None, :], mask=inside, other=0) != 0


@triton.jit
def depths_of(
    mask: tl.tensor, origin: tl.tensor, node: tl.tensor, length: tl.tensor, n: tl.tensor,
    numel: tl.tensor, PACKED: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Cells set in the tree block's row of each node, less one: int32; -1 for no node."""
    live = (node >= 0) & (node < n)
    first = node.to(tl.int64) * (length + n) + length
    step = tl.arange(0, BLOCK)
    count = tl.full([node.shape[0]], -1, tl.int32)
    for start in range(0, n, BLOCK):
        inside = live[:, None] & (start + step < n)[None, :]
        seen = cells_of(mask, origin, first + start, step, inside, numel, PACKED)
        count += tl.sum(seen.to(tl.int32), axis=1)
    return count


@triton.jit(
    do_not_specialize=[
        "page_table", "seq_lens", "mask", "mask_indptr", "table_width", "num_pages", "n", "numel",
        "scale", "window", "cap",
    ]
)  # fmt: skip
def prefix_kernel(
    query: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    page_table: tl.tensor,
    seq_lens: tl.tensor,
    mask: tl.tensor,
    mask_indptr: tl.tensor,
    out: tl.tensor,
    q_batch: tl.int64,
    q_node: tl.int64,
    q_head: tl.int64,
    k_page: tl.int64,
    k_slot: tl.int64,
    k_head: tl.int64,
    v_page: tl.int64,
    v_slot: tl.int64,
    v_head: tl.int64,
    table_width: tl.int64,
    num_pages: tl.int32,
    page_size: tl.int32,
    n: tl.int32,
    numel: tl.int64,
    scale: tl.float32,
    window: tl.int64,
    cap: tl.float32,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """Attend a block of one request's rows of one kv head: a row is a node and a query head.

    Args:
        query: (B, n, num_q_heads, DIM), of strides q_batch, q_node, q_head, 1.
        k_cache: (num_pages, page_size, num_kv_heads, DIM), of strides k_page, k_slot, k_head, 1.
        v_cache: likewise.
        page_table: int32 (B, table_width).
        seq_lens: int64 (B,).
        mask: uint8 pointer, bytes or bits of a FULL_MASK.
        mask_indptr: int64 (B + 1,), where each request's bits begin; not read of bytes.
        out: (B, n, num_q_heads, DIM) contiguous, written.
        q_batch: strides are in elements.
        q_node: a stride.
        q_head: a stride.
        k_page: a stride.
        k_slot: a stride.
        k_head: a stride.
        v_page: a stride.
        v_slot: a stride.
        v_head: a stride.
        table_width: pages a request may have.
        num_pages: pages of the caches.
        page_size: positions of a page.
        n: draft tokens.
        numel: bytes of the mask.
        scale: factor on query times key.
        window: positions a node sees, with HAS_WINDOW.
        cap: soft cap of a score, with HAS_CAP.
        DIM: head_dim.
        GROUP: query heads of a kv head.
        PACKED: the mask is bits.
        HAS_WINDOW: whether there is a window.
        HAS_CAP: whether there is a cap.
        BLOCK_M: rows of a program, a power of two.
        BLOCK_T: positions of a step, a power of two.
        BLOCK_D: power of two, at least DIM.
        BLOCK_K: columns of the query that are multiplied at once; divides BLOCK_D.
    """
    request = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    num_heads = tl.num_programs(1) * GROUP
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    node = row // GROUP
    head = kv_head * GROUP + row % GROUP
    live = node < n
    dim = tl.arange(0, BLOCK_D)
    in_dim = dim < DIM
    step = tl.arange(0, BLOCK_T)
    batch = request.to(tl.int64)
    # Lengths and offsets as they are counted in the mask, and no position past the page table.
    cells = tl.cast(numel, tl.int64) * 8 if PACKED else numel
    length = length_of(seq_lens, batch, True, cells)
    origin = tl.load(mask_indptr + batch) if PACKED else live_cells(seq_lens, request, n, numel)
    origin = tl.where(origin < 0, numel, origin)
    stop = tl.minimum(length + n, tl.cast(table_width, tl.int64) * page_size)
    page_table += batch * table_width
    query += batch * q_batch
    k_cache += kv_head * k_head
    v_cache += kv_head * v_head
    row_at = query + node.to(tl.int64) * q_node + head * q_head
    first = node.to(tl.int64) * (length + n)
    begin = tl.cast(0, tl.int64)
    if HAS_WINDOW:
        own = depths_of(mask, origin, node, length, n, numel, PACKED, 16)
        own_position = length + own
        # Of the prefix: where a node of the tree stands in the cache is not its position.
        nearest = tl.min(tl.where(live, own_position, stop), axis=0) - window + 1
        begin = tl.maximum(tl.minimum(nearest, length), 0)
    peak = tl.full([BLOCK_M], HIDDEN, tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(begin, stop, BLOCK_T):
        position = start + step
        slot = (start % page_size).to(tl.int32) + step
        page_at = start // page_size + slot // page_size
        inside = position < stop
        page = tl.load(page_table + page_at, mask=inside, other=-1)
        inside &= (page >= 0) & (page < num_pages)
        page = page.to(tl.int64)
        slot = (slot % page_size).to(tl.int64)
        key_at = k_cache + page * k_page + slot * k_slot
        value_at = v_cache + page * v_page + slot * v_slot
        readable = live[:, None] & inside[None, :]
        seen = cells_of(mask, origin, first + start, step, readable, numel, PACKED)
        if HAS_WINDOW:
            at = position
            if start + BLOCK_T > length:
                other = (position - length).to(tl.int32)
                depth = depths_of(mask, origin, other, length, n, numel, PACKED, 16)
                at = tl.where(position < length, position, length + depth)
            seen &= own_position[:, None] - at[None, :] < window
        # A value that no row sees may be anything, NaN included, which 0 * NaN would let through.
        wanted = tl.max(seen.to(tl.int32), axis=0) > 0
        scores = tl.zeros([BLOCK_M, BLOCK_T], tl.float32)
        for part in range(0, BLOCK_D, BLOCK_K):
            piece = part + tl.arange(0, BLOCK_K)
            in_piece = (piece < DIM)[None, :]
            rows = tl.load(
                row_at[:, None] + piece[None, :], mask=live[:, None] & in_piece, other=0.0
            )
            keys = tl.load(
                key_at[:, None] + piece[None, :], mask=wanted[:, None] & in_piece, other=0.0
            )
            scores = tl.dot(rows, tl.trans(keys), scores, input_precision="ieee")
        scores *= scale
        if HAS_CAP:
            scores = cap * tanh(scores / cap)
        scores = tl.where(seen, scores, HIDDEN)
        highest = tl.maximum(peak, tl.max(scores, axis=1))
        # A row that has seen nothing yet has no peak to subtract.
        base = tl.where(highest == HIDDEN, 0.0, highest)
        decay = tl.exp(peak - base)
        powers = tl.exp(scores - base[:, None])
        values = tl.load(
            value_at[:, None] + dim[None, :], mask=wanted[:, None] & in_dim[None, :], other=0.0
        )
        total = tl.dot(
            powers.to(values.dtype), values, total * decay[:, None], input_precision="ieee"
        )
        weight = weight * decay + tl.sum(powers, axis=1)
        peak = highest
    total /= tl.where(weight == 0, 1.0, weight)[:, None]
    place = ((batch * n + node) * num_heads + head) * DIM
    tl.store(
        out + place[:, None] + dim[None, :], total.to(out.dtype.element_ty),
        mask=live[:, None] & in_dim[None, :],
    )  # fmt: skip


def prefix_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    mask: Tensor,
    mask_indptr: Tensor | None,
    scale: float,
    sliding_window: int,
    logit_cap: float,
    out: Tensor,
) -> None:
    """Launch the kernel; arguments are checked by the op.

    Args:
        query: (B, n, num_q_heads, head_dim).
        k_cache: (num_pages, page_size, num_kv_heads, head_dim).
        v_cache: like `k_cache`.
        page_table: (B, max_pages) int32.
        seq_lens: (B,) int64.
        mask: 1-D FULL_MASK, bool or uint8; uint8 bits with `mask_indptr`.
        mask_indptr: (B + 1,) int64 where each request's bits begin, or None.
        scale: factor on query times key.
        sliding_window: 0 is no limit.
        logit_cap: 0 is no cap.
        out: like `query`, contiguous, written.
    """
    batch, n, num_heads, dim = query.shape
    num_pages, page_size, num_kv_heads, _ = k_cache.shape
    if out.numel() == 0:
        return
    group = num_heads // num_kv_heads
    tile = prefix_tile(n * group, dim, query.element_size())._asdict()
    query, k_cache, v_cache = (dense_rows(tensor) for tensor in (query, k_cache, v_cache))
    seq_lens, mask = seq_lens.contiguous(), mask.contiguous().view(torch.uint8)
    grid = (batch, num_kv_heads, triton.cdiv(n * group, tile["BLOCK_M"]))
    with device_of(query):
        prefix_kernel[grid](
            query, k_cache, v_cache, page_table.contiguous(), seq_lens, mask,
            seq_lens if mask_indptr is None else mask_indptr.contiguous(), out,
            *query.stride()[:3], *k_cache.stride()[:3], *v_cache.stride()[:3],
            page_table.shape[1], num_pages, page_size, n, mask.numel(), scale, sliding_window,
            logit_cap, DIM=dim, GROUP=group, PACKED=mask_indptr is not None,
            HAS_WINDOW=sliding_window > 0, HAS_CAP=logit_cap > 0, **tile, **OPTIONS,
        )  # fmt: skip
