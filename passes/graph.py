"""Operator calls in a functional FX graph, and a printout of them made for snapshots."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._higher_order_ops.auto_functionalize import (
    auto_functionalized,
    auto_functionalized_v2,
)
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

import torchvm.ops
from torchvm.ops.library import NAMESPACE
from torchvm.passes.torch_versions import returned_results

if TYPE_CHECKING:
    from torch.fx import Graph

__all__ = [
    "EAGER_INPUTS",
    "OpCall",
    "Written",
    "behind_views",
    "called_op",
    "format_graph",
    "format_value",
    "graph_modules",
    "is_functionalized",
    "is_view",
    "neighbourhood",
    "nodes_in",
    "op_call",
    "source_line",
    "symbolic_value",
]

EAGER_INPUTS = "eager_input_vals"
"""Where tracing records the values of a call's arguments, in the shape of (args, kwargs)."""

_OPS_FOLDER = Path(torchvm.ops.__path__[0])
# How auto_functionalized_v2 says that an argument is a part of its base.
_PART_SUFFIXES = ("size", "stride", "storage_offset", "slice_dim", "slice_start", "slice_end")
# Frames in here are our wrappers around the ops, not the user's line.
_OWN_FOLDERS = tuple(str(p) for p in (_OPS_FOLDER, _OPS_FOLDER.resolve()))


class Written(NamedTuple):
    """The tensor that a functionalized call mutates through one argument."""

    base: Node
    """The value before the call."""
    whole: bool
    """Whether the argument is all of `base`, not a slice or another view of it."""
    versions: tuple[Node, ...]
    """The getitem nodes that hold the value after the call; none when nothing uses it."""
    position: int
    """Which result of the wrapper that value is."""


class OpCall(NamedTuple):
    """A call of a registered operator, bare or inside an auto_functionalized wrapper."""

    node: Node
    op: torch._ops.OpOverload
    arguments: dict[str, Any]
    """Arguments by name, schema defaults included; mutated ones are in `written` instead."""
    written: dict[str, Written]

    @property
    def name(self) -> str:
        """`"namespace::name"`, with the overload behind it unless that is `default`."""
        return str(self.op.name())

    @property
    def constants(self) -> dict[str, Any]:
        """The arguments that are plain Python values, by name."""
        return {
            name: value
            for name, value in self.arguments.items()
            if not nodes_in(value) and not isinstance(value, torch.SymInt | torch.SymFloat)
        }

    def argument_names(self, node: Node) -> list[str]:
        """Names of the unmutated arguments in which `node` occurs, inside lists too."""
        return [name for name, value in self.arguments.items() if node in nodes_in(value)]

    def set_argument(self, name: str, value: Any) -> None:
        """Change an unmutated argument in the graph, to a constant."""
        names = [argument.name for argument in self.op._schema.arguments]
        position = names.index(name)
        args, kwargs = self.node.meta.get(EAGER_INPUTS, ((), {}))
        if self.node.target is self.op and position < len(self.node.args):
            self.node.update_arg(position, value)
            args = (*args[:position], value, *args[position + 1 :])
        else:
            self.node.update_kwarg(name, value)
            kwargs = {**kwargs, name: value}
        if EAGER_INPUTS in self.node.meta:
            self.node.meta[EAGER_INPUTS] = (args, kwargs)
        self.arguments[name] = value


def graph_modules(gm: GraphModule) -> list[GraphModule]:
    """Return a graph module and those nested in it, the inner ones first, as Inductor goes."""
    return [m for m in reversed(list(gm.modules())) if isinstance(m, GraphModule)]


def nodes_in(value: Any) -> list[Node]:
    """Return the nodes inside an argument, in order."""
    found: list[Node] = []
    map_arg(value, found.append)
    return found


def op_call(node: Node) -> OpCall | None:
    """Read a node as the call of a registered operator; None when it is anything else.

    Looks through auto_functionalized wrappers of both versions. A wrapper around a higher-order
    operator is not an operator call.
    """
    op = called_op(node)
    if op is None:
        return None
    if node.target is auto_functionalized:
        return _unwrap_v1(node, op)
    if node.target is auto_functionalized_v2:
        return _unwrap_v2(node, op)
    schema = op._schema.arguments
    given = dict(zip((a.name for a in schema), node.args, strict=False)) | dict(node.kwargs)
    return OpCall(node, op, _with_defaults(op, given), {})


def is_functionalized(node: Node) -> bool:
    """Whether a node is the wrapper of a call that would mutate its arguments."""
    return node.target is auto_functionalized_v2 or node.target is auto_functionalized


def called_op(node: Node) -> torch._ops.OpOverload | None:
    """Return the registered operator that a node calls, bare or in a wrapper."""
    if node.op != "call_function":
        return None
    op = node.args[0] if is_functionalized(node) else node.target
    return op if isinstance(op, torch._ops.OpOverload) else None


def is_view(node: Node) -> bool:
    """Whether a node is a view of its first input."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def behind_views(node: Node) -> Node:
    """Go back from a view to the tensor that has the memory."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def source_line(node: Node) -> str:
    """Return `file:line` of the user's code that made a node, or "" when that is unknown.

    It is the innermost frame outside torchvm itself.
    """
    frames = re.findall(r'File "([^"]+)", line (\d+)', str(node.meta.get("stack_trace") or ""))
    own = [f for f in frames if not f[0].startswith(_OWN_FOLDERS)]
    for file, line in reversed(own or frames):
        return f"{file}:{line}"
    return ""


