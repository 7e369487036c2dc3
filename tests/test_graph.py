"""Printouts of rewritten graphs, and how calls are read out of nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config as inductor_config
from torch.fx.experimental.proxy_tensor import make_fx

from tests.verify_graphs import CASES, CONTEXT, batch
from torchvm import MaskReport, Reason
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
    assert_expected_inline(
        printed,
        """\
%arg0_1 = input : int64[2, 3]
%arg1_1 = input : int64[2]
%alloc_verify_mask = torchvm.alloc_verify_mask(bs=2, num_draft_tokens=3, max_context_len=20, tree_mask_mode=0, dtype=None, device=None) : bool[138]
%auto_functionalized_v2 = torchvm.build_tree_from_parents(parents=%arg0_1, seq_lens=%arg1_1, tree_mask=%alloc_verify_mask!, num_draft_tokens=3, tree_mask_mode=0, fill_prefix=True)
%getitem = getitem(%auto_functionalized_v2, 0) : int64[6]
%getitem_4 = getitem(%auto_functionalized_v2, 4) : bool[138]
%block = torchvm_tests.block(mask=%getitem_4, seq_lens=%arg1_1, n=3, mask_mode=0) : float32[2, 3]""",
    )


def test_elide() -> None:
    assert_expected_inline(
        _rewritten("dead_after_two_builds"),
        """\
%arg0_1 = input : int64[2, 3]
%arg1_1 = input : int64[2]
%alloc_verify_mask = torchvm.alloc_verify_mask(bs=2, num_draft_tokens=3, max_context_len=20, tree_mask_mode=1, dtype=None, device=None) : bool[18]
%auto_functionalized_v2 = torchvm.build_tree_from_parents(parents=%arg0_1, seq_lens=%arg1_1, tree_mask=%alloc_verify_mask!, num_draft_tokens=3, tree_mask_mode=1, fill_prefix=True)
%getitem = getitem(%auto_functionalized_v2, 0) : int64[6]
%getitem_4 = getitem(%auto_functionalized_v2, 4) : bool[18]
%add = aten.add.Tensor(self=%arg1_1, other=1, alpha=1) : int64[2]
%auto_functionalized_v2_1 = torchvm.build_tree_from_parents(parents=%arg0_1, seq_lens=%add, tree_mask=%getitem_4!, num_draft_tokens=3, tree_mask_mode=1, fill_prefix=True)
%getitem_5 = getitem(%auto_functionalized_v2_1, 0) : int64[6]""",
    )


def test_elide_v1() -> None:
    assert_expected_inline(
        _rewritten("contract_says_nothing_and_is_told", v2=False),
        """\
%arg0_1 = input : int64[2, 3]
%arg1_1 = input : int64[2]
%alloc_verify_mask = torchvm.alloc_verify_mask(bs=2, num_draft_tokens=3, max_context_len=20, tree_mask_mode=1, dtype=None, device=None) : bool[18]
%auto_functionalized = torchvm.build_tree_from_parents(parents=%arg0_1, seq_lens=%arg1_1, tree_mask=%alloc_verify_mask!, num_draft_tokens=3, tree_mask_mode=1, fill_prefix=True)
%getitem = getitem(%auto_functionalized, 0) : int64[6]
%getitem_4 = getitem(%auto_functionalized, 4) : bool[18]
%by_topk_told = torchvm_tests.by_topk_told(mask=%getitem_4, x=%_to_copy, topk=1, mask_mode=1) : float32[6]""",
    )


def test_compact() -> None:
    assert_expected_inline(
        _rewritten("tree_block_reader"),
        """\
%arg0_1 = input : int64[2, 3]
%arg1_1 = input : int64[2]
%alloc_verify_mask = torchvm.alloc_verify_mask(bs=2, num_draft_tokens=3, max_context_len=20, tree_mask_mode=1, dtype=None, device=None) : bool[18]
%auto_functionalized_v2 = torchvm.build_tree_from_parents(parents=%arg0_1, seq_lens=%arg1_1, tree_mask=%alloc_verify_mask!, num_draft_tokens=3, tree_mask_mode=1, fill_prefix=True)
%getitem = getitem(%auto_functionalized_v2, 0) : int64[6]
%getitem_4 = getitem(%auto_functionalized_v2, 4) : bool[18]
%block = torchvm_tests.block(mask=%getitem_4, seq_lens=%arg1_1, n=3, mask_mode=1) : float32[2, 3]""",
    )


def test_compact_dynamic() -> None:
    assert_expected_inline(
        _rewritten("tree_block_reader", dynamic=True),
        """\
