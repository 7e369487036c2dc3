"""check_capture: what in a graph cannot be captured in a CUDA graph, or goes wrong on its replay.

Capture records launches once: it cannot wait for the device, memory that it touches must stay
where it is, and what it allocates is overwritten by the next replay. A graph tells all of that
without a GPU.
"""

from __future__ import annotations

import operator
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from torchvm.passes.graph import (
    behind_views,
    called_op,
    graph_modules,
    is_view,
    nodes_in,
    op_call,
    source_line,
)
from torchvm.passes.liveness import ALLOC, find_masks
from torchvm.passes.report import ReasonText
from torchvm.passes.torch_versions import unsafe_in_cuda_graph

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch.fx import Graph, Node

__all__ = ["CAPTURE_CODES", "CaptureCode", "CaptureFinding", "check_capture"]

_aten = torch.ops.aten
_CONTROL_FLOW = ("cond", "while_loop")


class CaptureCode(StrEnum):
    """What stands against capture. Codes are stable: tools and tests may rely on them."""

    HOST_SYNC = "HOST_SYNC"
    HOST_ASSERT = "HOST_ASSERT"
    DATA_DEPENDENT_SHAPE = "DATA_DEPENDENT_SHAPE"
    MASK_SIZED_FROM_DATA = "MASK_SIZED_FROM_DATA"
    CPU_TENSOR = "CPU_TENSOR"
    MUTATED_INPUT = "MUTATED_INPUT"
    MASK_RETURNED = "MASK_RETURNED"
    UNSAFE_OP = "UNSAFE_OP"


CAPTURE_CODES: dict[CaptureCode, ReasonText] = {
    CaptureCode.HOST_SYNC: ReasonText(
        "the host waits for a value of the device, which capture forbids",
        "keep the value on the device, or compute it from host integers before the graph",
    ),
    CaptureCode.HOST_ASSERT: ReasonText(
        "an assertion on the host needs a value of the device, and keeps its .item() alive",
        "check before the graph, or on the device with torch._assert_async",
    ),
    CaptureCode.DATA_DEPENDENT_SHAPE: ReasonText(
        "a tensor's size depends on data: the host has to read it to allocate",
        "use an op of fixed size (nonzero_static, padding to a bound, where instead of indexing)",
    ),
    CaptureCode.MASK_SIZED_FROM_DATA: ReasonText(
        "a verify mask's size is computed from data of the device",
        "size it from host integers: the most requests, draft tokens and context there can be",
    ),
    CaptureCode.CPU_TENSOR: ReasonText(
        "a CPU tensor among CUDA tensors: its work is not recorded",
        "make it on the device (alloc_verify_mask takes device=; None is the CPU)",
    ),
    CaptureCode.MUTATED_INPUT: ReasonText(
        "an input is written whose memory may move between replays: CUDA graphs are skipped",
        "torch._dynamo.mark_static_address(tensor) or a registered buffer; then name it in "
        "static_input_names",
    ),
    CaptureCode.MASK_RETURNED: ReasonText(
        "a mask allocated inside the graph leaves it: the next replay overwrites it",
        "own the mask outside (maybe_create_verify_mask) and pass it in, or clone the result",
    ),
    CaptureCode.UNSAFE_OP: ReasonText(
        "Inductor keeps this op out of CUDA graphs", "move the op out of what is captured"
    ),
}


class CaptureFinding(msgspec.Struct, frozen=True):
    """One thing in a graph that stands against capturing it."""

    code: CaptureCode
    node: str
    """Name of the node."""
    op: str
    source: str
    """The user's `file:line`, "" when unknown."""
    remedy: str

    def __str__(self) -> str:
        """One line: code, op, place, meaning, remedy."""
        place = f" at {self.source}" if self.source else ""
        meaning = CAPTURE_CODES[self.code].meaning
        return f"{self.code} {self.node} ({self.op}){place}: {meaning}; {self.remedy}"


