"""What must hold before a mask may change its mode, for every pass that changes one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from torchvm.ops.contracts import MaskRead
from torchvm.passes.report import Reason

if TYPE_CHECKING:
    from torchvm.ops.layout import TreeMaskMode
    from torchvm.passes.liveness import Build, Mask, Use

__all__ = ["first_refusal", "read_refusal"]

_aten = torch.ops.aten
_CONVERSIONS = frozenset(
    {
        _aten._to_copy.default,
        _aten.clone.default,
        _aten.alias.default,
        torch.ops.prims.convert_element_type.default,
    }
)


def first_refusal(mask: Mask, mode: TreeMaskMode, most: MaskRead) -> Reason | None:
    """Say what forbids `mode` for a mask whose readers may read `most`; None if nothing does."""
    if mask.obstacle is not None:
        return mask.obstacle
    refusal = read_refusal(mask, most)
    if refusal is not None:
        return refusal
    return next((r for use in mask.uses if (r := _mode_refusal(use, mode))), None)


def read_refusal(mask: Mask, most: MaskRead) -> Reason | None:
    """Say which use keeps it from being true that all reads are `most` of what was built."""
    for use in mask.uses:
        if use.reads > most:
            if use.reason is not None:
                return use.reason
            full = use.reads is MaskRead.FULL
            return Reason.FULL_READ if full else Reason.TREE_BLOCK_READ
        if use.reads > MaskRead.NOTHING and not _same_lengths(use):
            return Reason.LENGTHS_DIFFER
    if mask.reads is not MaskRead.NOTHING and not _builds_agree(mask.builds):
        return Reason.BUILDS_DIFFER
    return None


def _mode_refusal(use: Use, mode: TreeMaskMode) -> Reason | None:
    """Say why a reader cannot be given `mode`: it cannot be told, or does not take it."""
    if use.reader is None:
        raise AssertionError("only a contract makes a use less than FULL")
    if use.reader.mode_arg is None:
        return Reason.NO_MODE_ARG if use.reads > MaskRead.NOTHING else None
    return None if mode in use.reader.modes else Reason.MODE_NOT_TAKEN


def _same_lengths(use: Use) -> bool:
    """Whether a reader that takes `seq_lens` is given those of the build.

    With others it finds other cells in FULL_MASK, whose rows lie by length, and the right ones
    in a compact layout.
    """
    given = use.call.arguments.get("seq_lens") if use.call is not None else None
    if use.build is None or not isinstance(given, Node):
        return True
    return _before_conversion(given) is _before_conversion(use.build.seq_lens)


def _before_conversion(value: Any) -> Any:
    """Go back over changes of dtype, device or memory that keep every element."""
    while isinstance(value, Node) and value.target in _CONVERSIONS:
        value = value.args[0]
    return value


def _builds_agree(builds: list[Build]) -> bool:
    """Whether each build rewrites every row, so that none is left of an earlier one."""
    first = builds[0]
    return all(
        statically_known_true(build.bs == first.bs)
        and statically_known_true(build.num_draft_tokens == first.num_draft_tokens)
        for build in builds[1:]
    )
