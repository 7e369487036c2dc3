"""Changing a mask in the graph: its mode everywhere at once, and what was recorded of its size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node, Proxy
from torch.fx.node import map_arg
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._pytree import tree_map

from torchvm.ops.layout import TreeMaskMode, mask_storage, tree_mask_numel
from torchvm.passes.graph import EAGER_INPUTS, symbolic_value

if TYPE_CHECKING:
    from torchvm.passes.liveness import Mask

__all__ = ["change_mode", "declared_storage"]


def change_mode(mask: Mask, mode: TreeMaskMode) -> None:
    """Give an allocation, its builds and its readers another mode; sizes taken from it stay.

    Args:
        mask: one with no obstacle; every reader that has a mode argument takes `mode`.
        mode: the new layout.
    """
    if mask.alloc is None:
        raise AssertionError("only an allocation has a mode to change")
    for node in mask.sizes:
        _replace_by_declared_size(mask, node)
    eager_values = {
        user: _eager_values(user) for version in mask.versions for user in version.users
    }
    mask.alloc.set_argument("tree_mask_mode", int(mode))
    if mode is TreeMaskMode.QLEN_ONLY_BITPACKING:
        mask.alloc.set_argument("dtype", torch.uint8)
    for build in mask.builds:
        build.call.set_argument(build.mode_arg, int(mode))
    for use in mask.uses:
        if use.call is not None and use.reader is not None and use.reader.mode_arg is not None:
            use.call.set_argument(use.reader.mode_arg, int(mode))
    _update_values(mask)
    for user, by_node in eager_values.items():
        _update_eager_inputs(mask, user, by_node)


def declared_storage(mask: Mask) -> tuple[TreeMaskMode, int | str]:
    """Return mode and bytes of a mask as the graph has it, symbolic sizes as text."""
    if mask.alloc is not None:
        sizes = map(symbolic_value, _alloc_sizes(mask))
        nbytes, _ = mask_storage(mask.mode, *sizes)  # Every mask dtype has one byte.
    else:
        value = symbolic_value(mask.origin)
        nbytes = value.numel() * value.element_size()
    return mask.mode, nbytes if isinstance(nbytes, int) else _number_or_text(nbytes)


class _ValueTracer(GraphAppendingTracer):
    """Record arithmetic in a graph together with its values."""

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any) -> Node:
        node = super().create_node(kind, target, args, kwargs, *rest)
        node.meta["val"] = target(*map(symbolic_value, args))
        return node


def _replace_by_declared_size(mask: Mask, size: Node) -> None:
    """Compute a size that the graph asks of the mask from the allocation's arguments instead."""
    tracer = _ValueTracer(size.graph)
    given: list[Any] = [
        Proxy(argument, tracer) if isinstance(argument, Node) else argument
        for argument in _alloc_sizes(mask)
    ]
    with size.graph.inserting_before(size):
        total: Any = tree_mask_numel(mask.mode, *given)
    size.replace_all_uses_with(total.node if isinstance(total, Proxy) else total)
    size.graph.erase_node(size)


def _alloc_sizes(mask: Mask) -> list[Any]:
    assert mask.alloc is not None
    return [mask.alloc.arguments[k] for k in ("bs", "num_draft_tokens", "max_context_len")]


def _update_values(mask: Mask) -> None:
    """Bring the recorded fake tensors of every version to the new size and dtype."""
    assert mask.alloc is not None
    bs, n, context = map(symbolic_value, _alloc_sizes(mask))
    numel, dtype = mask_storage(mask.mode, bs, n, context, mask.alloc.arguments["dtype"])
    for version in mask.versions:
        version.meta["val"] = mask.root.meta["val"].new_empty(numel, dtype=dtype)
    for build in mask.builds:
        wrapper = build.call.node
        if "val" in wrapper.meta:  # What a saved program takes the results' sizes from.
            results = list(wrapper.meta["val"])
            results[build.written.position] = mask.root.meta["val"]
            wrapper.meta["val"] = tuple(results)


def _eager_values(node: Node) -> dict[Node, Any]:
    """What tracing recorded of a call's inputs, by the node each came from."""
    recorded: dict[Node, Any] = {}
    if EAGER_INPUTS in node.meta:

        def record(argument: Any, value: Any) -> None:
            if isinstance(argument, Node):
                recorded[argument] = value

        tree_map(record, (node.args, node.kwargs), node.meta[EAGER_INPUTS])
    return recorded


def _update_eager_inputs(mask: Mask, node: Node, by_node: dict[Node, Any]) -> None:
    """Bring the recorded inputs of a call to the new size.

    Inductor sizes the copies that it makes for a mutated argument by them: with the old size it
    reads past the end of the smaller buffer.
    """
    if EAGER_INPUTS in node.meta:
        new = {version: version.meta["val"] for version in mask.versions}
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: new.get(n, by_node.get(n)))
        node.meta[EAGER_INPUTS] = (args, kwargs)


def _number_or_text(value: torch.SymInt) -> int | str:
    expression = value.node.expr
    return int(expression) if expression.is_number else str(expression)
