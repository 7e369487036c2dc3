"""Device functions that the attention kernel is made of: mask cells, paged keys, softmax."""

# Compile-time arguments are in capitals, as everywhere in Triton, whose decorator has no types.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from torchvm.ops.kernels.triton_rows import length_of, live_cells
from torchvm.ops.layout import TreeMaskMode

FULL = tl.constexpr(int(TreeMaskMode.FULL_MASK))
PACKED = tl.constexpr(int(TreeMaskMode.QLEN_ONLY_BITPACKING))
# Beside the modes of a mask: no mask, node i sees nodes 0 .. i.
CHAIN = tl.constexpr(-1)
# Columns of the tree block that a count of cells looks at together.
COUNTED = tl.constexpr(32)
LOG2_E = tl.constexpr(1.4426950408889634)
HIDDEN = tl.constexpr(float("-inf"))
# tanh(x) = x + x**3 * polynomial(x**2) for |x| < SMALL, to a rounding error; Cephes' numbers.
SMALL = tl.constexpr(0.625)
T0, T1 = tl.constexpr(-5.70498872745e-3), tl.constexpr(2.06390887954e-2)
T2, T3 = tl.constexpr(-5.37397155531e-2), tl.constexpr(1.33314422036e-1)
T4 = tl.constexpr(-3.33332819422e-1)


