"""Draft trees on the CPU: mask, prefix, positions and links in one walk over the nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torchvm.ops.kernels.jit import int64_at, load, njit, store
from torchvm.ops.layout import TreeMaskMode, live_mask_numel, packed_row_bytes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["build_tree", "build_tree_from_parents"]

FULL = int(TreeMaskMode.FULL_MASK)
PACKED = int(TreeMaskMode.QLEN_ONLY_BITPACKING)


@njit
def _fits(seq_lens: Any, batch: int, n: int, numel: int, is_full: bool) -> bool:
    """Whether every length is possible and, in FULL_MASK, the batch's cells are in the buffer."""
    needed = 0
    for b in range(batch):
        length = seq_lens[b]
        if length < 0:
            return False
        if is_full:
            if length > numel:
                return False
            needed += n * (length + n)
            if needed > numel:
                return False
    return True


@njit
def _holder(selected: Any, count: int, candidate: int) -> int:
    """The node that holds a candidate id among the first `count` ascending ids; -1 if none."""
    low = 0
    size = count
    while size > 1:
        half = size >> 1
        low = low + half if selected[low + half - 1] < candidate else low
        size -= half
    if size == 1 and selected[low] == candidate:
        return low + 1
    return -1


@njit
def _parent(selected: Any, node: int, parent_list: Any, width: int, topk: int) -> int:
    """Parent of a node by its candidate id; -1 where it has none."""
    candidate = selected[node - 1]
    if candidate < 0:
        return -1
    beam = np.uint64(candidate) // np.uint64(topk)
    if beam == 0:
        return 0
    if beam >= np.uint64(width):
        return -1
    wanted = parent_list[beam]
    return _holder(selected, node - 1, wanted) if wanted >= 0 else -1


@njit
def _copy_row(to: int, source: int, size: int) -> None:
    """Copy bytes between rows that do not overlap; the last word may overlap the one before."""
    if size >= 8:
        for at in range(0, size - 7, 8):
            store(to + at, load(source + at, np.uint64(0)))
        store(to + size - 8, load(source + size - 8, np.uint64(0)))
    else:
        for at in range(size):
            store(to + at, load(source + at, np.uint8(0)))


@njit
def _zero_row(to: int, size: int) -> None:
    for at in range(size):
        store(to + at, np.uint8(0))


@njit
def _set_cell(row: int, column: int, packed: bool) -> None:
    if packed:
        byte = row + (column >> 3)
        store(byte, np.uint8(load(byte, np.uint8(0)) | (1 << (column & 7))))
    else:
        store(row + column, np.uint8(1))


@njit
def _truncated_row(
    row: int, node: int, parents: Any, limit: int, row_bytes: int, packed: bool
) -> None:
    """Write the row of a node that has more ancestors than a walk of `limit` steps meets."""
    _zero_row(row, row_bytes)
    _set_cell(row, 0, packed)
    _set_cell(row, node, packed)
    current = node
    for _ in range(limit):
        current = parents[current]
        if current <= 0:
            break
        _set_cell(row, current, packed)


