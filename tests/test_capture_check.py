"""What stands against CUDA-graph capture, found in graphs without a GPU: each code fires."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import torchvm
from tests.readers import READERS
from tests.verify_graphs import CONTEXT, FULL, batch
from torchvm import CaptureCode, check_capture
from torchvm.passes.capture_check import CAPTURE_CODES
from torchvm.tracing import fake_mode, trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.fx import Graph, GraphModule, Node

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    config = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(config):
        yield
    torch._dynamo.reset()


def _traced(function: Callable[..., Any], *args: Tensor) -> GraphModule:
    mode = fake_mode()
    fakes = [mode.from_tensor(arg, static_shapes=True) for arg in args]
    (traced,) = trace(function, fakes, {}, mode=mode, fullgraph=True)
    return traced.module


def _codes(graph: GraphModule | Graph, **options: Any) -> list[str]:
    return [finding.code.value for finding in check_capture(graph, **options)]


def _build(parents: Tensor, seq_lens: Tensor, mask: Tensor) -> Tensor:
    positions: Tensor = torch.ops.torchvm.build_tree_from_parents(
        parents, seq_lens, mask, parents.shape[1], FULL
    )[0]
    return positions


def _alloc() -> Tensor:
    return torchvm.alloc_verify_mask(2, 3, CONTEXT, FULL)


def _verify(parents: Tensor, seq_lens: Tensor) -> Tensor:
    mask = _alloc()
    _build(parents, seq_lens, mask)
    rows: Tensor = READERS.block(mask, seq_lens, 3, FULL)
    return rows


def test_a_verify_step_passes() -> None:
    assert check_capture(_traced(_verify, *batch())) == []


def test_item_and_the_assertions_it_leaves() -> None:
    def step(parents: Tensor, seq_lens: Tensor) -> Tensor:
        total = seq_lens.sum().item()
        torch._check(total < 9)
        return parents + total

    findings = check_capture(_traced(step, *batch()))
    assert findings[0].code is CaptureCode.HOST_SYNC
    assert findings[0].op == "aten::_local_scalar_dense"
    assert {f.code for f in findings[1:]} == {CaptureCode.HOST_ASSERT}
    assert all(f.source.startswith(__file__) for f in findings)
    assert ".item()" in str(findings[1])


@pytest.mark.parametrize(
    ("op", "args"),
    [(torch.nonzero, ()), (torch.masked_select, (torch.ones(2, dtype=torch.bool),))],
)
def test_results_sized_by_data(op: Any, args: tuple[Tensor, ...]) -> None:
    def step(parents: Tensor, seq_lens: Tensor) -> Tensor:
        found: Tensor = op(seq_lens, *args) + 1
        return found * 2

    codes = _codes(_traced(step, *batch()))
    assert codes.count("DATA_DEPENDENT_SHAPE") == 1
    assert set(codes) <= {"DATA_DEPENDENT_SHAPE", "HOST_ASSERT"}


def test_indexing_by_numbers_is_no_finding() -> None:
    assert _codes(_traced(lambda parents, seq_lens: parents[seq_lens % 2], *batch())) == []


def test_a_mask_sized_from_data() -> None:
    def step(parents: Tensor, seq_lens: Tensor) -> Tensor:
        longest = int(seq_lens.max().item())
        torch._check(longest >= 0)
        mask = torchvm.alloc_verify_mask(2, 3, longest, FULL)
        return _build(parents, seq_lens, mask)

    findings = check_capture(_traced(step, *batch()))
    (finding,) = [f for f in findings if f.code is CaptureCode.MASK_SIZED_FROM_DATA]
    assert finding.op == "torchvm::alloc_verify_mask"
    assert finding.source.startswith(__file__)
    assert "host integers" in finding.remedy
    assert CaptureCode.HOST_SYNC in [f.code for f in findings]


def test_a_mask_of_another_factory_sized_from_data() -> None:
    def step(parents: Tensor, seq_lens: Tensor) -> Tensor:
        size = (int(seq_lens.sum().item()) + 6) * 3
        torch._check(size >= 18)
        return _build(parents, seq_lens, torch.zeros(size, dtype=torch.bool))

    assert "MASK_SIZED_FROM_DATA" in _codes(_traced(step, *batch()))


@pytest.mark.parametrize("view", [False, True])
def test_a_mask_that_is_returned(view: bool) -> None:
    def step(parents: Tensor, seq_lens: Tensor) -> Any:
        mask = _alloc()
        positions = _build(parents, seq_lens, mask)
        return positions, mask[3:].view(-1, 3) if view else mask

    (finding,) = check_capture(_traced(step, *batch()))
    assert finding.code is CaptureCode.MASK_RETURNED
    assert finding.op == "torchvm::alloc_verify_mask"
    assert finding.source.startswith(__file__)


def test_a_mask_that_is_never_built_and_returned() -> None:
    assert _codes(_traced(lambda _: _alloc(), torch.ones(1))) == ["MASK_RETURNED"]


def test_a_copy_of_a_mask_may_be_returned() -> None:
    def step(parents: Tensor, seq_lens: Tensor) -> Any:
        mask = _alloc()
        return _build(parents, seq_lens, mask), mask.clone()

    assert _codes(_traced(step, *batch())) == []


def test_an_input_that_is_written() -> None:
    mask = torch.zeros(2 * 3 * (CONTEXT + 3), dtype=torch.bool)
    gm = _traced(_build, *batch(), mask)
    (finding,) = check_capture(gm)
    assert finding.code is CaptureCode.MUTATED_INPUT
    assert finding.op == "input"
    assert "mark_static_address" in finding.remedy
    assert _codes(gm, static_input_names=[finding.node]) == []


def test_a_name_that_is_no_input() -> None:
    with pytest.raises(ValueError, match=r"placeholders \['arg0_1', .*got \['mask'\]"):
        check_capture(_traced(_verify, *batch()), static_input_names=["mask"])


def _final_graph(function: Callable[..., Any], *args: Tensor) -> GraphModule:
    """Return a graph with bare mutating calls, as Inductor lowers it."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    final: list[GraphModule] = []

    def keep(gm: GraphModule, *rest: Any, **options: Any) -> Any:
        compiled = compile_fx_inner(gm, *rest, **options)
        final.append(gm)
        return compiled

    with torch.no_grad(), torch._inductor.utils.fresh_cache():
        torch.compile(function, backend=lambda gm, x: compile_fx(gm, x, inner_compile=keep))(*args)
    return final[0]


