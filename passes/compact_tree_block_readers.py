"""CompactTreeBlockReaders: readers of the tree block alone are told the compact layout.

The prefix columns of FULL_MASK are all ones. A kernel that skips them and can be told the mode
gives the same result from the n x n block alone.

    before                                             after
    m0 = alloc_verify_mask(256, 4, 1048576, FULL)      m0 = alloc_verify_mask(..., QLEN_ONLY)
    ..., m1 = build_tree(..., m0, FULL)                ..., m1 = build_tree(..., m0, QLEN_ONLY)
    tree_attention(q, ..., m1, FULL, ...)              tree_attention(q, ..., m1, QLEN_ONLY, ...)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchvm.ops.contracts import MaskRead
from torchvm.ops.layout import TreeMaskMode
from torchvm.passes.base import MaskPass, change_mode
from torchvm.passes.report import Reason
from torchvm.passes.requirements import first_refusal

if TYPE_CHECKING:
    from torchvm.passes.liveness import Mask

__all__ = ["CompactTreeBlockReaders"]


class CompactTreeBlockReaders(MaskPass):
    """QLEN_ONLY for a FULL_MASK whose readers stay in the tree block and take the mode."""

    fired = Reason.COMPACTED

    def declines(self, mask: Mask) -> Reason | None:
        """Decline when a reader needs the prefix, cannot be told, or builds do not agree."""
        return first_refusal(mask, TreeMaskMode.QLEN_ONLY, MaskRead.TREE_BLOCK)

    def rewrite(self, mask: Mask) -> None:
        """Make allocation and builds QLEN_ONLY and tell every reader."""
        change_mode(mask, TreeMaskMode.QLEN_ONLY)
