"""`torchvm dump`: what a target's graphs do with masks, without running it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from tests import dump_targets
from tests.memory import at_most
from tests.verify_graphs import CASES, batch
from torchvm import Reason
from torchvm.graph_rows import Role
from torchvm.inspection import GraphOptions, MaskSizes, TracedGraph, trace_graphs
from torchvm.tools.cli import app
from torchvm.tools.dump import dump_json
from torchvm.tools.dump_target import load_target
from torchvm.tools.dump_text import dump_text

if TYPE_CHECKING:
    from collections.abc import Iterator

FILE = str(Path(dump_targets.__file__))


@pytest.fixture(scope="module")
def a_gib() -> TracedGraph:
    (graph,) = trace_graphs(*load_target(f"{FILE}:a_gib"))
    return graph


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def at_short_path(graph: TracedGraph) -> TracedGraph:
    """The graph as its JSON has it, in a file whose name is the same everywhere."""
    written = re.sub(rf"{re.escape(FILE)}:\d+", "step.py:7", dump_json([graph]))
    return msgspec.json.decode(written, type=list[TracedGraph])[0]


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["dump", *arguments])


def test_a_gib_is_traced_without_being_allocated(a_gib: TracedGraph) -> None:
    with at_most(1 << 29):
        with pytest.raises(RuntimeError, match="allocate"):
            torch.empty(1 << 30, dtype=torch.bool)
        (graph,) = trace_graphs(*load_target(f"{FILE}:a_gib"))
    assert graph.changed == a_gib.changed
    (report,) = graph.reports
    assert (report.verdict, report.copied) == (Reason.COMPACTED, False)
    assert (report.declared_bytes, report.final_bytes) == (1_073_745_920, 4_096)
    assert graph.findings == ()
    assert graph.plans == ()


def test_rows_before_and_after(a_gib: TracedGraph) -> None:
    rows = {row.op: row for row in a_gib.before}
    alloc = rows["torchvm::alloc_verify_mask"]
    assert alloc.output == "bool[1073745920] @cpu"
    assert (alloc.nbytes, alloc.mode, alloc.role) == (1_073_745_920, "FULL_MASK", Role.mask)
    after = {row.op: row for row in a_gib.after}
    alloc = after["torchvm::alloc_verify_mask"]
    assert (alloc.nbytes, alloc.mode, alloc.role) == (4_096, "QLEN_ONLY", Role.mask)
    build = after["torchvm::build_tree_from_parents"]
    assert (build.role, build.mode) == (Role.builder, "QLEN_ONLY")
    assert "alloc_verify_mask" in build.takes
    reader = after["torchvm_tests::block"]
    assert (reader.role, reader.reads, reader.mode) == (Role.reader, "TREE_BLOCK", "QLEN_ONLY")
    assert "mask=bool[4096] @cpu" in reader.inputs
    assert "mask_mode=1" in reader.inputs
    assert reader.source.startswith(FILE)
    (version,) = [row for row in a_gib.after if row.readers]
    assert (version.role, version.readers, version.nbytes) == (Role.mask, ("block",), 4_096)
    assert set(a_gib.changed) == {
        "alloc_verify_mask", "auto_functionalized_v2", version.name, "block",
    }  # fmt: skip


def test_a_compiled_function_is_traced_as_it_is(a_gib: TracedGraph) -> None:
    function, args, _ = load_target(f"{FILE}:a_gib")
    (graph,) = trace_graphs(torch.compile(function, backend="torchvm"), args)
    assert [row.op for row in graph.after] == [row.op for row in a_gib.after]
    assert graph.reports == a_gib.reports


def test_a_device_that_is_not_there_is_shown() -> None:
    loaded = load_target(f"{FILE}:a_gib")
    (graph,) = trace_graphs(*loaded, options=GraphOptions(device="cuda"))
    rows = {row.op: row for row in graph.after}
    build = rows["torchvm::build_tree_from_parents"]
    assert "parents=int64[256, 4] @cuda" in build.inputs
    assert build.output.endswith("bool[4096]) @cuda")


def test_text_of_a_terminal_is_paragraphs(a_gib: TracedGraph) -> None:
    text = dump_text([at_short_path(a_gib)], width=72)
    assert max(map(len, text.splitlines())) <= 72
    assert text.startswith(
        "graph 0, before (1 of 8 nodes left out: --all)\n   arg0_1  placeholder\n"
    )
    # Which argument comes first is torch's choice.
    assert "\n     -> int64[256] @cpu  2,048 B\n" in text
    assert (
        """