class _Boundary(NamedTuple):
    """What a graph shares with its caller."""

    static: frozenset[str]
    """Inputs whose memory stays where it is."""
    written: dict[Node, Node]
    """Inputs that are overwritten, each with the node that does it first."""
    returned: list[Node]


def check_capture(
    graph: Graph | GraphModule | ExportedProgram, *, static_input_names: Iterable[str] = ()
) -> list[CaptureFinding]:
    """Find what stands against capturing a graph in a CUDA graph; an empty list is a pass.

    Needs no GPU. A graph without any CUDA tensor is taken as traced on the CPU for a GPU: then
    no CPU tensor is reported.

    Args:
        graph: a functional graph or a final one with mutating calls; nested graphs of a module
            are checked too. Of an exported program, parameters and buffers are static inputs.
        static_input_names: placeholders whose memory stays where it is, as
            `torch._dynamo.mark_static_address` promises.

    Returns:
        Findings of nested graphs, then of the graph itself: its nodes in order, its inputs, its
        results.

    Raises:
        ValueError: when a name is not that of a placeholder.
    """
    program = graph if isinstance(graph, ExportedProgram) else None
    module = graph.graph_module if isinstance(graph, ExportedProgram) else graph
    graphs = [m.graph for m in graph_modules(module)] if isinstance(module, GraphModule) else []
    outer = module.graph if isinstance(module, GraphModule) else module
    graphs = [*(g for g in graphs if g is not outer), outer]
    boundary = _exported_boundary(program) if program is not None else _boundary(outer)
    static = boundary.static | set(static_input_names)
    _check_names(outer, static)
    among_cuda = any(_devices(node) - {"cpu", "meta"} for g in graphs for node in g.nodes)
    findings = [f for g in graphs for f in _check_nodes(g, among_cuda=among_cuda)]
    for placeholder, writer in boundary.written.items():
        if placeholder.name not in static:
            findings.append(_found(CaptureCode.MUTATED_INPUT, placeholder, writer))
    returned = set(boundary.returned)
    made = [root for root in _mask_roots(outer) if root.op == "call_function"]
    lost = [root for root in made if returned & _aliases(root)]
    return [*findings, *(_found(CaptureCode.MASK_RETURNED, root) for root in lost)]


def _boundary(graph: Graph) -> _Boundary:
    output = next(iter(reversed(graph.nodes)))
    returned = nodes_in(output.args) if output.op == "output" else []
    written: dict[Node, Node] = {}
    for node in graph.nodes:
        for argument in _mutated_arguments(node):
            base = behind_views(argument)
            if base.op == "placeholder":
                written.setdefault(base, node)
    return _Boundary(frozenset(), written, returned)


def _exported_boundary(program: ExportedProgram) -> _Boundary:
    """Read off the signature, which has mutated inputs among the results."""
    signature = program.graph_signature
    nodes = {node.name: node for node in program.graph.nodes}
    buffers = {target: name for name, target in signature.inputs_to_buffers.items()}
    static = {*signature.inputs_to_parameters, *buffers.values()}
    static.update(signature.inputs_to_lifted_tensor_constants)
    results = {**signature.buffers_to_mutate, **signature.user_inputs_to_mutate}
    written = {nodes[buffers.get(to, to)]: nodes[result] for result, to in results.items()}
    names = [str(name) for name in signature.user_outputs]
    return _Boundary(frozenset(static), written, [nodes[n] for n in names if n in nodes])


def _check_names(graph: Graph, names: frozenset[str]) -> None:
    known = {node.name for node in graph.find_nodes(op="placeholder")}
    unknown = sorted(names - known)
    if unknown:
        raise ValueError(
            f"static_input_names must be out of the placeholders {sorted(known)}, got {unknown}"
        )


def _found(code: CaptureCode, node: Node, at: Node | None = None) -> CaptureFinding:
    name = getattr(node.target, "__name__", node.target)
    op = called_op(node)
    shown = "input" if node.op == "placeholder" else str(op.name() if op is not None else name)
    source = source_line(at or node)
    return CaptureFinding(code, node.name, shown, source, CAPTURE_CODES[code].remedy)