@triton.jit
def tree_origin(
    seq_lens: tl.tensor,
    request: tl.tensor,
    earlier: tl.tensor,
    num_draft_tokens: tl.tensor,
    row_bytes: tl.tensor,
    numel: tl.tensor,
    MODE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Where a request's tree cells begin, and the bytes from a node's to the next node's, int64.

    Args:
        seq_lens: int64 pointer.
        request: the request.
        earlier: the request again; 0, and no other request is looked at, for who needs no cell.
        num_draft_tokens: n.
        row_bytes: bytes that the tree cells of a row take.
        numel: int64, bytes of the buffer.
        MODE: a `TreeMaskMode`, or CHAIN.
    """
    if MODE == FULL:
        length = length_of(seq_lens, request, True, numel)
        origin = live_cells(seq_lens, earlier, num_draft_tokens, numel) + length
        return origin, length + num_draft_tokens
    stride = tl.cast(row_bytes, tl.int64)
    return request.to(tl.int64) * num_draft_tokens * stride, stride


@triton.jit
def tree_cells(
    tree_mask: tl.tensor,
    origin: tl.tensor,
    row_stride: tl.tensor,
    node: tl.tensor,
    column: tl.tensor,
    num_draft_tokens: tl.tensor,
    numel: tl.tensor,
    MODE: tl.constexpr,
) -> tl.tensor:
    """Which of one request's tree cells are set: bool [R, C], False outside block and buffer.

    Args:
        tree_mask: uint8 pointer; not read for a CHAIN.
        origin: int64, the byte of cell (0, 0).
        row_stride: int64, bytes between the cells of a node and the next node's.
        node: int32 [R], not negative.
        column: int32 [C], not negative.
        num_draft_tokens: n.
        numel: int64, bytes of the buffer.
        MODE: a `TreeMaskMode`, or CHAIN.
    """
    inside = (node < num_draft_tokens)[:, None] & (column < num_draft_tokens)[None, :]
    if MODE == CHAIN:
        return inside & (column[None, :] <= node[:, None])
    byte = column >> 3 if MODE == PACKED else column
    at = origin + node.to(tl.int64)[:, None] * row_stride + byte[None, :]
    cell = tl.load(tree_mask + at, mask=inside & (at >= 0) & (at < numel), other=0)
    if MODE == PACKED:
        cell = (cell >> (column & 7).to(tl.uint8)[None, :]) & 1
    return cell != 0


@triton.jit
def depths(
    tree_mask: tl.tensor,
    origin: tl.tensor,
    row_stride: tl.tensor,
    node: tl.tensor,
    num_draft_tokens: tl.tensor,
    numel: tl.tensor,
    MODE: tl.constexpr,
) -> tl.tensor:
    """Cells set in each node's row less one, int32 [R]; arguments as for `tree_cells`."""
    if MODE == CHAIN:
        return node
    count = tl.full(node.shape, -1, tl.int32)
    for start in tl.range(0, num_draft_tokens, COUNTED, num_stages=1):
        column = start + tl.arange(0, COUNTED)
        cells = tree_cells(
            tree_mask, origin, row_stride, node, column, num_draft_tokens, numel, MODE
        )
        count += tl.sum(cells.to(tl.int32), axis=1)
    return count


@triton.jit
def locate(
    pages: tl.tensor,
    page_step: tl.tensor,
    position: tl.tensor,
    live: tl.tensor,
    page_size: tl.tensor,
    num_pages: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Find the page and the place in it of each position, both int64 [T].

    Args:
        pages: int32 pointer to the request's row of the page table.
        page_step: int64, elements between two of its entries.
        position: int32 [T].
        live: bool [T], positions that the row covers and that may be looked at.
        page_size: positions of a page.
        num_pages: pages of the cache.

    Returns:
        The page, the place, and those of `live` whose page there is.
    """
    entry = position // page_size
    page = tl.load(pages + entry.to(tl.int64) * page_step, mask=live, other=-1)
    there = live & (page >= 0) & (page < num_pages)
    return page.to(tl.int64), (position - entry * page_size).to(tl.int64), there


@triton.jit
def load_tile(
    head: tl.tensor,
    page: tl.tensor,
    place: tl.tensor,
    page_stride: tl.tensor,
    place_stride: tl.tensor,
    wanted: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tl.tensor:
    """Load what one head's cache holds at some positions: [T, BLOCK_D], zeros where not wanted.

    Args:
        head: pointer to the head in page 0.
        page: int64 [T], as `locate` found it.
        place: int64 [T].
        page_stride: int64, elements between two pages.
        place_stride: int64, elements between two positions of a page.
        wanted: bool [T].
        HEAD_DIM: elements of a position.
        BLOCK_D: power of two, at least HEAD_DIM.
    """
    d = tl.arange(0, BLOCK_D)
    row = head + page * page_stride + place * place_stride
    mask = wanted[:, None] & (d < HEAD_DIM)[None, :]
    return tl.load(row[:, None] + d[None, :], mask=mask, other=0.0)


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """Hyperbolic tangent of float32; the compiler's own is not there for every target."""
    magnitude = tl.abs(x)
    # exp of more than 20 adds nothing; NaN takes this branch and stays NaN.
    large = 1.0 - 2.0 / (tl.exp(2.0 * magnitude) + 1.0)
    square = x * x
    small = (((T0 * square + T1) * square + T2) * square + T3) * square + T4
    return tl.where(magnitude < SMALL, x + x * square * small, tl.where(x < 0, -large, large))


@triton.jit
def fold(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    visible: tl.tensor,
    peak: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    factor: tl.tensor,
    cap: tl.tensor,
    CAPPED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Fold one tile of keys and values into the running softmax of some rows, kept in base 2.

    Args:
        query: [R, D] of the caches' dtype.
        keys: [T, D].
        values: [T, D]; those hidden from every row are finite.
        visible: bool [R, T].
        peak: float32 [R], the largest score yet, -inf before the first.
        weight: float32 [R], the sum of 2 ** (score - peak).
        total: float32 [R, D], the values' sum under these weights.
        factor: float32, what makes a product a score in base 2; one over `cap` of it, CAPPED.
        cap: float32, the logit cap in base 2; not used unless CAPPED.
        CAPPED: whether scores go through tanh.

    Returns:
        The three after the tile.
    """
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * factor
    if CAPPED:
        scores = tanh(scores) * cap
    scores = tl.where(visible, scores, HIDDEN)
    highest = tl.maximum(peak, tl.max(scores, axis=1))
    # A row that has seen nothing stays at weight 0; -inf less -inf would be NaN.
    base = tl.where(highest == HIDDEN, 0.0, highest)
    decay = tl.exp2(peak - base)
    powers = tl.exp2(scores - base[:, None])
    total = tl.dot(powers.to(values.dtype), values, total * decay[:, None], input_precision="ieee")
    return highest, weight * decay + tl.sum(powers, axis=1), total
