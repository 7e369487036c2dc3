"""Masks from one layout to another, in tensor operations that run on every device."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from torchvm.ops.kernels.tree_blocks import read_tree_blocks
from torchvm.ops.layout import TreeMaskMode, live_mask_numel, request_offsets, tree_row_numel

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["mask_convert"]


def _bits(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def _write_blocks(
    out: Tensor, mode: TreeMaskMode, offsets: list[int], n: int, blocks: Tensor
) -> None:
    """Write the tree block of every request, and ones to FULL_MASK's prefix columns."""
    if mode is TreeMaskMode.FULL_MASK:
        for block, (begin, end) in zip(blocks, itertools.pairwise(offsets), strict=True):
            rows = out[begin:end].view(n, -1)
            rows[:, :-n] = 1
            rows[:, -n:] = block
        return
    size = int(tree_row_numel(mode, n))
    rows_of_all = out[: blocks.shape[0] * n * size].view(-1, n, size)
    if mode is TreeMaskMode.QLEN_ONLY:
        rows_of_all.copy_(blocks)
        return
    cells = torch.nn.functional.pad(blocks, (0, 8 * size - n)).view(-1, n, size, 8)
    bits = cells.to(torch.uint8) << _bits(out.device)
    rows_of_all.copy_(bits.sum(-1, dtype=torch.uint8))


def mask_convert(
    mask: Tensor,
    seq_lens: Tensor,
    from_mode: TreeMaskMode,
    to_mode: TreeMaskMode,
    num_draft_tokens: int,
    max_context_len: int,
    out: Tensor,
) -> Tensor:
    """Write the mask to `out`, which is zeroed; shapes and dtypes are checked by the op.

    Args:
        mask: 1-D contiguous bool or uint8, in the layout `from_mode`.
        seq_lens: (B,) int64; read on the host.
        from_mode: layout of `mask`.
        to_mode: layout of `out`.
        num_draft_tokens: n, root included.
        max_context_len: most committed tokens that `out` has room for.
        out: 1-D contiguous bool or uint8.

    Returns:
        `out`.

    Raises:
        ValueError: when a length is negative, more than `out` is for, or the mask is too small.
    """
    lengths = seq_lens.tolist()
    n, full = num_draft_tokens, TreeMaskMode.FULL_MASK
    if min(lengths, default=0) < 0:
        raise ValueError(f"seq_lens must be >= 0, got {min(lengths)}")
    if to_mode is full and max(lengths, default=0) > max_context_len:
        raise ValueError(
            f"max_context_len must be >= all seq_lens, of which one is {max(lengths)}, "
            f"got {max_context_len}"
        )
    live = int(live_mask_numel(from_mode, len(lengths), n, sum(lengths)))
    if mask.numel() < live:
        raise ValueError(
            f"mask must be of at least {live} elements for {from_mode.name} with these "
            f"seq_lens, got {mask.numel()}"
        )
    if from_mode is to_mode is full:
        out[:live] = mask[:live] != 0
        return out
    offsets = request_offsets(seq_lens, n).tolist()
    _write_blocks(out, to_mode, offsets, n, read_tree_blocks(mask, from_mode, seq_lens, n))
    return out
