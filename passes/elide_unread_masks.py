"""ElideUnreadMasks: a mask that nobody reads is built in the smallest layout that has a kernel.

Engines allocate FULL_MASK for the whole context and refill it every step, also for attention
back ends that never look at it.

    before                                            after
    m0 = alloc_verify_mask(256, 4, 1048576, FULL)     m0 = alloc_verify_mask(..., QLEN_ONLY)
    pos, ..., m1 = build_tree(..., m0, FULL)          pos, ..., m1 = build_tree(..., m0, QLEN_ONLY)
    attention(q, k, v, m1)  # reads NOTHING           attention(q, k, v, m1)

The build stays: positions and links come from it, and it never depends on the layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchvm.ops.contracts import MaskRead
from torchvm.ops.layout import TreeMaskMode
from torchvm.passes.base import MaskPass
from torchvm.passes.report import Reason
from torchvm.passes.requirements import first_refusal
from torchvm.passes.rewrite import change_mode

if TYPE_CHECKING:
    from torchvm.passes.liveness import Mask

__all__ = ["ElideUnreadMasks"]


class ElideUnreadMasks(MaskPass):
    """QLEN_ONLY for a FULL_MASK whose every read is NOTHING."""

    fired = Reason.ELIDED

    def declines(self, mask: Mask) -> Reason | None:
        """Decline when something reads the mask or its mode cannot change."""
        return first_refusal(mask, TreeMaskMode.QLEN_ONLY, MaskRead.NOTHING)

    def rewrite(self, mask: Mask) -> None:
        """Make the allocation and every build QLEN_ONLY."""
        change_mode(mask, TreeMaskMode.QLEN_ONLY)
