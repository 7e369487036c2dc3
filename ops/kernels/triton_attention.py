"""GPU kernels of tree attention: each request's keys are shared out, then the shares merged."""

# Compile-time arguments are in capitals, as everywhere in Triton, whose decorator has no types.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from torchvm.ops.kernels.triton_launch import OPTIONS, device_of, num_programs
from torchvm.ops.kernels.triton_merge import merge
from torchvm.ops.kernels.triton_rows import length_of
from torchvm.ops.kernels.triton_tiles import (
    CHAIN,
    HIDDEN,
    LOG2_E,
    depths,
    fold,
    load_tile,
    locate,
    tree_cells,
    tree_origin,
)
from torchvm.ops.layout import TreeMaskMode, packed_row_bytes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "AttentionTile",
    "attention_kernel",
    "attention_tile",
    "num_shares",
    "tree_attention",
]

# Positions and what is counted from them are int32.
MOST_POSITIONS = 2**31 - 2**20


@triton.jit(
    do_not_specialize=[
        "seq_lens", "tree_mask", "page_table", "table_stride", "page_step", "num_rows",
        "num_draft_tokens", "num_kv_heads", "num_pages", "page_size", "capacity", "row_bytes",
        "numel", "window", "factor", "cap",
    ]
)  # fmt: skip
def attention_kernel(
    query: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    page_table: tl.tensor,
    seq_lens: tl.tensor,
    tree_mask: tl.tensor,
    out: tl.tensor,
    peaks: tl.tensor,
    weights: tl.tensor,
    q_request_stride: tl.int64,
    q_node_stride: tl.int64,
    q_head_stride: tl.int64,
    k_page_stride: tl.int64,
    k_place_stride: tl.int64,
    k_head_stride: tl.int64,
    v_page_stride: tl.int64,
    v_place_stride: tl.int64,
    v_head_stride: tl.int64,
    table_stride: tl.int64,
    page_step: tl.int64,
    num_rows: tl.int64,
    num_draft_tokens: tl.int32,
    num_kv_heads: tl.int32,
    num_pages: tl.int32,
    page_size: tl.int32,
    capacity: tl.int32,
    row_bytes: tl.int64,
    numel: tl.int64,
    window: tl.int32,
    factor: tl.float32,
    cap: tl.float32,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MODE: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    """Attend ROWS rows of one request and kv head to one share of the request's keys.

    A row is a node under one of the GROUP query heads of the kv head. The keys are cut into
    tiles, those of the prefix before those of the tree, and the tiles into as many equal shares
    as the grid's second dimension says, whatever the lengths; a share may be empty.

    Args:
        query: (B, n, num_kv_heads * GROUP, HEAD_DIM), the last dimension contiguous.
        k_cache: (num_pages, page_size, num_kv_heads, HEAD_DIM), the last dimension contiguous.
        v_cache: like `k_cache`.
        page_table: int32 (B, max_pages).
        seq_lens: int64 (B,), contiguous.
        tree_mask: uint8, the mask whatever its dtype; not read for a CHAIN.
        out: written: (num_rows, HEAD_DIM) of the query's dtype; SHARED float32 sums under
            weights, (shares, num_rows, HEAD_DIM), of rows that saw something.
        peaks: float32 (shares, num_rows), written when SHARED: the largest score in base 2.
        weights: like `peaks`: the sum of 2 ** (score - peak), 0 for a row that saw nothing.
        q_request_stride: elements between two requests of `query`, and so on below.
        q_node_stride: two nodes.
        q_head_stride: two query heads.
        k_page_stride: two pages of `k_cache`.
        k_place_stride: two positions of a page.
        k_head_stride: two kv heads.
        v_page_stride: two pages of `v_cache`.
        v_place_stride: two positions of a page.
        v_head_stride: two kv heads.
        table_stride: two rows of `page_table`.
        page_step: two entries of a row.
        num_rows: B * n * num_kv_heads * GROUP.
        num_draft_tokens: n.
        num_kv_heads: heads of the caches.
        num_pages: pages of the caches; other ids in `page_table` are passed over.
        page_size: positions of a page.
        capacity: positions that a row of `page_table` covers; no more are looked at.
        row_bytes: bytes that the tree cells of a row take.
        numel: bytes of the mask; cells past them are not set.
        window: positions that a node sees, itself included; not used unless WINDOWED.
        factor: what makes a product a score in base 2, over the cap when CAPPED.
        cap: the logit cap in base 2.
        GROUP: query heads of a kv head.
        HEAD_DIM: elements of a head.
        MODE: a `TreeMaskMode`, or CHAIN.
        WINDOWED: whether there is a window.
        CAPPED: whether there is a logit cap.
        SHARED: whether there is more than one share.
        BLOCK_D: power of two, at least HEAD_DIM and 16.
        ROWS: rows of a program, a power of two, at least 16.
        KEYS: keys of a tile, a power of two, at least 16.
    """
    n = num_draft_tokens
    blocks = tl.cdiv(n * GROUP, ROWS)
    first_row = tl.program_id(0) % blocks * ROWS
    head = tl.program_id(0) // blocks % num_kv_heads
    request = tl.program_id(0) // blocks // num_kv_heads
    wide = request.to(tl.int64)
    row = first_row + tl.arange(0, ROWS)
    node = row // GROUP
    q_head = (head * GROUP + row % GROUP).to(tl.int64)
    live = node < n
    d = tl.arange(0, BLOCK_D)
    held = live[:, None] & (d < HEAD_DIM)[None, :]
    q_row = query + wide * q_request_stride + node.to(tl.int64) * q_node_stride
    q_row += q_head * q_head_stride
    queries = tl.load(q_row[:, None] + d[None, :], mask=held, other=0.0)
    pages = page_table + wide * table_stride
    k_head = k_cache + head.to(tl.int64) * k_head_stride
    v_head = v_cache + head.to(tl.int64) * v_head_stride
    length = length_of(seq_lens, request, True, tl.cast(capacity, tl.int64)).to(tl.int32)
    columns = tl.minimum(n, (first_row + ROWS - 1) // GROUP + 1) if MODE == CHAIN else n

    begin = tl.cast(0, tl.int32)
    if WINDOWED:
        origin, row_stride = tree_origin(seq_lens, request, request, n, row_bytes, numel, MODE)
        depth = depths(tree_mask, origin, row_stride, node, n, numel, MODE)
        # Triton loses track of addresses where a loop's bounds come from another loop, so the
        # bounds are those of the least depth that there is.
        begin = tl.maximum(length - window, 0)
        oldest = length + tl.min(tl.where(live, depth, n), axis=0) - window + 1
    prefix_tiles = tl.cdiv(length - begin, KEYS)
    tiles = prefix_tiles + tl.cdiv(columns, KEYS)
    share = tl.cdiv(tiles, tl.num_programs(1))
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, tiles)
    if not WINDOWED:
        # Only who reaches the tree waits for the lengths of the requests before.
        earlier = tl.where(last > prefix_tiles, request, 0)
        origin, row_stride = tree_origin(seq_lens, request, earlier, n, row_bytes, numel, MODE)

    peak = tl.full([ROWS], HIDDEN, tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for tile in range(first, tl.minimum(last, prefix_tiles)):
        position = begin + tile * KEYS + tl.arange(0, KEYS)
        inside = position < length
        if WINDOWED:
            inside &= position >= oldest
        page, place, there = locate(pages, page_step, position, inside, page_size, num_pages)
        visible = tl.broadcast_to(there[None, :], [ROWS, KEYS])
        if WINDOWED:
            visible &= depth[:, None] - (position - length)[None, :] < window
        keys = load_tile(
            k_head, page, place, k_page_stride, k_place_stride, there, HEAD_DIM, BLOCK_D
        )
        values = load_tile(
            v_head, page, place, v_page_stride, v_place_stride, there, HEAD_DIM, BLOCK_D
        )
        peak, weight, total = fold(
            queries, keys, values, visible, peak, weight, total, factor, cap, CAPPED
        )
    # A tree has few tiles: loading one while another is worked on is not worth the registers.
    for tile in tl.range(tl.maximum(first, prefix_tiles), last, num_stages=1):
        column = (tile - prefix_tiles) * KEYS + tl.arange(0, KEYS)
        position = length + column
        inside = (column < columns) & (position < capacity)
        page, place, there = locate(pages, page_step, position, inside, page_size, num_pages)
        visible = there[None, :] & tree_cells(
            tree_mask, origin, row_stride, node, column, n, numel, MODE
        )
        if WINDOWED:
            behind = (
                depth[:, None]
                - depths(tree_mask, origin, row_stride, column, n, numel, MODE)[None, :]
            )
            visible &= behind < window
        # A value that no row sees may be anything, NaN included, which 0 * NaN would let through.
        seen = tl.max(visible.to(tl.int32), axis=0) > 0
        keys = load_tile(
            k_head, page, place, k_page_stride, k_place_stride, seen, HEAD_DIM, BLOCK_D
        )
        values = load_tile(
            v_head, page, place, v_page_stride, v_place_stride, seen, HEAD_DIM, BLOCK_D
        )
        peak, weight, total = fold(
            queries, keys, values, visible, peak, weight, total, factor, cap, CAPPED
        )

    out_row = (wide * n + node) * (num_kv_heads * GROUP) + q_head
    if SHARED:
        out_row += tl.program_id(1).to(tl.int64) * num_rows
        tl.store(peaks + out_row, peak, mask=live)
        tl.store(weights + out_row, weight, mask=live)
        held &= (weight != 0)[:, None]
    else:
        total = total / tl.where(weight == 0, 1.0, weight)[:, None]
    at = out_row[:, None] * HEAD_DIM + d[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=held)


class AttentionTile(NamedTuple):
    """Compile-time sizes of the attention kernel, and how it is compiled."""

    BLOCK_D: int
    ROWS: int
    KEYS: int
    num_warps: int
    num_stages: int


def attention_tile(num_rows: int, head_dim: int, itemsize: int) -> AttentionTile:
    """Sizes of the tile that one program works on at a time.

    Args:
        num_rows: nodes of a request times query heads of a kv head.
        head_dim: elements of a head.
        itemsize: bytes of an element.
    """
    block = max(triton.next_power_of_2(head_dim), 16)
    if itemsize == 4:
        # Products of float32 are made one by one, from operands that all stand in registers.
        rows, keys, num_warps = 16, 2048 // block, 8
    elif num_rows <= 16:
        rows, keys, num_warps = 16, block // 2, 4
    else:
        rows, keys, num_warps = 64, 4096 // block, 4
    return AttentionTile(block, rows, min(max(keys, 16), 64), num_warps, 2)


def num_shares(tile: AttentionTile, programs: int, positions: int, device: torch.device) -> int:
    """Into how many shares the keys of a request are cut: by the device's size and shapes alone.

    Args:
        tile: what a program works on at a time.
        programs: of a launch that cuts nothing.
        positions: most that a request can have.
        device: where the launch runs.
    """
    return max(1, min(num_programs(device) // programs, -(-positions // tile.KEYS)))


def _dense_last(tensor: Tensor) -> Tensor:
    """The tensor, its last dimension contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def tree_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor | None,
    mode: int,
    scale: float,
    sliding_window: int,
    logit_cap: float,
    shares: int | None = None,
) -> Tensor:
    """Launch the attention kernel, and the merge where keys are shared out.

    Args:
        query: (B, n, num_q_heads, head_dim), checked by the op like all that follow.
        k_cache: (num_pages, page_size, num_kv_heads, head_dim).
        v_cache: like `k_cache`.
        page_table: int32 (B, max_pages); an id out of range hides the keys of its page.
        seq_lens: int64 (B,); read on the device, and cut to what `page_table` covers.
        tree_mask: bool or uint8, 1-D, contiguous; None is a chain.
        mode: a `TreeMaskMode`, the layout of `tree_mask`.
        scale: factor on query times key.
        sliding_window: 0 is no limit.
        logit_cap: 0 is no cap.
        shares: into how many the keys of each request are cut, `num_shares` of them by default.

    Returns:
        Like `query`, contiguous.

    Raises:
        ValueError: when a row of `page_table` covers too many positions for int32.
    """
    batch, n, num_heads, head_dim = query.shape
    num_pages, page_size, num_kv_heads, _ = k_cache.shape
    out = query.new_empty(query.shape)
    if out.numel() == 0:
        return out
    query, k_cache, v_cache = (_dense_last(tensor) for tensor in (query, k_cache, v_cache))
    group, num_rows = num_heads // num_kv_heads, out.numel() // head_dim
    capacity = page_table.shape[1] * page_size
    if capacity > MOST_POSITIONS:
        raise ValueError(
            f"page_table must be of rows of at most {MOST_POSITIONS} positions, got {capacity}"
        )
    tile = attention_tile(n * group, head_dim, query.element_size())
    programs = batch * num_kv_heads * triton.cdiv(n * group, tile.ROWS)
    shares = shares or num_shares(tile, programs, capacity, query.device)
    found, peaks, weights = out, out, out
    if shares > 1:
        found = query.new_empty(shares, num_rows, head_dim, dtype=torch.float32)
        peaks, weights = query.new_empty(2, shares, num_rows, dtype=torch.float32)
    seq_lens = seq_lens.contiguous()
    mask = (seq_lens if tree_mask is None else tree_mask).view(torch.uint8)
    packed = mode == TreeMaskMode.QLEN_ONLY_BITPACKING
    # A window that hides nothing takes the shorter way.
    window = sliding_window if sliding_window < capacity + n else 0
    with device_of(query):
        attention_kernel[(programs, shares)](
            query, k_cache, v_cache, page_table, seq_lens, mask, found, peaks, weights,
            *query.stride()[:3], *k_cache.stride()[:3], *v_cache.stride()[:3],
            *page_table.stride(), num_rows, n, num_kv_heads, num_pages, page_size, capacity,
            packed_row_bytes(n) if packed else n, mask.numel(), window,
            scale / logit_cap if logit_cap else scale * LOG2_E, logit_cap * LOG2_E,
            GROUP=group, HEAD_DIM=head_dim, MODE=int(CHAIN if tree_mask is None else mode),
            WINDOWED=window > 0, CAPPED=logit_cap > 0, SHARED=shares > 1,
            **tile._asdict(), **OPTIONS,
        )  # fmt: skip
        if shares > 1:
            merge(found, peaks, weights, out)
    return out
