"""The tree block of every request, in tensor operations that wait for no GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchvm.ops.layout import TreeMaskMode, request_offsets, tree_row_numel

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["read_tree_blocks", "unpack_rows"]


def read_tree_blocks(
    mask: Tensor, mode: TreeMaskMode, seq_lens: Tensor, num_draft_tokens: int
) -> Tensor:
    """Read the n x n cells of each request.

    Args:
        mask: 1-D bool or uint8, in the layout `mode`.
        mode: the layout.
        seq_lens: (B,) int64; where a row begins in a FULL_MASK. A negative one counts as 0, and
            cells that lie outside the mask are not set.
        num_draft_tokens: n.

    Returns:
        (B, n, n) bool.
    """
    n, batch = num_draft_tokens, seq_lens.shape[0]
    if mode is not TreeMaskMode.FULL_MASK:
        size = int(tree_row_numel(mode, n))
        rows = mask[: batch * n * size].view(batch, n, size)
        return rows != 0 if mode is TreeMaskMode.QLEN_ONLY else unpack_rows(rows, n)
    numel, node = mask.numel(), torch.arange(n, device=mask.device)
    # Bounded, so that sums of garbage do not wrap back inside.
    lengths = seq_lens.clamp(0, numel)
    begin = request_offsets(lengths, n)[:-1] + lengths
    places = begin[:, None, None] + node[:, None] * (lengths + n)[:, None, None] + node
    cells = mask[places.clamp(max=max(numel - 1, 0))] != 0
    return cells.logical_and_(places < numel)


def unpack_rows(rows: Tensor, num_draft_tokens: int) -> Tensor:
    """Unpack little-endian bits: (..., row bytes) uint8 to (..., n) bool."""
    bits = torch.arange(8, dtype=torch.uint8, device=rows.device)
    cells = (rows.unsqueeze(-1) >> bits) & 1
    return cells.flatten(-2)[..., :num_draft_tokens] != 0
