"""Printouts of rewritten graphs, and how calls are read out of nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from expecttest import assert_expected_inline
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config as inductor_config

from tests.verify_graphs import CASES, batch
from torchvm.compilation import PASSES
from torchvm.passes.base import MaskPipeline
from torchvm.passes.graph import format_graph, op_call

if TYPE_CHECKING:
    from torch.fx import GraphModule


def _functional_graph(name: str, *, v2: bool = True, dynamic: bool = False) -> GraphModule:
    """Return the graph that the joint hook gets for a case."""
    grabbed: list[GraphModule] = []

    def grab(gm: GraphModule, inputs: list[Any]) -> Any:
        grabbed.append(gm)
        return gm.forward

    backend = aot_autograd(fw_compiler=grab, keep_inference_input_mutations=True)
    torch._dynamo.reset()
    with inductor_config.patch(enable_auto_functionalized_v2=v2), torch.no_grad():
        compiled = torch.compile(CASES[name].function, backend=backend, dynamic=dynamic)
        compiled(*batch())
    torch._dynamo.reset()
    return grabbed[0]


def _rewritten(name: str, *, v2: bool = True, dynamic: bool = False) -> str:
    gm = _functional_graph(name, v2=v2, dynamic=dynamic)
    MaskPipeline([p() for p in PASSES], lambda _: None)(gm.graph)
    gm.graph.lint()
    return format_graph(gm.graph)


def test_before_any_pass() -> None:
    printed = format_graph(_functional_graph("tree_block_reader").graph)
    assert_expected_inline(printed, """""")


def test_elide() -> None:
    assert_expected_inline(_rewritten("dead_after_two_builds"), """""")


def test_elide_v1() -> None:
    assert_expected_inline(_rewritten("contract_says_nothing_and_is_told", v2=False), """""")


def test_compact() -> None:
    assert_expected_inline(_rewritten("tree_block_reader"), """""")


def test_compact_dynamic() -> None:
    assert_expected_inline(_rewritten("tree_block_reader", dynamic=True), """""")


def test_compact_out_variant() -> None:
    assert_expected_inline(_rewritten("out_variant_reader"), """""")


def test_sizes_taken_from_the_mask_are_recomputed() -> None:
    assert_expected_inline(_rewritten("shape_is_used", dynamic=True), """""")


def test_declined() -> None:
    assert_expected_inline(_rewritten("read_in_full"), """""")


def test_both_wrappers_print_alike() -> None:
    v1, v2 = (_functional_graph("out_variant_reader", v2=v2) for v2 in (False, True))
    names = [
        [call.name for node in gm.graph.nodes if (call := op_call(node))] for gm in (v1, v2)
    ]
    assert names[0] == names[1]
    lines = [format_graph(gm.graph).replace("_v2", "") for gm in (v1, v2)]
    assert lines[0] == lines[1]


def test_every_node() -> None:
    gm = _functional_graph("dead")
    assert len(format_graph(gm.graph, every_node=True).splitlines()) == len(gm.graph.nodes)
