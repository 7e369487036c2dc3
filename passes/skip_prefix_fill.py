"""SkipPrefixFill: a mask that must stay FULL_MASK is built without its prefix columns.

A reader of the tree block that only understands FULL_MASK needs the rows where they are, and
never looks at the ones before them, which are most of what a build writes.

    before                                       after
    ..., m1 = build_tree(..., m0, FULL)          ..., m1 = build_tree(..., m0, FULL, False)
    attention(q, ..., m1)  # only takes FULL     attention(q, ..., m1)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchvm.ops.contracts import MaskRead
from torchvm.passes.base import MaskPass
from torchvm.passes.report import Reason
from torchvm.passes.requirements import read_refusal

if TYPE_CHECKING:
    from torchvm.passes.liveness import Mask

__all__ = ["SkipPrefixFill"]


class SkipPrefixFill(MaskPass):
    """`fill_prefix=False` where every read stays in the tree block."""

    fired = Reason.PREFIX_SKIPPED

    def declines(self, mask: Mask) -> Reason | None:
        """Decline when the prefix is read, or the mask is none that this graph owns."""
        return mask.obstacle or read_refusal(mask, MaskRead.TREE_BLOCK)

    def rewrite(self, mask: Mask) -> None:
        """Leave the prefix out of every build."""
        for build in mask.builds:
            build.call.set_argument("fill_prefix", value=False)
