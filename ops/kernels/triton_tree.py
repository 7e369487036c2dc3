"""GPU kernels that lay out draft trees: mask, prefix, positions and links in one launch."""

# Compile-time arguments are in capitals, as everywhere in Triton, whose decorator has no types.
# ruff: noqa: N803, N806
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from torchvm.ops.kernels.triton_launch import OPTIONS, device_of, num_programs
from torchvm.ops.kernels.triton_rows import (
    ancestor_bits,
    fill_prefixes,
    length_of,
    links,
    live_cells,
    parents_from_candidates,
    parents_from_nodes,
    store_rows,
)
from torchvm.ops.layout import TreeMaskMode, packed_row_bytes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "TreeTile",
    "build_tree",
    "build_tree_from_parents",
    "store_unit",
    "tree_kernel",
    "tree_tile",
]

FULL = tl.constexpr(int(TreeMaskMode.FULL_MASK))
PACKED = tl.constexpr(int(TreeMaskMode.QLEN_ONLY_BITPACKING))
# One step of a program works on at most 32 x 32 cells, 8 for each of its 128 threads.
TILE_ROWS = 32
TILE_COLUMNS = 32
# Beyond this many nodes the parents alone take eight registers of each of 128 threads.
WIDE_NODES = 256


@triton.jit(
    do_not_specialize=[
        "parent_list", "selected_index", "seq_lens", "batch", "topk", "limit", "parent_width",
        "row_units", "numel",
    ]
)  # fmt: skip
def tree_kernel(
    parent_list: tl.tensor,
    selected_index: tl.tensor,
    seq_lens: tl.tensor,
    tree_mask: tl.tensor,
    positions: tl.tensor,
    retrieve_index: tl.tensor,
    retrieve_next_token: tl.tensor,
    retrieve_next_sibling: tl.tensor,
    batch: tl.int32,
    num_draft_tokens: tl.int32,
    topk: tl.int64,
    limit: tl.int32,
    parent_width: tl.int64,
    row_units: tl.int32,
    numel: tl.int64,
    MODE: tl.constexpr,
    FILL_PREFIX: tl.constexpr,
    FROM_PARENTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    UNIT_BYTES: tl.constexpr,
) -> None:
    """Lay out the trees of a batch, whatever its lengths, with a fixed number of programs.

    Work items are tiles of ROWS tree rows of one request; programs stride over them, then each
    writes its share of the prefix.

    Args:
        parent_list: int64 (B, parent_width), ids of beams; (B, n) node indices FROM_PARENTS.
        selected_index: int64 (B, n - 1), ascending candidate ids; not read FROM_PARENTS.
        seq_lens: int64 (B,).
        tree_mask: uint8, the buffer whatever its dtype.
        positions: int64 (B * n,), written; so are the three below, each (B, n).
        retrieve_index: int64.
        retrieve_next_token: int64.
        retrieve_next_sibling: int64.
        batch: B.
        num_draft_tokens: n.
        topk: candidates per beam.
        limit: most steps of a walk to the root.
        parent_width: entries of one row of `parent_list`.
        row_units: units of UNIT_BYTES in a row of tree cells.
        numel: bytes of the buffer; no store goes past them.
        MODE: a `TreeMaskMode`.
        FILL_PREFIX: whether FULL_MASK's prefix columns are written.
        FROM_PARENTS: whether `parent_list` holds node indices.
        BLOCK_N: power of two, at least n.
        ROWS: rows of a tile.
        COLUMNS: columns of a tile.
        UNIT_BYTES: bytes of one store of tree cells.
    """
    WORDS: tl.constexpr = BLOCK_N // 32 if BLOCK_N > 32 else 1
    STEP: tl.constexpr = WORDS if MODE == PACKED or COLUMNS < 32 else COLUMNS // 32
    n = tl.cast(num_draft_tokens, tl.int64)
    tiles = tl.cdiv(num_draft_tokens, ROWS)
    item = tl.program_id(0)
    while item < batch * tiles:
        request = item // tiles
        first_row = item % tiles * ROWS
        row = first_row + tl.arange(0, ROWS)
        live = row < num_draft_tokens
        base = request.to(tl.int64) * n
        node = tl.arange(0, BLOCK_N)
        if FROM_PARENTS:
            parent = parents_from_nodes(node, parent_list + base, num_draft_tokens)
        else:
            parent = parents_from_candidates(
                node,
                selected_index + request.to(tl.int64) * (n - 1),
                parent_list + request.to(tl.int64) * parent_width,
                num_draft_tokens,
                topk,
                parent_width,
                BLOCK_N,
            )
        bits, count = ancestor_bits(row, parent, limit, ROWS, WORDS)
        child, sibling = links(row, parent, first_row, num_draft_tokens, BLOCK_N, ROWS, COLUMNS)
        at = base + row
        tl.store(positions + at, tl.load(seq_lens + request) + count, mask=live)
        tl.store(retrieve_index + at, at, mask=live)
        tl.store(retrieve_next_token + at, child.to(tl.int64), mask=live)
        tl.store(retrieve_next_sibling + at, sibling.to(tl.int64), mask=live)
        if MODE == FULL:
            length = length_of(seq_lens, request, True, numel)
            origin = live_cells(seq_lens, request, num_draft_tokens, numel)
            first_unit = origin + row * (length + n) + length
        else:
            first_unit = at * row_units
        store_rows(
            tree_mask, bits, first_unit, live, row_units, numel,
            MODE == PACKED, UNIT_BYTES, ROWS, WORDS, STEP,
        )  # fmt: skip
        item += tl.num_programs(0)
    if MODE == FULL and FILL_PREFIX:
        fill_prefixes(tree_mask, seq_lens, batch, num_draft_tokens, numel)


