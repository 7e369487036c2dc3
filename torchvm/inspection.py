"""Trace a function to the graphs that a compiler would get, and see what the passes make of them.

Everything runs on fake tensors: nothing is computed and no mask is allocated.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.utils._pytree import tree_map_only

from torchvm.compilation import PASSES
from torchvm.passes.base import MaskPipeline
from torchvm.passes.graph import (
    format_value,
    graph_modules,
    neighbourhood,
    op_call,
    source_line,
    symbolic_value,
)
from torchvm.passes.report import MaskReport
from torchvm.tracing import fake_mode, trace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.fx import Graph, Node

__all__ = ["NodeRow", "TracedGraph", "trace_graphs"]


class NodeRow(msgspec.Struct, frozen=True):
    """One node of a graph as a table shows it."""

    name: str
    op: str
    inputs: tuple[str, ...]
    """`argument=dtype[shape]` for tensors, `argument=value` for the rest."""
    output: str
    """`dtype[shape]`, several in parentheses, "" for none."""
    nbytes: int | str | None
    """Bytes of the output: a number, an expression for dynamic sizes, None for no tensor."""
    source: str


class TracedGraph(msgspec.Struct, frozen=True):
    """One functional graph of a traced function."""

    before: tuple[NodeRow, ...]
    after: tuple[NodeRow, ...]
    reports: tuple[MaskReport, ...]


def trace_graphs(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    every_node: bool = False,
    dynamic: bool | None = None,
) -> list[TracedGraph]:
    """Trace a function as `torch.compile` would and run the passes on each of its graphs.

    Args:
        function: what would be compiled.
        args: example arguments; tensors are replaced by fakes of the same metadata.
        kwargs: example keyword arguments.
        every_node: rows for all nodes; by default torchvm's ops and their direct neighbours.
        dynamic: as in `torch.compile`.

    Returns:
        One entry per graph that holds nodes; several where the function breaks the graph.
    """
    mode = fake_mode()
    fake = partial(mode.from_tensor, static_shapes=not dynamic)
    fakes = tree_map_only(torch.Tensor, fake, (tuple(args), dict(kwargs or {})))
    traced = trace(function, *fakes, mode=mode, dynamic=dynamic)
    return [
        _inspect(module.graph, every_node=every_node)
        for found in traced
        for module in graph_modules(found.module)
    ]


def _inspect(graph: Graph, *, every_node: bool) -> TracedGraph:
    def rows() -> tuple[NodeRow, ...]:
        nodes = list(graph.nodes) if every_node else neighbourhood(graph)
        return tuple(_row(node) for node in nodes)

    before = rows()
    reports: list[MaskReport] = []
    MaskPipeline([p() for p in PASSES], reports.extend)(graph)
    return TracedGraph(before, rows(), tuple(reports))


def _row(node: Node) -> NodeRow:
    call = op_call(node)
    if call is not None:
        order = [argument.name for argument in call.op._schema.arguments]
        given: dict[str, Any] = {**call.arguments, **{k: w.base for k, w in call.written.items()}}
        inputs = tuple(_input(k, given[k], "!" * (k in call.written)) for k in order if k in given)
        op = call.name
    else:
        inputs = tuple(_input("", value, "") for value in node.args)
        op = node.op if node.op in ("placeholder", "output") else _name(node.target)
    value = node.meta.get("val")
    return NodeRow(node.name, op, inputs, format_value(value), _nbytes(value), source_line(node))


def _name(target: Any) -> str:
    return str(getattr(target, "__name__", target))


def _input(name: str, argument: Any, mark: str) -> str:
    shown = _shown(argument)
    return f"{name}{mark}={shown}" if name else shown


def _shown(argument: Any) -> str:
    """A tensor or symbol by its metadata, a node of several results by name, the rest as is."""
    if isinstance(argument, tuple | list):
        return "[" + ", ".join(map(_shown, argument)) + "]"
    value = symbolic_value(argument)
    several = value is None or isinstance(value, tuple | list)
    if isinstance(argument, torch.fx.Node) and several:
        return f"%{argument.name}"
    return format_value(value) or repr(argument)


def _nbytes(value: Any) -> int | str | None:
    tensors = list(value) if isinstance(value, tuple | list) else [value]
    sizes = [v.numel() * v.element_size() for v in tensors if isinstance(v, torch.Tensor)]
    if not sizes:
        return None
    total = sum(sizes)
    return total if isinstance(total, int) else str(total)
