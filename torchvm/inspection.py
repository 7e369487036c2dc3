"""Trace a function to the graphs that a compiler would get, and see what the passes make of them.

Everything runs on fake tensors: nothing is computed and no mask is allocated.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
from torch.utils._pytree import tree_map_only

from torchvm.compilation import PASSES
from torchvm.findings import (
    Finding,
    FindingKind,
    clone_findings,
    contract_findings,
    from_capture,
)
from torchvm.graph_rows import NodeRow, graph_rows, known_masks
from torchvm.ops.layout import TreeMaskMode, mask_storage
from torchvm.passes.base import MaskPipeline
from torchvm.passes.capture_check import check_capture
from torchvm.passes.graph import graph_modules, source_line
from torchvm.passes.report import REASONS, MaskReport, Reason, ReasonText
from torchvm.passes.requirements import smallest_mode
from torchvm.passes.rewrite import declared_storage
from torchvm.tracing import TracedModule, fake_mode, trace, uncompiled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.export import ExportedProgram
    from torch.fx import GraphModule

    from torchvm.passes.liveness import Mask

__all__ = ["GraphOptions", "MaskSizes", "TracedGraph", "inspect_program", "trace_graphs"]


class MaskSizes(NamedTuple):
    """What a mask is for."""

    max_bs: int
    num_draft_tokens: int
    max_context_len: int


class GraphOptions(NamedTuple):
    """How graphs are looked at."""

    every_node: bool = False
    """Rows for all nodes; by default torchvm's ops and their direct neighbours."""
    device: str = ""
    """What CPU tensors are shown on; "" is the CPU."""
    sizes: MaskSizes | None = None
    """What masks that are inputs would be allocated for, to plan their layout."""
    static_inputs: bool = False
    """Whether all inputs stay where they are between replays of a captured graph."""


class TracedGraph(msgspec.Struct, frozen=True):
    """One functional graph of a traced function."""

    before: tuple[NodeRow, ...]
    after: tuple[NodeRow, ...]
    reports: tuple[MaskReport, ...]
    remedies: tuple[ReasonText, ...]
    """For each report, what its verdict means and what to do."""
    plans: tuple[MaskReport, ...]
    """Of masks that are inputs, the layout in which they could be allocated."""
    findings: tuple[Finding, ...]
    changed: tuple[str, ...]
    """Names of the rows that the passes changed, added or removed."""
    nodes: int
    """Nodes of the whole graph before the passes."""


def trace_graphs(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    every_node: bool = False,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    mode: FakeTensorMode | None = None,
    options: GraphOptions | None = None,
) -> list[TracedGraph]:
    """Trace a function as `torch.compile` would and run the passes on each of its graphs.

    Args:
        function: what would be compiled, or a compiled function or module.
        args: example arguments; tensors are replaced by fakes of the same metadata.
        kwargs: example keyword arguments.
        every_node: as in `GraphOptions`, where no `options` are given.
        dynamic: as in `torch.compile`.
        fullgraph: as in `torch.compile`.
        mode: of `fake_mode`, when arguments are fakes of it already.
        options: how the graphs are looked at.

    Returns:
        One entry per graph that holds nodes; several where the function breaks the graph.
    """
    function, mode = uncompiled(function), mode or fake_mode()
    options = options or GraphOptions(every_node=every_node)
    fakes: list[torch.Tensor] = []
    fake = partial(_fake, mode, static_shapes=not dynamic, static=fakes)
    given = tree_map_only(torch.Tensor, fake, (tuple(args), dict(kwargs or {})))
    static = [*fakes, *(function.buffers() if isinstance(function, torch.nn.Module) else ())]
    traced = trace(function, *given, mode=mode, dynamic=dynamic, fullgraph=fullgraph)
    return [
        graph
        for found in traced
        for graph in _inspect(found.module, _static_names(found, static, options), options)
    ]


def inspect_program(
    program: ExportedProgram, options: GraphOptions | None = None
) -> list[TracedGraph]:
    """Run the passes on the graphs of an exported program, as `torchvm.compact` does.

    Args:
        program: from `torch.export`, decomposed or not; it is left as it is.
        options: how the graphs are looked at.
    """
    functional = program.run_decompositions({})
    findings = [from_capture(finding) for finding in check_capture(functional)]
    return _inspect(functional.graph_module, None, options or GraphOptions(), findings)