class TreeTile(NamedTuple):
    """Compile-time sizes of the kernel, and its warps, for a number of draft tokens."""

    BLOCK_N: int
    ROWS: int
    COLUMNS: int
    num_warps: int


def tree_tile(num_draft_tokens: int) -> TreeTile:
    """Sizes of the tile that one program works on at a time."""
    block = triton.next_power_of_2(num_draft_tokens)
    num_warps = 4 if block <= WIDE_NODES else 8
    return TreeTile(block, min(block, TILE_ROWS), min(block, TILE_COLUMNS), num_warps)


def store_unit(mode: int, num_draft_tokens: int, address: int, numel: int) -> tuple[int, int]:
    """Bytes of one store of tree cells, and how many such units a row of them has.

    The widest of 1, 2 and 4 bytes that a row's bytes and the buffer's address and size are
    multiples of; rows of FULL_MASK begin anywhere.
    """
    if mode == TreeMaskMode.FULL_MASK:
        return 1, num_draft_tokens
    packed = mode == TreeMaskMode.QLEN_ONLY_BITPACKING
    row_bytes = int(packed_row_bytes(num_draft_tokens)) if packed else num_draft_tokens
    common = math.gcd(row_bytes, address, numel, 4)
    unit = common if packed or common == 4 else 1
    return unit, row_bytes // unit


def _launch(
    parent_list: Tensor,
    selected_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    topk: int,
    limit: int,
    parent_width: int,
    num_draft_tokens: int,
    tree_mask_mode: int,
    fill_prefix: bool,
    from_parents: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch = seq_lens.shape[0]
    positions = seq_lens.new_empty(batch * num_draft_tokens)
    index, token, sibling = (seq_lens.new_empty(batch, num_draft_tokens) for _ in range(3))
    outputs = (positions, index, token, sibling)
    if batch == 0:
        return outputs
    tile = tree_tile(num_draft_tokens)
    unit_bytes, row_units = store_unit(
        tree_mask_mode, num_draft_tokens, tree_mask.data_ptr(), tree_mask.numel()
    )
    fills = fill_prefix and tree_mask_mode == TreeMaskMode.FULL_MASK
    programs = num_programs(seq_lens.device)
    if not fills:
        programs = min(programs, batch * triton.cdiv(num_draft_tokens, tile.ROWS))
    with device_of(seq_lens):
        tree_kernel[(programs,)](
            parent_list, selected_index, seq_lens, tree_mask.view(torch.uint8), *outputs,
            batch, num_draft_tokens, topk, limit, parent_width, row_units, tree_mask.numel(),
            MODE=int(tree_mask_mode), FILL_PREFIX=fills, FROM_PARENTS=from_parents,
            **tile._asdict(), UNIT_BYTES=unit_bytes, **OPTIONS,
        )  # fmt: skip
    return outputs


def build_tree(
    parent_list: Tensor,
    selected_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    topk: int,
    depth: int,
    num_draft_tokens: int,
    tree_mask_mode: int,
    fill_prefix: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the tree kernel on draft candidates; arguments are checked by the op.

    Args:
        parent_list: int64 (B, topk * (depth - 1) + 1), any width at depth 1, where it is not read.
        selected_index: int64 (B, n - 1).
        seq_lens: int64 (B,).
        tree_mask: bool or uint8, 1-D, contiguous; written in place.
        topk: candidates per beam.
        depth: draft steps.
        num_draft_tokens: n, root included.
        tree_mask_mode: a `TreeMaskMode`.
        fill_prefix: whether FULL_MASK's prefix columns are written.

    Returns:
        positions int64 (B * n,); retrieve_index, retrieve_next_token, retrieve_next_sibling,
        int64 (B, n).
    """
    parent_list = parent_list.contiguous()
    return _launch(
        parent_list, selected_index.contiguous(), seq_lens.contiguous(), tree_mask, topk,
        min(depth, num_draft_tokens), parent_list.shape[1] if depth > 1 else 0,
        num_draft_tokens, tree_mask_mode, fill_prefix, from_parents=False,
    )  # fmt: skip


def build_tree_from_parents(
    parents: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    num_draft_tokens: int,
    tree_mask_mode: int,
    fill_prefix: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the tree kernel on node indices: parents int64 (B, n); the rest as `build_tree`."""
    parents = parents.contiguous()
    return _launch(
        parents, parents, seq_lens.contiguous(), tree_mask, 1, num_draft_tokens - 1,
        num_draft_tokens, num_draft_tokens, tree_mask_mode, fill_prefix, from_parents=True,
    )  # fmt: skip
