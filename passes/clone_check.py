"""verify_no_clone: in the graph that runs, no build writes into a copy of its mask.

A functional graph says nothing of copies; whether one is needed is decided when mutation comes
back, after every graph pass. Inductor's own counters miss some, so this looks at the final graph.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec
import torch

from torchvm.ops.contracts import BUILDERS
from torchvm.passes.graph import behind_views, called_op, op_call, source_line
from torchvm.passes.report import ReasonText

if TYPE_CHECKING:
    from torch.fx import Graph

__all__ = ["COPY_CODES", "CopyCode", "MaskCopy", "verify_no_clone"]

_aten = torch.ops.aten
_COPIES = frozenset(
    {_aten.clone.default, _aten._to_copy.default, _aten.copy.default, _aten.new_empty.default}
)


class CopyCode(StrEnum):
    """What is wrong with a build's mask. Codes are stable: tools and tests may rely on them."""

    COPIED = "COPIED"


COPY_CODES: dict[CopyCode, ReasonText] = {
    CopyCode.COPIED: ReasonText(
        "a build writes into a copy of the whole mask, made in every step: something still needs "
        "the mask as it was before, or it is a slice of a buffer that is written elsewhere",
        "let every reader of a mask come before its next build, keep HoistMaskReaders among the "
        "passes, and give the build a buffer of its own",
    ),
}


class MaskCopy(msgspec.Struct, frozen=True):
    """A whole-mask copy that a build writes into: `CopyCode.COPIED`."""

    build: str
    """Name of the build's node."""
    copied: str
    """Name of the node that is copied."""
    source: str
    """The user's `file:line` of the build."""


def verify_no_clone(graph: Graph) -> list[MaskCopy]:
    """Find the copies of masks that builds of a final graph write into; none is the proof.

    Args:
        graph: the post-grad graph as Inductor lowers it, with bare mutating calls.
    """
    copies = []
    for node in graph.nodes:
        op = called_op(node)
        builder = BUILDERS.get(str(op.name())) if op is not None else None
        call = op_call(node) if builder is not None else None
        if call is None or builder is None or call.written:
            continue
        made = behind_views(call.arguments[builder.mask_arg])
        if made.target in _COPIES:
            origin = behind_views(made.all_input_nodes[0])
            copies.append(MaskCopy(node.name, origin.name, source_line(node)))
    return copies
