"""What must hold before a mask may change its mode, for every pass that changes one."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from torchvm.ops.contracts import MaskRead
from torchvm.ops.layout import TreeMaskMode, packed_row_bytes
from torchvm.passes.graph import symbolic_value
from torchvm.passes.report import Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchvm.passes.liveness import Build, Mask, Use

__all__ = ["batch_refusal", "first_refusal", "read_refusal", "smallest_mode"]

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


def smallest_mode(
    masks: Sequence[Mask], max_bs: int, num_draft_tokens: int
) -> tuple[TreeMaskMode, Reason]:
    """Choose the layout of a buffer whose uses in all graphs are these.

    Args:
        masks: the buffer as an input of each graph that takes it; that it is an input does not
            count against another mode, since it is not allocated yet.
        max_bs: requests that the buffer is for.
        num_draft_tokens: draft tokens per request that it is for.

    Returns:
        The mode and why: ELIDED, COMPACTED, or the first reason to keep FULL_MASK.
    """
    refusal = next(
        (r for mask in masks if (r := _planned_refusal(mask, max_bs, num_draft_tokens))),
        None,
    )
    if refusal is not None:
        return TreeMaskMode.FULL_MASK, refusal
    uses = [use for mask in masks for use in mask.uses]
    refused = {
        mode: next((r for use in uses if (r := _mode_refusal(use, mode))), None)
        for mode in (TreeMaskMode.QLEN_ONLY, TreeMaskMode.QLEN_ONLY_BITPACKING)
    }
    if all(use.reads is MaskRead.NOTHING for use in uses):
        refusal = refused[TreeMaskMode.QLEN_ONLY]
        if refusal is not None:
            return TreeMaskMode.FULL_MASK, refusal
        return TreeMaskMode.QLEN_ONLY, Reason.ELIDED
    packs = packed_row_bytes(num_draft_tokens) < num_draft_tokens
    for mode in sorted(refused, reverse=bool(packs)):
        if refused[mode] is None:
            return mode, Reason.COMPACTED
    return TreeMaskMode.FULL_MASK, refused[TreeMaskMode.QLEN_ONLY] or Reason.MODE_NOT_TAKEN


def _planned_refusal(mask: Mask, max_bs: int, num_draft_tokens: int) -> Reason | None:
    if mask.obstacle not in (None, Reason.GRAPH_INPUT):
        return mask.obstacle
    if any(not build.written.whole for build in mask.builds):
        return Reason.BUILT_THROUGH_VIEW
    if any(
        not statically_known_true(bs <= max_bs) or not statically_known_true(n <= num_draft_tokens)
        for bs, n in mask.batches()
    ):
        return Reason.CAPACITY
    if mask.sizes:
        return Reason.SHAPE_READ
    told = [use.told_mode for use in mask.uses if use.told_mode is not None]
    modes = [*told, *(build.mode for build in mask.builds)]
    if any(mode != TreeMaskMode.FULL_MASK for mode in modes):
        return Reason.MODE_MISMATCH
    return read_refusal(mask, MaskRead.TREE_BLOCK)


def read_refusal(mask: Mask, most: MaskRead) -> Reason | None:
    """Say which use keeps it from being true that all reads are `most` of what was built."""
    for use in mask.uses:
        if use.reads > most:
            if use.reason is not None:
                return use.reason
            full = use.reads is MaskRead.FULL
            return Reason.FULL_READ if full else Reason.TREE_BLOCK_READ
        refusal = batch_refusal(use) if use.reads > MaskRead.NOTHING else None
        if refusal is not None:
            return refusal
    if mask.reads is not MaskRead.NOTHING and not _builds_agree(mask.builds):
        return Reason.BUILDS_DIFFER
    return None


def _mode_refusal(use: Use, mode: TreeMaskMode) -> Reason | None:
    """Say why a reader cannot be given `mode`: it cannot be told, or does not take it."""
    if use.reader is None:
        raise AssertionError("only a contract makes a use less than FULL")
    if use.reader.mode_arg is None:
        return Reason.NO_MODE_ARG if use.reads > MaskRead.NOTHING else None
    if use.is_shared(use.reader.mode_arg):
        return Reason.MODE_SHARED
    return None if mode in use.reader.modes else Reason.MODE_NOT_TAKEN


def batch_refusal(use: Use) -> Reason | None:
    """Say what keeps a reader from looking at the rows that the build wrote.

    With other lengths or another n than the build it finds other cells in FULL_MASK, whose rows
    lie by both, than in a compact layout.
    """
    if use.build is None:
        return None
    given = use.seq_lens
    if given is not None and _before_conversion(given) is not _before_conversion(
        use.build.seq_lens
    ):
        return Reason.LENGTHS_DIFFER
    n = use.num_draft_tokens
    if n is not None and not statically_known_true(n == use.build.num_draft_tokens):
        return Reason.NODES_DIFFER
    return None


def _before_conversion(value: Any) -> Any:
    """Go back over changes of dtype, device or memory that keep every length."""
    while isinstance(value, Node) and value.target in _CONVERSIONS:
        if symbolic_value(value).dtype not in (torch.int32, torch.int64):
            break  # A bool or a byte does not hold a length.
        value = value.args[0]
    return value


def _builds_agree(builds: list[Build]) -> bool:
    """Whether each build rewrites every row, so that none is left of an earlier one."""
    return all(
        statically_known_true(build.bs == before.bs)
        and statically_known_true(build.num_draft_tokens == before.num_draft_tokens)
        for before, build in pairwise(builds)
    )
