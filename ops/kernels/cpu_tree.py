"""Draft trees on the CPU: mask, prefix, positions and links in one walk over the nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from torchvm.ops.kernels.jit import bytes_at, copy, fill, inlined, int64_at, njit
from torchvm.ops.layout import TreeMaskMode, live_mask_numel, tree_row_numel

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["build_tree", "build_tree_from_parents"]

FULL = int(TreeMaskMode.FULL_MASK)
PACKED = int(TreeMaskMode.QLEN_ONLY_BITPACKING)
# Hints by candidate id: more than most trees have candidates, and little enough to stay cached.
HINT_MASK = 1023


@njit
def _fits(seq_lens: Any, batch: int, n: int, numel: int, is_full: bool) -> bool:
    """Whether no length is negative and, in FULL_MASK, the batch's cells are in the buffer."""
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
def _holder(selected: Any, node: int, wanted: int, hints: Any) -> Any:
    """The node before `node` that holds a candidate id; -1 if none.

    The hint is checked against the ids, so that it may be missing, stale or garbage; without it
    the ascending ids are searched.
    """
    hint = hints[wanted & HINT_MASK]
    if 0 < hint < node and selected[hint - 1] == wanted:
        return hint
    low = 0
    size = node - 1
    while size > 1:
        half = size >> 1
        low = low + half if selected[low + half - 1] < wanted else low
        size -= half
    return low + 1 if size == 1 and selected[low] == wanted else -1


@inlined
def _find_parents(
    selected: Any, parent_list: Any, width: int, topk: int, n: int, hints: Any, parents: Any
) -> None:
    """Parent of each node by the candidate ids of one request; -1 where it has none."""
    for i in range(1, n):
        candidate = selected[i - 1]
        parents[i] = -1
        if candidate < 0:
            continue
        beam = np.uint64(candidate) // np.uint64(topk)
        if beam == 0:
            parents[i] = 0
        elif beam < np.uint64(width):
            wanted = parent_list[beam]
            if wanted >= 0:
                parents[i] = _holder(selected, i, wanted, hints)
        hints[candidate & HINT_MASK] = i


@njit
def _take_parents(named: Any, n: int, parents: Any) -> None:
    """Parent of each node as one request's row names it; -1 unless it is an earlier node."""
    for i in range(1, n):
        parents[i] = named[i] if 0 <= named[i] < i else -1


@njit
def _set_cell(mask: Any, row: int, column: int, packed: bool) -> None:
    if packed:
        mask[row + (column >> 3)] |= np.uint8(1 << (column & 7))
    else:
        mask[row + column] = 1


@inlined
def _write_nodes(
    mask: Any,
    begin: int,
    prefix: int,
    fill_prefix: bool,
    row_bytes: int,
    packed: bool,
    n: int,
    limit: int,
    parents: Any,
    depths: Any,
    length: int,
    first: int,
    outputs: Any,
) -> None:
    """Write all of one request but its links: each row from the parent's, and so each depth.

    Where a walk of `limit` steps ends before the root, the row holds only what that walk meets,
    and the nodes below walk for themselves as well.
    """
    positions, index, token, sibling = outputs
    stride = prefix + row_bytes
    root = begin + prefix
    for i in range(n):
        row = root + i * stride
        if fill_prefix:
            fill(mask, row - prefix, 1, prefix)
        above = max(parents[i], 0)
        depth = depths[above] + 1 if i else 0
        is_cut = depth > limit + 1
        if i == 0 or is_cut:
            fill(mask, row, 0, row_bytes)
            _set_cell(mask, row, 0, packed)
        elif row_bytes < 16:
            for at in range(row_bytes):
                mask[row + at] = mask[root + above * stride + at]
        else:
            copy(mask, row, root + above * stride, row_bytes)
        if is_cut:
            depth = limit + 1
            for _ in range(limit):
                _set_cell(mask, row, above, packed)
                above = parents[above]
        _set_cell(mask, row, i, packed)
        depths[i] = depth
        positions[i] = length + depth
        index[i] = first + i
        token[i] = -1
        sibling[i] = -1


@njit
def _link(parents: Any, n: int, token: Any, sibling: Any) -> None:
    """Put each node before the children that its parent has so far, the last node first."""
    for i in range(n - 1, 0, -1):
        parent = parents[i]
        if parent >= 0:
            sibling[i] = token[parent]
            token[parent] = i


@njit
def _build(
    parent_list: int,
    width: int,
    selected: int,
    topk: int,
    limit: int,
    seq_lens_address: int,
    batch: int,
    n: int,
    mask_address: int,
    numel: int,
    mode: int,
    row_bytes: int,
    fill_prefix: bool,
    from_parents: bool,
    positions: int,
    index: int,
    token: int,
    sibling: int,
) -> bool:
    """Write every output of a batch, or nothing and return False when it does not fit."""
    seq_lens = int64_at(seq_lens_address)
    if not _fits(seq_lens, batch, n, numel, mode == FULL):
        return False
    mask = bytes_at(mask_address)
    parents = np.zeros(n, np.int64)
    depths = np.empty(n, np.int64)
    hints = np.empty(HINT_MASK + 1, np.int32)
    begin = 0
    for b in range(batch):
        named = int64_at(parent_list + 8 * b * width)
        if from_parents:
            _take_parents(named, n, parents)
        else:
            ids = int64_at(selected + 8 * b * (n - 1))
            _find_parents(ids, named, width, topk, n, hints, parents)
        prefix = seq_lens[b] if mode == FULL else 0
        at = 8 * b * n
        next_token, next_sibling = int64_at(token + at), int64_at(sibling + at)
        _write_nodes(
            mask, begin, prefix, fill_prefix, row_bytes, mode == PACKED, n, limit, parents, depths,
            seq_lens[b], b * n,
            (int64_at(positions + at), int64_at(index + at), next_token, next_sibling),
        )  # fmt: skip
        _link(parents, n, next_token, next_sibling)
        begin += n * (prefix + row_bytes)
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
    positions = seq_lens.new_empty(batch * n)
    index = seq_lens.new_empty(batch, n)
    token = seq_lens.new_empty(batch, n)
    sibling = seq_lens.new_empty(batch, n)
    numel = tree_mask.numel()
    fits = _build(
        parent_list.data_ptr(), width, selected_index.data_ptr(), topk, limit,
        seq_lens.data_ptr(), batch, n, tree_mask.data_ptr(), numel, mode,
        tree_row_numel(mode, n), fill_prefix and mode == FULL, from_parents,
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