%arg0_1 = input : s0
%arg1_1 = input : s1
%arg2_1 = input : int64[s0, s1]
%arg3_1 = input : int64[s0]
%alloc_verify_mask = torchvm.alloc_verify_mask(bs=%arg0_1, num_draft_tokens=%arg1_1, max_context_len=20, tree_mask_mode=1, dtype=None, device=None) : bool[s0*s1**2]
%auto_functionalized_v2 = torchvm.build_tree_from_parents(parents=%arg2_1, seq_lens=%arg3_1, tree_mask=%alloc_verify_mask!, num_draft_tokens=%arg1_1, tree_mask_mode=1, fill_prefix=True)
%getitem = getitem(%auto_functionalized_v2, 0) : int64[s0*s1]
%getitem_4 = getitem(%auto_functionalized_v2, 4) : bool[s0*s1**2]
%block = torchvm_tests.block(mask=%getitem_4, seq_lens=%arg3_1, n=%arg1_1, mask_mode=1) : float32[s0, s1]""",
    )


def test_compact_out_variant() -> None:
    assert_expected_inline(
        _rewritten("out_variant_reader"),
        """\
%arg0_1 = input : int64[2, 3]
%arg1_1 = input : int64[2]
%alloc_verify_mask = torchvm.alloc_verify_mask(bs=2, num_draft_tokens=3, max_context_len=20, tree_mask_mode=1, dtype=None, device=None) : bool[18]
%auto_functionalized_v2 = torchvm.build_tree_from_parents(parents=%arg0_1, seq_lens=%arg1_1, tree_mask=%alloc_verify_mask!, num_draft_tokens=3, tree_mask_mode=1, fill_prefix=True)
%getitem = getitem(%auto_functionalized_v2, 0) : int64[6]
%getitem_4 = getitem(%auto_functionalized_v2, 4) : bool[18]
%auto_functionalized_v2_1 = torchvm_tests.block_out(mask=%getitem_4, seq_lens=%arg1_1, n=3, mask_mode=1, result=%empty!)""",
    )


def test_sizes_taken_from_the_mask_are_recomputed() -> None:
    assert_expected_inline(
        _rewritten("shape_is_used", dynamic=True),
        """\
%arg0_1 = input : s0
%arg1_1 = input : s1
%arg2_1 = input : int64[s0, s1]
%arg3_1 = input : int64[s0]
%alloc_verify_mask = torchvm.alloc_verify_mask(bs=%arg0_1, num_draft_tokens=%arg1_1, max_context_len=20, tree_mask_mode=1, dtype=None, device=None) : bool[s0*s1**2]
%auto_functionalized_v2 = torchvm.build_tree_from_parents(parents=%arg2_1, seq_lens=%arg3_1, tree_mask=%alloc_verify_mask!, num_draft_tokens=%arg1_1, tree_mask_mode=1, fill_prefix=True)
%getitem = getitem(%auto_functionalized_v2, 0) : int64[s0*s1]
%getitem_4 = getitem(%auto_functionalized_v2, 4) : bool[s0*s1**2]
%new_ones = aten.new_ones(self=%getitem_4, size=[%mul_8], dtype=None, layout=None, device=None, pin_memory=False) : bool[s0*s1*(s1 + 20)]""",
    )


def test_declined() -> None:
    assert_expected_inline(
        _rewritten("read_in_full"),
        """\
%arg0_1 = input : int64[2, 3]
%arg1_1 = input : int64[2]
%alloc_verify_mask = torchvm.alloc_verify_mask(bs=2, num_draft_tokens=3, max_context_len=20, tree_mask_mode=0, dtype=None, device=None) : bool[138]
%auto_functionalized_v2 = torchvm.build_tree_from_parents(parents=%arg0_1, seq_lens=%arg1_1, tree_mask=%alloc_verify_mask!, num_draft_tokens=3, tree_mask_mode=0, fill_prefix=True)
%getitem = getitem(%auto_functionalized_v2, 0) : int64[6]
%getitem_4 = getitem(%auto_functionalized_v2, 4) : bool[138]
%count = torchvm_tests.count(mask=%getitem_4, scale=1) : float32[1]""",
    )


def test_both_wrappers_print_alike() -> None:
    v1, v2 = (_functional_graph("out_variant_reader", v2=v2) for v2 in (False, True))
    names = [[call.name for node in gm.graph.nodes if (call := op_call(node))] for gm in (v1, v2)]
    assert names[0] == names[1]
    lines = [format_graph(gm.graph).replace("_v2", "") for gm in (v1, v2)]
    assert lines[0] == lines[1]


def test_every_node() -> None:
    gm = _functional_graph("dead")
    assert len(format_graph(gm.graph, every_node=True).splitlines()) == len(gm.graph.nodes)


@pytest.mark.parametrize("target", ["sym_size.int", "sym_numel.default"])
def test_sizes_asked_of_the_mask_in_the_graph_are_recomputed(target: str) -> None:
    gm = _functional_graph("tree_block_reader", dynamic=True)
    graph = gm.graph
    (version,) = [n for n in graph.nodes if n.name == "getitem_4"]
    packet, overload = target.split(".")
    op = getattr(getattr(torch.ops.aten, packet), overload)
    output = next(iter(reversed(graph.nodes)))
    with graph.inserting_before(output):
        size = graph.call_function(op, (version, 0) if packet == "sym_size" else (version,))
        size.meta["val"] = version.meta["val"].shape[0]
        ones = graph.call_function(torch.ops.aten.ones.default, ([size],))
        ones.meta["val"] = version.meta["val"].new_ones(size.meta["val"])
    output.args = ((*output.args[0], ones),)
    gm.recompile()
    reports: list[MaskReport] = []
    MaskPipeline([p() for p in PASSES], reports.extend)(graph)
    graph.lint()
    gm.recompile()
    parents, seq_lens = batch(5, 4, seed=1)
    *_, ones_of_declared_size = gm(5, 4, parents, seq_lens)
    assert [r.verdict for r in reports] == [Reason.COMPACTED]
    assert ones_of_declared_size.shape == (5 * 4 * (CONTEXT + 4),)


def test_causal_chain() -> None:
    assert_expected_inline(
        _rewritten("causal_reader_of_a_chain"),
        """\