def test_the_graph_that_runs() -> None:
    mask = torch.zeros(2 * 3 * (CONTEXT + 3), dtype=torch.bool)

    def step(parents: Tensor, seq_lens: Tensor, mask: Tensor) -> Any:
        inside = _alloc()
        positions = _build(parents, seq_lens, mask[:]) + _build(parents, seq_lens, inside)
        return positions, inside

    assert _codes(_final_graph(step, *batch(), mask)) == ["MUTATED_INPUT", "MASK_RETURNED"]


def _on(device: str, size: int = 4) -> Tensor:
    with fake_mode():
        return torch.empty(size, device=device)


def _graph_of(*nodes: tuple[Any, tuple[int, ...], Tensor]) -> Graph:
    """Build a graph by hand: (target, inputs by position, value); a None target is an input."""
    graph = torch.fx.Graph()
    made: list[Node] = []
    for target, inputs, value in nodes:
        if target is None:
            node = graph.placeholder(f"x{len(made)}")
        else:
            node = graph.call_function(target, tuple(made[i] for i in inputs))
        node.meta["val"] = value
        made.append(node)
    graph.output(made[-1])
    return graph


def test_cpu_tensors_among_cuda_ones() -> None:
    cuda, cpu = _on("cuda"), _on("cpu")
    graph = _graph_of(
        (None, (), cpu),
        (None, (), cuda),
        (aten.neg.default, (0,), cpu),  # Follows from the first.
        (aten.add.Tensor, (1, 2), cuda),
    )
    (finding,) = check_capture(graph)
    assert (finding.code, finding.node) == (CaptureCode.CPU_TENSOR, "x0")