def _fake(
    mode: FakeTensorMode, tensor: torch.Tensor, *, static_shapes: bool, static: list[torch.Tensor]
) -> torch.Tensor:
    """Make a fake of a tensor, on the CPU where this torch cannot trace for its device."""
    fake: torch.Tensor = mode.from_tensor(tensor, static_shapes=static_shapes)
    if fake.device.type == "cuda" and not torch.version.cuda:
        with mode:
            fake = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="cpu")
    if getattr(tensor, "_dynamo_static_input_type", None):
        static.append(fake)
    return fake


def _static_names(
    found: TracedModule, static: Iterable[torch.Tensor], options: GraphOptions
) -> list[str]:
    """Name the inputs whose memory stays where it is."""
    if options.static_inputs:
        return [node.name for node in found.module.graph.find_nodes(op="placeholder")]
    known = {id(tensor) for tensor in static}
    return [node.name for node, tensor in found.inputs.items() if id(tensor) in known]


def _inspect(
    outer: GraphModule,
    static_names: Sequence[str] | None,
    options: GraphOptions,
    capture: Sequence[Finding] = (),
) -> list[TracedGraph]:
    """Look at a module and those nested in it; what is found of capture is said of the module."""
    if static_names is not None:
        found = check_capture(outer, static_input_names=static_names)
        capture = [from_capture(finding) for finding in found]
    modules = graph_modules(outer)
    return [_inspect_one(m, capture if m is outer else (), options) for m in modules]


def _inspect_one(
    module: GraphModule, capture: Sequence[Finding], options: GraphOptions
) -> TracedGraph:
    graph = module.graph
    rows = partial(graph_rows, graph, every_node=options.every_node, device=options.device)
    masks, nodes = known_masks(graph), len(graph.nodes)
    before, contracts = rows(masks), contract_findings(masks)
    plans = tuple(plan for mask in masks for plan in _plans(mask, options.sizes))
    inputs = [_input_report(mask) for mask in masks if not mask.builds and _is_input(mask)]
    reports: list[MaskReport] = []
    MaskPipeline([p() for p in PASSES], reports.extend)(graph)
    after = rows(known_masks(graph))
    clones = clone_findings(module)
    copied = {finding.node for finding in clones if finding.kind is FindingKind.clone}
    known = [msgspec.structs.replace(r, copied=r.name in copied) for r in reports] + inputs
    return TracedGraph(
        before=before,
        after=after,
        reports=tuple(known),
        remedies=tuple(REASONS[report.verdict] for report in known),
        plans=plans,
        findings=(*contracts, *clones, *capture),
        changed=_changed(before, after),
        nodes=nodes,
    )


def _changed(before: Sequence[NodeRow], after: Sequence[NodeRow]) -> tuple[str, ...]:
    differ = set(before) ^ set(after)
    return tuple(dict.fromkeys(row.name for row in (*before, *after) if row in differ))


def _is_input(mask: Mask) -> bool:
    return mask.root.op == "placeholder"


def _input_report(mask: Mask) -> MaskReport:
    """Report on a mask that comes in and is only read, which the passes have nothing to say of."""
    mode, nbytes = declared_storage(mask)
    return MaskReport(
        name=mask.root.name,
        source=source_line(mask.root),
        declared_mode=mode,
        final_mode=mode,
        declared_bytes=nbytes,
        final_bytes=nbytes,
        verdict=Reason.GRAPH_INPUT,
        readers=mask.readers(),
    )


def _plans(mask: Mask, sizes: MaskSizes | None) -> list[MaskReport]:
    """Plan the layout of a FULL_MASK that comes in, as far as this graph is concerned."""
    if sizes is None or not _is_input(mask) or mask.mode is not TreeMaskMode.FULL_MASK:
        return []
    mode, verdict = smallest_mode([mask], sizes.max_bs, sizes.num_draft_tokens)
    declared, final = (mask_storage(m, *sizes)[0] for m in (mask.mode, mode))
    report = msgspec.structs.replace(
        _input_report(mask),
        final_mode=mode,
        declared_bytes=int(declared),
        final_bytes=int(final),
        verdict=verdict,
    )
    return [report]
