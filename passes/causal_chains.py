"""CausalChains: a tree with one child a node is a chain, which needs no mask.

With topk = 1 node i hangs on node i - 1, so every node attends all before it: causal attention.
A reader that has an argument for that gets it, and no mask.

    before                                       after
    ..., m1 = build_tree(..., m0, topk=1, ...)   ..., m1 = build_tree(..., m0, topk=1, ...)
    tree_attention(q, ..., m1, FULL, False, s)   tree_attention(q, ..., None, FULL, True, s)

A selection that is malformed (a parent is missing) is no chain: this pass assumes that there is
none, says so in its verdict, and can be left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from torchvm.ops.contracts import MaskRead
from torchvm.ops.layout import TreeMaskMode
from torchvm.passes.base import MaskPass
from torchvm.passes.report import Reason
from torchvm.passes.requirements import batch_refusal

if TYPE_CHECKING:
    from torchvm.passes.liveness import Build, Mask, Use

__all__ = ["CausalChains"]


class CausalChains(MaskPass):
    """Tell readers of topk = 1 trees that these are causal chains."""

    fired = Reason.CAUSAL_CHAIN
    settles = False

    def declines(self, mask: Mask) -> Reason | None:
        """Decline when no reader can be told, or what it reads may be no chain."""
        return None if any(map(_is_told_of_chain, mask.uses)) else Reason.NO_CHAIN

    def rewrite(self, mask: Mask) -> None:
        """Set the causal argument of every reader that has one, and take the mask away."""
        for use in filter(_is_told_of_chain, mask.uses):
            assert use.call is not None
            assert use.reader is not None
            assert use.reader.causal_arg is not None
            use.call.set_argument(use.reader.causal_arg, value=True)
            if _is_optional(use):
                use.call.set_argument(use.reader.arg, None)


def _is_told_of_chain(use: Use) -> bool:
    if use.call is None or use.reader is None or use.reader.causal_arg is None:
        return False
    if use.reads is not MaskRead.TREE_BLOCK or use.build is None:
        return False
    if not use.build.written.whole or batch_refusal(use) is not None:
        return False  # It looks at other cells than those of the chain.
    if use.call.arguments[use.reader.causal_arg] is not False:
        return False
    if use.is_shared(use.reader.causal_arg):
        return False
    told = use.told_mode
    agrees = told is None or told == use.build.mode
    fits_reader = use.reader.mode_arg is not None or use.build.mode is TreeMaskMode.FULL_MASK
    return _may_be_chain(use.build) and agrees and fits_reader


def _may_be_chain(build: Build) -> bool:
    """Whether a build is of topk = 1 and has a draft step for every node but the root."""
    depth = build.call.arguments.get("depth", 0)
    is_cut = statically_known_true(build.num_draft_tokens - 1 > depth)
    return build.call.arguments.get("topk") == 1 and not is_cut


def _is_optional(use: Use) -> bool:
    assert use.call is not None
    assert use.reader is not None
    name = use.reader.arg
    argument = next(a for a in use.call.op._schema.arguments if a.name == name)
    return isinstance(argument.type, torch.OptionalType)
