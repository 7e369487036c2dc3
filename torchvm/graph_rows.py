"""The nodes of a functional graph as rows of a table, and what each is to a verify mask."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from torchvm.ops.contracts import mask_readers
from torchvm.ops.layout import tree_mode
from torchvm.ops.library import NAMESPACE
from torchvm.passes.graph import (
    OpCall,
    called_op,
    format_value,
    neighbourhood,
    op_call,
    source_line,
    symbolic_value,
)
from torchvm.passes.liveness import ALLOC, Mask, find_masks, follow_mask

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.fx import Graph, Node

__all__ = ["NodeRow", "Role", "graph_rows", "known_masks"]


class Role(StrEnum):
    """What a node is to the masks of its graph."""

    mask = "mask"
    """A value of a whole mask: its allocation, or what a build made of it."""
    builder = "builder"
    reader = "reader"
    """Uses a mask, as far as its contract says; without one it reads all."""
    torchvm = "torchvm"
    """Another op of torchvm."""
    input = "input"
    output = "output"
    other = "other"


class NodeRow(msgspec.Struct, frozen=True):
    """One node of a graph as a table shows it."""

    name: str
    op: str
    inputs: tuple[str, ...]
    """`argument=dtype[shape] @device` for tensors, `argument=value` for the rest."""
    output: str
    """`dtype[shape] @device`, several in parentheses, "" for none."""
    nbytes: int | str | None
    """Bytes of the output: a number, an expression for dynamic sizes, None for no tensor."""
    source: str
    role: Role = Role.other
    mode: str = ""
    """Layout of the mask that the node is, builds or is told of; "" where there is none."""
    reads: str = ""
    """How much of a mask a reader reads."""
    readers: tuple[str, ...] = ()
    """Of a mask's value, the nodes that read it."""
    takes: tuple[str, ...] = ()
    """The nodes that the inputs come from."""


def graph_rows(
    graph: Graph, masks: Sequence[Mask], *, every_node: bool, device: str = ""
) -> tuple[NodeRow, ...]:
    """Make a row for each node, or for torchvm's ops and their direct neighbours.

    Args:
        graph: a functional graph.
        masks: of `known_masks`.
        every_node: whether all nodes get one.
        device: what CPU tensors are shown on, "" for the CPU.
    """
    nodes = list(graph.nodes) if every_node else neighbourhood(graph)
    facts = _mask_facts(masks)
    return tuple(_row(node, facts.get(node, {}), device) for node in nodes)


def known_masks(graph: Graph) -> list[Mask]:
    """Find the masks that a graph builds, allocates, or gives to a reader with a contract."""
    found = find_masks(graph)
    seen = {version for mask in found for version in mask.versions}
    for node in graph.nodes:
        for root in _unbuilt(node):
            if root not in seen:
                found.append(follow_mask(graph, root))
                seen.update(found[-1].versions)
    return found


def _unbuilt(node: Node) -> Iterator[Node]:
    """Nodes that this one shows to be masks, whether or not a build writes them."""
    op = called_op(node)
    if op is not None and op.name() == ALLOC:
        yield node
    for reader in mask_readers(op) if op is not None else ():
        call = op_call(node)
        given = call.arguments.get(reader.arg) if call is not None else None
        if isinstance(given, torch.fx.Node):
            yield given


def _mask_facts(masks: Sequence[Mask]) -> dict[Node, dict[str, Any]]:
    """What the masks say of the nodes that are part of them; a build counts before a read."""
    facts: dict[Node, dict[str, Any]] = {}
    for mask in masks:
        mode = mask.mode.name
        for version in mask.versions:
            names = tuple(use.node.name for use in mask.uses if use.node in version.users)
            facts[version] = {"role": Role.mask, "mode": mode, "readers": names}
        for build in mask.builds:
            facts[build.call.node] = {"role": Role.builder, "mode": _mode_name(build.mode)}
        for use in mask.uses:
            told = _mode_name(use.told_mode) or mode
            read = {"role": Role.reader, "mode": told, "reads": use.reads.name}
            if use.node.op != "output":
                facts.setdefault(use.node, read)
    return facts


def _mode_name(mode: Any) -> str:
    try:
        return tree_mode(mode).name
    except ValueError:
        return ""


def _row(node: Node, facts: dict[str, Any], device: str) -> NodeRow:
    call = op_call(node)
    if call is not None:
        order = [argument.name for argument in call.op._schema.arguments]
        given: dict[str, Any] = {**call.arguments, **{k: w.base for k, w in call.written.items()}}
        inputs = [
            _input(k, given[k], "!" * (k in call.written), device) for k in order if k in given
        ]
        op = call.name
    else:
        inputs = [_shown(value, device) for value in node.args]
        op = node.op if node.op in ("placeholder", "output") else _name(node.target)
    value = node.meta.get("val")
    return NodeRow(
        node.name,
        op,
        tuple(inputs),
        _value_text(value, device),
        _nbytes(value),
        source_line(node),
        **{"role": _plain_role(node, call), **facts},
        takes=tuple(dict.fromkeys(n.name for n in node.all_input_nodes)),
    )


def _plain_role(node: Node, call: OpCall | None) -> Role:
    if call is not None and call.op.namespace == NAMESPACE:
        return Role.torchvm
    if node.op in ("placeholder", "get_attr"):
        return Role.input
    return Role.output if node.op == "output" else Role.other


def _name(target: Any) -> str:
    return str(getattr(target, "__name__", target))


def _input(name: str, argument: Any, mark: str, device: str) -> str:
    return f"{name}{mark}={_shown(argument, device)}"


def _shown(argument: Any, device: str) -> str:
    """A tensor or symbol by its metadata, a node of several results by name, the rest as is."""
    if isinstance(argument, tuple | list):
        return "[" + ", ".join(_shown(value, device) for value in argument) + "]"
    value = symbolic_value(argument)
    several = value is None or isinstance(value, tuple | list)
    if isinstance(argument, torch.fx.Node) and several:
        return f"%{argument.name}"
    if isinstance(argument, torch.device) and argument.type == "cpu":
        return device or "cpu"
    return _value_text(value, device) or (
        str(argument) if isinstance(argument, torch.dtype | torch.device) else repr(argument)
    )


def _value_text(value: Any, device: str) -> str:
    """Write tensors with their device, which those of a tuple that share one name once."""
    tensors = _tensors(value)
    places = {device or "cpu" if t.device.type == "cpu" else str(t.device) for t in tensors}
    if len(places) > 1:
        return "(" + ", ".join(_value_text(v, device) for v in value) + ")"
    return " @".join([format_value(value), *places])


def _tensors(value: Any) -> list[torch.Tensor]:
    values = list(value) if isinstance(value, tuple | list) else [value]
    return [v for v in values if isinstance(v, torch.Tensor)]


def _nbytes(value: Any) -> int | str | None:
    sizes = [tensor.numel() * tensor.element_size() for tensor in _tensors(value)]
    if not sizes:
        return None
    total = sum(sizes)
    return total if isinstance(total, int) else str(total)