def symbolic_value(argument: Any) -> Any:
    """Return the number or fake tensor behind an argument: a node's `val`, else itself."""
    return argument.meta.get("val") if isinstance(argument, Node) else argument


def format_graph(graph: Graph, *, every_node: bool = False) -> str:
    """Print a graph one line a node: `%name = op(arguments) : dtype[shape]`.

    Free of what moves between versions of torch (file comments, symbol names, wrapper
    spelling); a functionalized call prints as the op with the mutated tensor as `name!`.

    Args:
        graph: a functional graph.
        every_node: all nodes. By default torchvm's own ops and what they touch directly.
    """
    shown = list(graph.nodes) if every_node else neighbourhood(graph)
    return _name_symbols_in_order("\n".join(_format_node(node) for node in shown))


def _name_symbols_in_order(text: str) -> str:
    """Call the symbols of sizes s0, s1, ... as they appear: torch's numbers are arbitrary."""
    names: dict[str, str] = {}
    return re.sub(r"\bs\d+\b", lambda m: names.setdefault(m[0], f"s{len(names)}"), text)


def neighbourhood(graph: Graph) -> list[Node]:
    """Return torchvm's own ops, what they take, and what takes their results, in graph order."""
    shown: set[Node] = set()
    for node in graph.nodes:
        call = op_call(node)
        if call is not None and call.op.namespace == NAMESPACE:
            shown.update([node, *node.all_input_nodes, *node.users])
            for written in call.written.values():
                shown.update(user for version in written.versions for user in version.users)
    return [node for node in graph.nodes if node in shown]


def format_value(value: Any) -> str:
    """Write a fake value as `dtype[shape]`, a symbol as itself, "" for anything else."""
    if isinstance(value, torch.Tensor):
        shape = ", ".join(map(str, value.shape))
        return f"{str(value.dtype).removeprefix('torch.')}[{shape}]"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(format_value, value)) + ")"
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return str(value)
    return ""


def _with_defaults(op: torch._ops.OpOverload, given: dict[str, Any]) -> dict[str, Any]:
    missing = {
        a.name: a.default_value
        for a in op._schema.arguments
        if a.name not in given and a.has_default_value()
    }
    return {**given, **missing}


def _mutated_names(op: torch._ops.OpOverload) -> list[str]:
    return [a.name for a in op._schema.arguments if a.alias_info and a.alias_info.is_write]


def _versions(wrapper: Node, position: int) -> tuple[Node, ...]:
    return tuple(
        user
        for user in wrapper.users
        if user.op == "call_function"
        and getattr(user.target, "__name__", "") == "getitem"
        and user.args[1] == position
    )


def _unwrap_v1(node: Node, op: torch._ops.OpOverload) -> OpCall:
    mutated = _mutated_names(op)
    returned = max(len(op._schema.returns), 1)
    written = {}
    for position, name in enumerate(mutated):
        base = node.kwargs.get(name)
        if isinstance(base, Node):
            index = returned + position
            written[name] = Written(base, True, _versions(node, index), index)
    arguments = {k: v for k, v in node.kwargs.items() if k not in written and k[0] != "_"}
    return OpCall(node, op, arguments, written)


def _unwrap_v2(node: Node, op: torch._ops.OpOverload) -> OpCall:
    mutated = _mutated_names(op)
    bases: Any = node.kwargs.get("_all_bases", ())
    returned = returned_results(op)
    written = {}
    for name in mutated:
        index: Any = node.kwargs.get(f"_{name}_base_index")
        if index is not None:
            whole = not any(f"_{name}_{suffix}" in node.kwargs for suffix in _PART_SUFFIXES)
            position = returned + index
            written[name] = Written(bases[index], whole, _versions(node, position), position)
    known = {argument.name for argument in op._schema.arguments}
    arguments = {k: v for k, v in node.kwargs.items() if k in known}
    return OpCall(node, op, arguments, written)


def _format_node(node: Node) -> str:
    if node.op == "output":
        return f"return {_format_argument(node.args[0])}"
    call = op_call(node)
    if call is not None:
        target = call.name.replace("::", ".")
        order = [a.name for a in call.op._schema.arguments]
        parts = {name: f"{name}={_format_argument(v)}" for name, v in call.arguments.items()}
        parts |= {
            name: f"{name}={_format_argument(w.base)}!" + ("" if w.whole else "[part]")
            for name, w in call.written.items()
        }
        inside = ", ".join(parts[name] for name in order if name in parts)
    else:
        target = node.target if isinstance(node.target, str) else _target_name(node.target)
        keywords = [f"{k}={_format_argument(v)}" for k, v in node.kwargs.items()]
        inside = ", ".join([*map(_format_argument, node.args), *keywords])
    if node.op == "placeholder":
        return f"%{node.name} = input{_format_value(node)}"
    return f"%{node.name} = {target}({inside}){_format_value(node)}"


def _target_name(target: Any) -> str:
    return str(getattr(target, "__name__", target))


def _format_argument(value: Any) -> str:
    if isinstance(value, Node):
        return f"%{value.name}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_format_argument, value)) + "]"
    return str(value) if isinstance(value, torch.dtype | torch.device) else repr(value)


def _format_value(node: Node) -> str:
    value = node.meta.get("val")
    text = "" if isinstance(value, tuple | list) else format_value(value)
    return f" : {text}" if text else ""
