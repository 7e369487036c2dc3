"""Where engines put torchvm: their own passes and settings, split graphs, one graph a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache
from torch.fx import GraphModule
from torch.fx.passes.split_module import split_module

import torchvm
from tests.readers import READERS
from tests.verify_graphs import CASES, CONTEXT, FULL, batch
from torchvm import Reason, TreeMaskMode, plan_verify_mask
from torchvm.passes.graph import op_call
from torchvm.passes.report import REASONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.fx import Graph, Node

BLOCK = CASES["tree_block_reader"].function


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torchvm.clear_reports()
    with fresh_cache(), torch.no_grad():
        yield
    torch._dynamo.reset()


def _assert_equal(actual: Any, expected: Any) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)


class _EnginePasses(CustomGraphPass):  # type: ignore[misc, unused-ignore]
    """An engine's own passes, which expect to be the last before lowering."""

    def __init__(self) -> None:
        self.modes: list[object] = []

    def __call__(self, graph: Graph) -> None:
        calls = [call for node in graph.nodes if (call := op_call(node)) is not None]
        modes = (call.arguments.get("tree_mask_mode") for call in calls)
        self.modes.extend(mode for mode in modes if mode is not None)

    def uuid(self) -> str:
        return "engine"


@pytest.mark.parametrize("by_options", [False, True], ids=["backend", "options"])
def test_an_engine_that_owns_the_last_pass_and_turns_v2_off(by_options: bool) -> None:
    engine = _EnginePasses()
    settings = {"post_grad_custom_post_pass": engine, "enable_auto_functionalized_v2": False}
    how: dict[str, Any] = (
        {"options": torchvm.inductor_options(options={"post_grad_custom_post_pass": engine})}
        if by_options
        else {"backend": "torchvm"}
    )
    with inductor_config.patch(settings):
        _assert_equal(torch.compile(BLOCK, **how)(*batch()), BLOCK(*batch()))
    assert [r.verdict for r in torchvm.reports()] == [Reason.COMPACTED]
    assert engine.modes == [TreeMaskMode.QLEN_ONLY] * 2


def _piecewise(is_split: Callable[[Node], bool]) -> Callable[..., Any]:
    """Make a backend that splits the graph around some ops and compiles the rest, in pieces."""
    from torch._inductor.compile_fx import compile_fx

    def backend(gm: GraphModule, _: list[Any]) -> Callable[..., Any]:
        piece, pieces = 0, {}
        for node in gm.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            if is_split(node):
                pieces[node], piece = piece + 1, piece + 2
            else:
                pieces[node] = piece
        split = split_module(gm, gm, pieces.__getitem__, keep_original_order=True)
        values = {
            n.name: n.meta["example_value"] for n in gm.graph.nodes if "example_value" in n.meta
        }
        eager = {f"submod_{pieces[node]}" for node in pieces if is_split(node)}
        for name, module in list(split.named_children()):
            if name not in eager and isinstance(module, GraphModule):
                inputs = [values[p.name] for p in module.graph.find_nodes(op="placeholder")]
                delattr(split, name)
                options = torchvm.inductor_options()
                setattr(split, name, compile_fx(module, inputs, config_patches=options))
        return split.forward

    return backend


def _two_layers(parents: Tensor, seq_lens: Tensor) -> Any:
    positions, first = BLOCK(parents, seq_lens)
    return positions * 2, first + 1


def test_a_reader_in_another_piece_keeps_the_mask() -> None:
    def is_attention(node: Node) -> bool:
        return node.target in (READERS.block, READERS.block.default)

    compiled = torch.compile(_two_layers, backend=_piecewise(is_attention), fullgraph=True)
    _assert_equal(compiled(*batch()), _two_layers(*batch()))
    (report,) = torchvm.reports()
    assert report.verdict is Reason.RETURNED
    assert "plan_verify_mask" in REASONS[report.verdict].remedy


def test_a_piece_that_holds_build_and_reader_is_compacted() -> None:
    def is_other(node: Node) -> bool:
        return "mul" in str(node.target)

    compiled = torch.compile(_two_layers, backend=_piecewise(is_other), fullgraph=True)
    _assert_equal(compiled(*batch()), _two_layers(*batch()))
    assert [r.verdict for r in torchvm.reports()] == [Reason.COMPACTED]


class _Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x: Tensor, mask: Tensor, seq_lens: Tensor, mode: int) -> Tensor:
        out: Tensor = self.linear(x) + READERS.block(mask, seq_lens, 3, mode)
        return out


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(_Layer() for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor, seq_lens: Tensor, mode: int) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask, seq_lens, mode)
        return x


def _built(parents: Tensor, seq_lens: Tensor) -> Tensor:
    mask = torchvm.alloc_verify_mask(2, 3, CONTEXT, FULL)
    torch.ops.torchvm.build_tree_from_parents(parents, seq_lens, mask, 3, FULL)
    return mask


def test_layers_compiled_one_by_one_are_told_to_plan_and_then_compact() -> None:
    parents, seq_lens = batch()
    x = torch.rand(2, 3)
    model = _Model()
    expected = model(x, _built(parents, seq_lens), seq_lens, FULL)
    for layer in model.layers:
        layer.compile(backend="torchvm", options={"inner": "aot_eager"})
    build: Any = torch.compile(_built, backend="torchvm", options={"inner": "aot_eager"})
    torch.testing.assert_close(model(x, build(parents, seq_lens), seq_lens, FULL), expected)
    (report,) = torchvm.reports()  # Layers build no mask.
    assert report.verdict is Reason.RETURNED
    assert "create the buffer in that" in REASONS[report.verdict].remedy

    def make_inputs(mask: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.empty(2, 3), mask, torch.empty(2, dtype=torch.int64), FULL), {}

    plan = plan_verify_mask(
        model, make_inputs, max_bs=2, num_draft_tokens=3, max_context_len=CONTEXT, device="cpu"
    )
    assert plan.verdict is Reason.COMPACTED
    assert len(plan.readers) == 2
    owner = plan.create()
    torch.ops.torchvm.build_tree_from_parents(parents, seq_lens, owner.buffer, 3, owner.mode)
    torch.testing.assert_close(model(x, owner.buffer, seq_lens, int(owner.mode)), expected)