def _check_nodes(graph: Graph, *, among_cuda: bool) -> Iterator[CaptureFinding]:
    masks = _mask_roots(graph)
    for node in graph.nodes:
        code = _code(node)
        if code is CaptureCode.DATA_DEPENDENT_SHAPE and node in masks:
            code = CaptureCode.MASK_SIZED_FROM_DATA
        if code is None and among_cuda and _begins_on_cpu(node):
            code = CaptureCode.CPU_TENSOR
        if code is not None:
            yield _found(code, node)


def _code(node: Node) -> CaptureCode | None:
    """Say what a single node does against capture."""
    if node.op != "call_function":
        return None
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return CaptureCode.HOST_SYNC if node.target.name() in _CONTROL_FLOW else None
    if node.target is _aten._assert_scalar.default:
        return CaptureCode.HOST_ASSERT
    if torch.Tag.data_dependent_output in _tags(node) or _copies_to_host(node):
        return CaptureCode.HOST_SYNC
    if _is_data_sized(node):  # Of those that follow from each other the first is reported.
        follows = any(map(_is_data_sized, node.all_input_nodes))
        return None if follows else CaptureCode.DATA_DEPENDENT_SHAPE
    return CaptureCode.UNSAFE_OP if unsafe_in_cuda_graph(node) else None


def _tags(node: Node) -> Sequence[torch.Tag]:
    return node.target.tags if isinstance(node.target, torch._ops.OpOverload) else ()


def _tensors(node: Node) -> list[torch.Tensor]:
    val = node.meta.get("val")
    values = val if isinstance(val, tuple | list) else [val]
    return [value for value in values if isinstance(value, torch.Tensor)]


def _devices(node: Node) -> set[str]:
    return {tensor.device.type for tensor in _tensors(node)}


def _copies_to_host(node: Node) -> bool:
    sources = {device for n in node.all_input_nodes for device in _devices(n)}
    return _devices(node) == {"cpu"} and bool(sources - {"cpu", "meta"})


def _begins_on_cpu(node: Node) -> bool:
    """Whether a CPU tensor comes from here and not from another one."""
    inputs = node.all_input_nodes
    return "cpu" in _devices(node) and not any("cpu" in _devices(n) for n in inputs)


def _is_data_sized(node: Node) -> bool:
    if "val" not in node.meta:
        return torch.Tag.dynamic_output_shape in _tags(node)
    symbolic = (t for t in _tensors(node) if t._has_symbolic_sizes_strides)
    return any(map(free_unbacked_symbols, symbolic))


def _mutated_arguments(node: Node) -> Iterator[Node]:
    """The tensors that a call writes in place; none for a functionalized call."""
    op = called_op(node)
    if op is None or not op._schema.is_mutable or node.target is not op:
        return
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given: Any = node.kwargs.get(argument.name)
            if position < len(node.args):
                given = node.args[position]
            yield from nodes_in(given)


def _mask_roots(graph: Graph) -> dict[Node, None]:
    """Every mask: what builds write, and allocations that none does."""
    roots = {mask.origin: None for mask in find_masks(graph)}
    for node in graph.nodes:
        op = called_op(node)
        if op is not None and op.name() == ALLOC:
            roots[node] = None
    return roots


def _aliases(root: Node) -> set[Node]:
    """Every value that may share the memory of a mask: views, and what builds make of it."""
    found = {root}
    pending = [root]
    for node in pending:  # Grows while it is walked.
        for user in node.users:
            call = op_call(user)
            if is_view(user) or (user.target is operator.getitem and is_view(node)):
                made = [user]
            else:
                written = call.written.values() if call is not None else ()
                made = [v for w in written if w.base is node for v in w.versions]
            pending.extend(new for new in made if new not in found)
            found.update(made)
    return found