@njit
def _build(
    parent_list_address: int,
    width: int,
    selected_address: int,
    topk: int,
    limit: int,
    seq_lens_address: int,
    batch: int,
    n: int,
    mask: int,
    numel: int,
    mode: int,
    row_bytes: int,
    fill_prefix: bool,
    from_parents: bool,
    positions_address: int,
    index_address: int,
    token_address: int,
    sibling_address: int,
) -> bool:
    """Write every output of a batch, or nothing and return False when it does not fit."""
    seq_lens = int64_at(seq_lens_address)
    if not _fits(seq_lens, batch, n, numel, mode == FULL):
        return False
    packed = mode == PACKED
    parents = np.empty(n, np.int64)
    depths = np.empty(n, np.int64)
    row = mask
    for b in range(batch):
        first = b * n
        length = seq_lens[b]
        parent_list = int64_at(parent_list_address + 8 * b * width)
        selected = int64_at(selected_address + 8 * b * (n - 1))
        positions = int64_at(positions_address + 8 * first)
        index = int64_at(index_address + 8 * first)
        token = int64_at(token_address + 8 * first)
        sibling = int64_at(sibling_address + 8 * first)
        prefix = length if mode == FULL else 0
        stride = prefix + row_bytes
        root = row + prefix
        for i in range(n):
            if fill_prefix:
                for at in range(prefix):
                    store(row + at, np.uint8(1))
            cells = row + prefix
            row += stride
            index[i] = first + i
            token[i] = -1
            sibling[i] = -1
            if i == 0:
                _zero_row(cells, row_bytes)
                _set_cell(cells, 0, packed)
                depths[0] = 0
                positions[0] = length
                continue
            if from_parents:
                parent = parent_list[i]
                parent = parent if 0 <= parent < i else -1
            else:
                parent = _parent(selected, i, parent_list, width, topk)
            parents[i] = parent
            above = max(parent, 0)
            depth = depths[above] + 1
            if depth - 1 <= limit:
                _copy_row(cells, root + above * stride, row_bytes)
                _set_cell(cells, i, packed)
            else:
                depth = limit + 2
                _truncated_row(cells, i, parents, limit, row_bytes, packed)
            depths[i] = depth
            positions[i] = length + min(depth, limit + 1)
        for i in range(n - 1, 0, -1):
            parent = parents[i]
            if parent >= 0:
                sibling[i] = token[parent]
                token[parent] = i
    return True


def _launch(
    parent_list: Tensor,
    width: int,
    selected_index: Tensor,
    topk: int,
    limit: int,
    seq_lens: Tensor,
    tree_mask: Tensor,
    n: int,
    mode: int,
    fill_prefix: bool,
    from_parents: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch = seq_lens.shape[0]
    seq_lens = seq_lens.contiguous()
    positions = torch.empty(batch * n, dtype=torch.int64)
    index, token, sibling = (torch.empty((batch, n), dtype=torch.int64) for _ in range(3))
    numel = tree_mask.numel()
    fits = _build(
        parent_list.data_ptr(), width, selected_index.data_ptr(), topk, limit,
        seq_lens.data_ptr(), batch, n, tree_mask.data_ptr(), numel, mode,
        int(packed_row_bytes(n)) if mode == PACKED else n, fill_prefix, from_parents,
        positions.data_ptr(), index.data_ptr(), token.data_ptr(), sibling.data_ptr(),
    )  # fmt: skip
    if not fits:
        _refuse(seq_lens.tolist(), n, mode, numel)
    return positions, index, token, sibling


def _refuse(lengths: list[int], n: int, mode: int, numel: int) -> None:
    for b, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"seq_lens must be >= 0, got {length} for request {b}")
    least = live_mask_numel(mode, len(lengths), n, sum(lengths))
    raise ValueError(
        f"tree_mask must be of at least {least} elements for {TreeMaskMode(mode).name} "
        f"with these seq_lens, got {numel}"
    )


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
    """Lay out trees given by draft candidates; shapes and dtypes are checked by the op.

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

    Raises:
        ValueError: when a length is negative or the batch does not fit, before any write.
    """
    parent_list = parent_list.contiguous()
    return _launch(
        parent_list, parent_list.shape[1] if depth > 1 else 0, selected_index.contiguous(), topk,
        min(depth, num_draft_tokens), seq_lens, tree_mask, num_draft_tokens, int(tree_mask_mode),
        fill_prefix, from_parents=False,
    )  # fmt: skip


def build_tree_from_parents(
    parents: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    num_draft_tokens: int,
    tree_mask_mode: int,
    fill_prefix: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Lay out trees given by parent nodes: parents int64 (B, n); the rest as `build_tree`."""
    parents = parents.contiguous()
    return _launch(
        parents, num_draft_tokens, parents, 1, num_draft_tokens - 1, seq_lens, tree_mask,
        num_draft_tokens, int(tree_mask_mode), fill_prefix, from_parents=True,
    )  # fmt: skip