%arg0_1 = input : int64[2]
%alloc_verify_mask = torchvm.alloc_verify_mask(bs=2, num_draft_tokens=3, max_context_len=20, tree_mask_mode=1, dtype=None, device=None) : bool[18]
%clone = aten.clone(self=%expand, memory_format=torch.contiguous_format) : int64[2, 2]
%clone_1 = aten.clone(self=%expand_1, memory_format=torch.contiguous_format) : int64[2, 8]
%auto_functionalized_v2 = torchvm.build_tree(parent_list=%clone_1, selected_index=%clone, seq_lens=%arg0_1, tree_mask=%alloc_verify_mask!, topk=1, depth=8, num_draft_tokens=3, tree_mask_mode=1, fill_prefix=True)
%getitem = getitem(%auto_functionalized_v2, 0) : int64[6]
%getitem_4 = getitem(%auto_functionalized_v2, 4) : bool[18]""",
    )


def test_packed() -> None:
    assert_expected_inline(
        _rewritten("packing_readers"),
        """\
%arg0_1 = input : int64[2, 3]
%arg1_1 = input : int64[2]
%alloc_verify_mask = torchvm.alloc_verify_mask(bs=2, num_draft_tokens=3, max_context_len=20, tree_mask_mode=2, dtype=torch.uint8, device=None) : uint8[6]
%auto_functionalized_v2 = torchvm.build_tree_from_parents(parents=%arg0_1, seq_lens=%arg1_1, tree_mask=%alloc_verify_mask!, num_draft_tokens=3, tree_mask_mode=2, fill_prefix=True)
%getitem = getitem(%auto_functionalized_v2, 0) : int64[6]
%getitem_4 = getitem(%auto_functionalized_v2, 4) : uint8[6]
%block_any = torchvm_tests.block_any(mask=%getitem_4, seq_lens=%arg1_1, n=3, mask_mode=2) : float32[2, 3]
%block_any_1 = torchvm_tests.block_any(mask=%getitem_4, seq_lens=%arg1_1, n=3, mask_mode=2) : float32[2, 3]""",
    )


def test_prefix_skipped() -> None:
    assert_expected_inline(
        _rewritten("tree_block_reader_without_mode"),
        """\
%arg0_1 = input : int64[2, 3]
%arg1_1 = input : int64[2]
%alloc_verify_mask = torchvm.alloc_verify_mask(bs=2, num_draft_tokens=3, max_context_len=20, tree_mask_mode=0, dtype=None, device=None) : bool[138]
%auto_functionalized_v2 = torchvm.build_tree_from_parents(parents=%arg0_1, seq_lens=%arg1_1, tree_mask=%alloc_verify_mask!, num_draft_tokens=3, tree_mask_mode=0, fill_prefix=False)
%getitem = getitem(%auto_functionalized_v2, 0) : int64[6]
%getitem_4 = getitem(%auto_functionalized_v2, 4) : bool[138]
%block_full_only = torchvm_tests.block_full_only(mask=%getitem_4, seq_lens=%arg1_1, n=3) : float32[2, 3]""",
    )


def test_a_graph_that_is_not_functional_is_left_alone() -> None:
    function, args = CASES["dead"].function, batch()
    gm = make_fx(function, tracing_mode="fake")(*args)
    before = format_graph(gm.graph, every_node=True)
    reports: list[MaskReport] = []
    MaskPipeline([p() for p in PASSES], reports.extend)(gm.graph)
    assert [r.verdict for r in reports] == [Reason.NOT_FUNCTIONAL]
    assert format_graph(gm.graph, every_node=True) == before
