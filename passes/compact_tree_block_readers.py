"""CompactTreeBlockReaders: readers of the tree block alone are told the compact layout.

The prefix columns of FULL_MASK are all ones. A kernel that skips them and can be told the mode
gives the same result from the n x n block alone.

    before                                             after
    m0 = alloc_verify_mask(256, 4, 1048576, FULL)      m0 = alloc_verify_mask(..., QLEN_ONLY)
    ..., m1 = build_tree(..., m0, FULL)                ..., m1 = build_tree(..., m0, QLEN_ONLY)
    tree_attention(q, ..., m1, FULL, ...)              tree_attention(q, ..., m1, QLEN_ONLY, ...)

Where every reader takes packed bits and they are smaller, the mode is QLEN_ONLY_BITPACKING.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchvm.ops.contracts import MaskRead
from torchvm.ops.layout import TreeMaskMode, packed_row_bytes
from torchvm.passes.base import MaskPass
from torchvm.passes.graph import symbolic_value
from torchvm.passes.report import Reason
from torchvm.passes.requirements import first_refusal
from torchvm.passes.rewrite import change_mode

if TYPE_CHECKING:
    from torchvm.passes.liveness import Mask

__all__ = ["CompactTreeBlockReaders"]

QLEN_ONLY, PACKED = TreeMaskMode.QLEN_ONLY, TreeMaskMode.QLEN_ONLY_BITPACKING


class CompactTreeBlockReaders(MaskPass):
    """The smallest compact layout for readers that stay in the tree block and take the mode."""

    fired = Reason.COMPACTED

    def declines(self, mask: Mask) -> Reason | None:
        """Decline when a reader needs the prefix, cannot be told, or builds do not agree."""
        refusal = first_refusal(mask, QLEN_ONLY, MaskRead.TREE_BLOCK)
        return None if refusal is None or _packs(mask) else refusal

    def rewrite(self, mask: Mask) -> None:
        """Change allocation and builds and tell every reader."""
        change_mode(mask, PACKED if _packs(mask) else QLEN_ONLY)


def _packs(mask: Mask) -> bool:
    """Whether the mask may be packed and is smaller for it.

    Packing changes the dtype, which `new_ones` and the like take from the mask, and a row's size
    is a guard on n: not for a symbolic one.
    """
    if mask.metadata or first_refusal(mask, PACKED, MaskRead.TREE_BLOCK) is not None:
        return False
    assert mask.alloc is not None
    n = symbolic_value(mask.alloc.arguments["num_draft_tokens"])
    return isinstance(n, int) and packed_row_bytes(n) < n