*  alloc_verify_mask  torchvm::alloc_verify_mask
     bs=256, num_draft_tokens=4, max_context_len=1048576,
       tree_mask_mode=0, dtype=None, device=None
     -> bool[1073745920] @cpu  1,073,745,920 B  FULL_MASK
     step.py:7
"""
        in text
    )
    assert text.endswith(
        """
masks
  alloc_verify_mask at step.py:7: FULL_MASK 1,073,745,920 B -> QLEN_ONLY
    4,096 B: COMPACTED
    read by torchvm_tests::block (TREE_BLOCK)
    every reader reads the tree block alone and was told the compact
      mode
    to do: none needed

findings
  none"""
    )


def test_text_is_a_table_where_there_is_room(a_gib: TracedGraph) -> None:
    lines = dump_text([a_gib]).splitlines()
    head = lines[1]
    assert head.split() == ["node", "op", "inputs", "output", "bytes", "mask", "readers", "source"]
    marked = [line.split()[2] for line in lines if line.startswith("*")]
    assert marked.count("torchvm::alloc_verify_mask") == 2
    assert marked.count("torchvm_tests::block") == 2
    reader = next(line for line in lines if line.startswith("*  block"))
    assert reader[head.index("mask", head.index("bytes")) :].startswith("reads TREE_BLOCK of FULL")
    assert reader.index("4,096") + 5 == head.index("bytes") + 5
    assert dump_text([a_gib], width=1000) == "\n".join(lines)


def test_text_of_a_function_without_masks() -> None:
    text = dump_text(trace_graphs(*load_target(f"{FILE}:no_masks")))
    assert (
        text
        == """\
graph 0, before (4 of 4 nodes left out: --all)
  no op of torchvm

graph 0, after: the same

masks
  none

