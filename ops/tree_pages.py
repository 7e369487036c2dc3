"""torchvm::expand_tree_pages: the tree block of a mask as page tables, one per node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchvm.ops.checks import check_live_mask, check_mask, check_tensor, int64, require
from torchvm.ops.contracts import MaskRead, register_mask_reader
from torchvm.ops.kernels.tree_blocks import read_tree_blocks
from torchvm.ops.layout import TreeMaskMode, tree_mode
from torchvm.ops.library import register_op

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["expand_tree_pages"]

_SCHEMA = (
    "expand_tree_pages(Tensor tree_mask, Tensor seq_lens, Tensor page_table, "
    "SymInt num_draft_tokens, SymInt page_size, int tree_mask_mode) "
    "-> (Tensor slots, Tensor counts)"
)


def _check(
    tree_mask: Tensor, seq_lens: Tensor, page_table: Tensor, n: int, page_size: int, mode: int
) -> None:
    """Check all that needs no data."""
    require(n >= 1, lambda: f"num_draft_tokens must be >= 1, got {n}")
    require(page_size >= 1, lambda: f"page_size must be >= 1, got {page_size}")
    batch, device = seq_lens.numel(), seq_lens.device
    columns = page_table.shape[1] if page_table.dim() == 2 else 0
    check_tensor("seq_lens", seq_lens, device, batch)
    check_tensor("page_table", page_table, device, batch, columns, dtype=torch.int32)
    check_mask(tree_mask, mode, batch, n, device=device)


def _fake(
    tree_mask: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    num_draft_tokens: int,
    page_size: int,
    tree_mask_mode: int,
) -> tuple[Tensor, Tensor]:
    """Slots (B * n, n) int32 and counts (B * n,) int64."""
    _check(tree_mask, seq_lens, page_table, num_draft_tokens, page_size, tree_mask_mode)
    rows = seq_lens.shape[0] * num_draft_tokens
    return page_table.new_empty(rows, num_draft_tokens), seq_lens.new_empty(rows)


def _cpu(
    tree_mask: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    num_draft_tokens: int,
    page_size: int,
    tree_mask_mode: int,
) -> tuple[Tensor, Tensor]:
    """Check the lengths, which lie here, and expand."""
    _check(tree_mask, seq_lens, page_table, num_draft_tokens, page_size, tree_mask_mode)
    lengths, n = seq_lens.tolist(), num_draft_tokens
    check_live_mask(tree_mask, tree_mode(tree_mask_mode), lengths, n)
    held = page_table.shape[1] * page_size
    require(
        max(lengths, default=-n) + n <= held,
        lambda: (
            f"page_table must be of at least {n} positions behind seq_lens {lengths}, "
            f"got {held} positions"
        ),
    )
    return _expand(tree_mask, seq_lens, page_table, n, page_size, tree_mask_mode)


def _cuda(
    tree_mask: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    num_draft_tokens: int,
    page_size: int,
    tree_mask_mode: int,
) -> tuple[Tensor, Tensor]:
    """Expand: to look at the lengths would be to wait for them."""
    _check(tree_mask, seq_lens, page_table, num_draft_tokens, page_size, tree_mask_mode)
    return _expand(tree_mask, seq_lens, page_table, num_draft_tokens, page_size, tree_mask_mode)


def _expand(
    tree_mask: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    num_draft_tokens: int,
    page_size: int,
    tree_mask_mode: int,
) -> tuple[Tensor, Tensor]:
    """Expand in tensor operations, none of which waits for a GPU.

    Of any lengths: a node that stands at no position of the page table is seen by no node.
    """
    n, columns = num_draft_tokens, page_table.shape[1]
    if columns == 0:
        page_table = page_table.new_zeros(page_table.shape[0], 1)
    node = torch.arange(n, device=seq_lens.device)
    positions = seq_lens.unsqueeze(1) + node
    held = (positions >= 0) & (positions < columns * page_size)
    visible = read_tree_blocks(tree_mask, tree_mode(tree_mask_mode), seq_lens, n)
    visible = visible & held.unsqueeze(1)
    pages = (positions // page_size).clamp_(0, max(columns - 1, 0))
    slots = page_table.gather(1, pages).long() * page_size + positions % page_size
    # Stable, so what a node sees comes first and in the order of nodes.
    seen_first = (~visible).to(torch.uint8).argsort(dim=-1, stable=True)
    ordered = slots.unsqueeze(1).expand(-1, n, -1).gather(-1, seen_first)
    counts = visible.sum(-1)
    past = node >= counts.unsqueeze(-1)
    return ordered.masked_fill(past, 0).int().flatten(0, 1), counts.flatten()


_OP = register_op(_SCHEMA, fake=_fake, kernels={"CPU": _cpu, "CUDA": _cuda})

register_mask_reader(
    "torchvm::expand_tree_pages",
    arg="tree_mask",
    reads=MaskRead.TREE_BLOCK,
    mode_arg="tree_mask_mode",
    modes=tuple(TreeMaskMode),
)


def expand_tree_pages(
    tree_mask: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    *,
    num_draft_tokens: int,
    page_size: int,
    tree_mask_mode: int,
) -> tuple[Tensor, Tensor]:
    """Turn each node's row of the tree block into a page table with pages of one position.

    An attention kernel that knows no masks then attends the tree: node i of request b becomes a
    request of its own, whose cache is the `counts` slots of the nodes that it sees.

    Args:
        tree_mask: 1-D bool or uint8, in the layout `tree_mask_mode`; its prefix is not read.
        seq_lens: (B,) int64 (int32 is converted), L of each request: node j stands at L + j.
        page_table: (B, max_pages) int32, see `tree_attention`.
        num_draft_tokens: n, root included.
        page_size: positions of a page; the cache must have fewer than 2**31 in all.
        tree_mask_mode: a `TreeMaskMode`.

    Returns:
        slots (B * n, n) int32: places in a cache of (num_pages * page_size, 1, ...), ascending by
        node, 0 past those that are seen; counts (B * n,) int64: how many each node sees.

    Raises:
        ValueError: for a shape, dtype, size or device that does not fit, and on the CPU for
            lengths that do not fit mask and page table. On a GPU nobody sees such nodes.

    Example:
        Positions 6 and 7 lie in page 0 and position 8 in page 1:

        >>> import torch, torchvm
        >>> block = torch.tensor([1, 0, 0, 1, 1, 0, 1, 0, 1], dtype=torch.bool)
        >>> slots, counts = torchvm.expand_tree_pages(
        ...     block, torch.tensor([6]), torch.tensor([[2, 0, 1]], dtype=torch.int32),
        ...     num_draft_tokens=3, page_size=4, tree_mask_mode=torchvm.TreeMaskMode.QLEN_ONLY,
        ... )
        >>> slots.tolist(), counts.tolist()
        ([[2, 0, 0], [2, 3, 0], [2, 4, 0]], [1, 2, 2])
    """
    slots, counts = _OP(
        tree_mask, int64(seq_lens), page_table, num_draft_tokens, page_size, int(tree_mask_mode)
    )
    return slots, counts
