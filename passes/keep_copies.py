"""KeepCopies: a copy that is made to be overwritten stays a copy.

Inductor drops clones from functional graphs and decides later which writes happen in place. It
does not see that a call reads, in one argument, the memory that it writes in another
(pytorch issue 198031): results are wrong, silently.

    before                                after
    y = clone(x)                          y = copy_value(clone(x))
    merge(y!, x)  # compiled as (x!, x)   merge(y!, x)

Only calls that have to do with a verify mask are changed: builds, ops with a contract, and what
else takes a mask. The copy is the one that the user wrote: the clone before it is dropped.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

from torchvm.ops.contracts import BUILDERS, mask_readers
from torchvm.ops.copies import COPY_VALUE
from torchvm.ops.environment import flag
from torchvm.passes.cache_key import cache_key
from torchvm.passes.graph import is_functionalized, is_view, op_call, source_line
from torchvm.passes.liveness import find_masks

if TYPE_CHECKING:
    from torch.fx import Graph, Node

    from torchvm.passes.graph import OpCall

__all__ = ["KeepCopies"]

_aten = torch.ops.aten
_DROPPED: dict[object, int] = {
    _aten.clone.default: 0,
    _aten._to_copy.default: 0,
    _aten.copy.default: 1,
    _aten.repeat.default: 0,
    _aten.lift_fresh_copy.default: 0,
    torch.ops.prims.convert_element_type.default: 0,
}
"""Ops that Inductor may take for the argument at this position."""


class _Shared(NamedTuple):
    """A call whose arguments are copies or views of one value."""

    call: OpCall
    origins: frozenset[Node]
    copies: tuple[Node, ...]
    """The arguments that have memory of their own only by a copy."""


class KeepCopies(CustomGraphPass):  # type: ignore[misc, unused-ignore]
    """Make copies opaque where the copied value goes into the same mutating call."""

    def __call__(self, graph: Graph) -> None:
        """Rewrite one functional graph in place, and warn of each call that is changed."""
        if flag("TORCHVM_DISABLE"):
            return
        shared = [found for node in graph.nodes if (found := _shared(node)) is not None]
        masks = {v for mask in find_masks(graph) for v in mask.versions} if shared else set()
        for found in shared:
            op = found.call.op
            named = mask_readers(op) or op.name() in BUILDERS
            if named or not masks.isdisjoint({*found.origins, *found.call.node.all_input_nodes}):
                _keep(graph, found)

    def uuid(self) -> str | None:
        """Return the compile-cache key."""
        return cache_key(["KeepCopies", f"TORCHVM_DISABLE={flag('TORCHVM_DISABLE')}"])


def _shared(node: Node) -> _Shared | None:
    """Find arguments that a mutating call may be given as one tensor, though they are two."""
    call = op_call(node) if is_functionalized(node) else None
    if call is None:
        return None
    by_origin: dict[Node, dict[Node, bool]] = {}
    for argument in node.all_input_nodes:
        if isinstance(argument.meta.get("val"), torch.Tensor):
            origin, copied = _origin(argument)
            by_origin.setdefault(origin, {})[argument] = copied
    groups = {o: a for o, a in by_origin.items() if len(a) > 1 and any(a.values())}
    if not groups:
        return None
    copies = [a for arguments in groups.values() for a, copied in arguments.items() if copied]
    return _Shared(call, frozenset(groups), tuple(copies))


def _origin(node: Node) -> tuple[Node, bool]:
    """Go back over views and copies of the same kind; say whether a copy was among them."""
    copied = False
    while True:
        if is_view(node):
            node = node.all_input_nodes[0]
        elif (source := _copied(node)) is not None:
            node, copied = source, True
        else:
            return node, copied


def _copied(node: Node) -> Node | None:
    """Return what a node copies, if dtype, device and shape stay."""
    position = _DROPPED.get(node.target)
    if position is None or len(node.args) <= position:
        return None
    source = node.args[position]
    if not isinstance(source, torch.fx.Node):
        return None
    value, before = node.meta.get("val"), source.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(before, torch.Tensor):
        return None
    same = (value.dtype, value.device, value.shape) == (before.dtype, before.device, before.shape)
    return source if same else None


def _keep(graph: Graph, shared: _Shared) -> None:
    node = shared.call.node
    for argument in shared.copies:
        with graph.inserting_before(node):
            kept = graph.call_function(COPY_VALUE, (argument,))
        kept.meta.update({k: v for k, v in argument.meta.items() if k in ("val", "stack_trace")})
        node.replace_input_with(argument, kept)
    place = source_line(node)
    warnings.warn(
        f"{shared.call.name}{f' at {place}' if place else ''} reads a tensor and writes a copy of "
        "it, or the reverse: torch compiles that to one tensor and wrong results (pytorch issue "
        "198031); torchvm keeps the copy. Give the op tensors that are not copies of each other",
        UserWarning,
        stacklevel=2,
    )