def test_an_allocation_that_names_no_device() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = _on("cuda")
    mask = graph.call_function(torch.ops.torchvm.alloc_verify_mask.default, (2, 3, 20, 0))
    mask.meta["val"] = _on("cpu", 138)
    graph.output(x)
    (finding,) = check_capture(graph)
    assert (finding.code, finding.op) == (CaptureCode.CPU_TENSOR, "torchvm::alloc_verify_mask")


def test_cpu_tensors_alone_are_a_stand_in() -> None:
    cpu = _on("cpu")
    assert check_capture(_graph_of((None, (), cpu), (aten.neg.default, (0,), cpu))) == []


def test_a_copy_to_the_host_waits() -> None:
    cuda, cpu = _on("cuda"), _on("cpu")
    graph = _graph_of(
        (None, (), cuda), (aten._to_copy.default, (0,), cpu), (aten.neg.default, (1,), cpu)
    )
    (finding,) = check_capture(graph)
    assert (finding.code, finding.node) == (CaptureCode.HOST_SYNC, "_to_copy_default")


def test_what_torch_itself_keeps_out() -> None:
    graph = torch.fx.Graph()
    x, where, y = (graph.placeholder(name) for name in ("x", "where", "y"))
    with fake_mode():
        x.meta["val"], y.meta["val"] = torch.empty(4), torch.empty(())
        where.meta["val"] = torch.empty(4, dtype=torch.bool)
    put = graph.call_function(aten.index_put.default, (x, [where], y))
    put.meta["val"] = x.meta["val"]
    graph.output(put)
    (finding,) = check_capture(graph)
    assert (finding.code, finding.op) == (CaptureCode.UNSAFE_OP, "aten::index_put")


def test_control_flow_is_decided_by_the_host() -> None:
    def step(parents: Tensor, seq_lens: Tensor) -> Any:
        def tree(parents: Tensor, seq_lens: Tensor) -> Tensor:
            return _build(parents, seq_lens, _alloc()) + parents.sum().item()

        def none(parents: Tensor, seq_lens: Tensor) -> Tensor:
            return torch.zeros(6, dtype=torch.int64)

        return torch.cond(seq_lens.sum() > 0, tree, none, (parents, seq_lens))

    findings = check_capture(_traced(step, *batch()))
    ops = [f.op for f in findings if f.code is CaptureCode.HOST_SYNC]
    assert ops == ["aten::_local_scalar_dense", "cond"]


def test_views_of_several_results_share_the_memory() -> None:
    graph = torch.fx.Graph()
    mask = graph.call_function(torch.ops.torchvm.alloc_verify_mask.default, (2, 3, 20, 0))
    parts = graph.call_function(aten.split.Tensor, (mask, 69))
    graph.output(graph.call_function(operator.getitem, (parts, 1)))
    assert _codes(graph) == ["MASK_RETURNED"]


class _Owner(torch.nn.Module):
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        mask = torch.zeros(2 * 3 * (CONTEXT + 3), dtype=torch.bool)
        self.register_buffer("mask", mask)
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, parents: Tensor, seq_lens: Tensor, other: Tensor) -> Any:
        inside = _alloc()
        positions = _build(parents, seq_lens, self.mask) + _build(parents, seq_lens, other)
        return positions + _build(parents, seq_lens, inside) + self.weight.sum(), inside


# torch.export uses what its own pytree deprecates.
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_an_exported_program_knows_its_buffers() -> None:
    owner = _Owner()
    exported = torch.export.export(owner, (*batch(), owner.mask.clone())).run_decompositions()
    findings = check_capture(exported)
    assert [f.code.value for f in findings] == ["MUTATED_INPUT", "MASK_RETURNED"]
    assert findings[0].node == "other"
    assert check_capture(exported, static_input_names=["other"]) == findings[1:]


def test_every_code_has_a_meaning_and_a_remedy() -> None:
    assert set(CAPTURE_CODES) == set(CaptureCode)
    assert all(text.meaning and text.remedy for text in CAPTURE_CODES.values())