findings
  none"""
    )
    assert dump_text([]) == "no graph: nothing of the target is compiled"


def test_every_node() -> None:
    loaded = load_target(f"{FILE}:no_masks")
    (few,) = trace_graphs(*loaded)
    (all_nodes,) = trace_graphs(*loaded, every_node=True)
    assert few.before == ()
    assert few.nodes == all_nodes.nodes == 4
    assert [row.op for row in all_nodes.before] == [
        "placeholder", "aten::mul.Tensor", "aten::sum", "output",
    ]  # fmt: skip


def test_one_table_per_graph() -> None:
    graphs = trace_graphs(*load_target(f"{FILE}:dynamic_break"))
    assert [r.verdict for g in graphs for r in g.reports] == [Reason.RETURNED, Reason.GRAPH_INPUT]
    assert len(graphs) == 2
    assert "graph 1, before" in dump_text(graphs)
    (row,) = [row for row in graphs[0].before if row.role is Role.output]
    assert row.op == "output"


def test_dynamic_sizes_are_expressions() -> None:
    loaded = load_target(f"{FILE}:no_masks")
    (graph,) = trace_graphs(*loaded, every_node=True, dynamic=True)
    doubled = next(row for row in graph.before if row.op == "aten::mul.Tensor")
    assert isinstance(doubled.nbytes, str)
    assert doubled.nbytes.startswith("4*s")
    assert doubled.nbytes in dump_text([graph])


def test_json(a_gib: TracedGraph) -> None:
    (graph,) = json.loads(dump_json([a_gib]))
    assert set(graph) == {
        "before", "after", "reports", "remedies", "plans", "findings", "changed", "nodes",
    }  # fmt: skip
    assert graph["reports"][0]["verdict"] == "COMPACTED"
    assert graph["remedies"][0]["remedy"] == "none needed"
    assert {row["op"] for row in graph["after"]} >= {"torchvm::build_tree_from_parents"}
    assert set(graph["after"][0]) == {
        "name", "op", "inputs", "output", "nbytes", "source",
        "role", "mode", "reads", "readers", "takes",
    }  # fmt: skip


def test_a_mask_that_comes_in_is_planned() -> None:
    loaded = load_target(f"{FILE}:sized", max_bs=2, num_draft_tokens=4)
    assert trace_graphs(*loaded)[0].plans == ()
    options = GraphOptions(sizes=MaskSizes(2, 4, 64))
    (graph,) = trace_graphs(*loaded, options=options)
    (plan,) = graph.plans
    assert (plan.declared_bytes, plan.final_bytes) == (2 * 4 * 68, 2 * 4 * 4)
    assert plan.verdict is Reason.COMPACTED
    assert [report.verdict for report in graph.reports] == [Reason.GRAPH_INPUT]
    assert f"plans of masks that come in, for this graph alone\n  {plan.name}: " in dump_text(
        [graph]
    )


def test_findings_of_contracts() -> None:
    (graph,) = trace_graphs(*load_target(f"{FILE}:unsound"))
    assert [(f.kind, f.code, f.op) for f in graph.findings] == [
        ("contract", "NO_CONTRACT", "torchvm_tests::unknown"),
        ("contract", "LENGTHS_DIFFER", "torchvm_tests::block"),
        ("contract", "MODE_MISMATCH", "torchvm_tests::block"),
    ]
    line = dump_text([graph]).splitlines()[-1].replace(FILE, "FILE")
    assert re.fullmatch(
        r"  contract MODE_MISMATCH: block_1 \(torchvm_tests::block\) at FILE:\d+: the allocation, "
        r"the builds and the readers do not name the same mode; pass one mode everywhere",
        line,
    )


@pytest.mark.parametrize(
    ("target", "findings"),
    [("late_copy", ["COPIED"]), ("sized", ["MUTATED_INPUT"]), ("a_gib", []), ("no_masks", [])],
)
def test_findings_of_copies_and_capture(target: str, findings: list[str]) -> None:
    (graph,) = trace_graphs(*load_target(f"{FILE}:{target}"))
    assert [finding.code for finding in graph.findings] == findings
    if "COPIED" in findings:
        (report,) = graph.reports
        assert report.copied is True
        assert ", copied before a build" in dump_text([graph])


@pytest.mark.parametrize("name", ["read_before_the_build", "returned", "read_in_full", "dead"])
def test_copies_that_the_compiler_does_not_make_are_not_found(name: str) -> None:
    for graph in trace_graphs(CASES[name].function, batch()):
        assert [f for f in graph.findings if f.kind == "clone"] == []


def test_without_hoisting_a_copy_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchvm.findings.HoistMaskReaders", lambda: None)
    (graph,) = trace_graphs(CASES["read_before_the_build"].function, batch())
    assert [finding.code for finding in graph.findings] == ["COPIED"]


@pytest.mark.parametrize(("target", "status"), [("unsound", 1), ("a_gib", 0)])
def test_strict_ends_with_status_one_when_there_are_findings(target: str, status: int) -> None:
    assert invoke(f"{FILE}:{target}", "--strict").exit_code == status
    done = invoke(f"{FILE}:{target}")
    assert done.exit_code == 0
    assert "findings\n" in done.stdout


def test_the_command_prints_json() -> None:
    done = invoke(f"{FILE}:a_gib", "--json", "--fake-device", "cuda:1")
    if torch.version.cuda:
        assert "tree_mask must be on cuda:1, got cpu" in str(done.exception)
        return
    (graph,) = json.loads(done.stdout)
    assert graph["reports"][0]["final_bytes"] == 4_096
    assert {row["output"].rpartition(" ")[2] for row in graph["after"]} == {"@cuda:1"}
    assert "this torch has no CUDA" in done.stderr
