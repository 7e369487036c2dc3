"""`torchvm dump`: tables of a target's ops before and after the passes, without running it."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from tests import dump_targets
from torchvm import Reason
from torchvm.inspection import trace_graphs
from torchvm.tools.dump import TargetError, dump_json, dump_text, load_target

FILE = str(Path(dump_targets.__file__))


def test_a_gib_is_traced_without_being_allocated() -> None:
    function, args = load_target(f"{FILE}:a_gib")
    trace_graphs(function, args)  # Warm up what tracing itself keeps.
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (graph,) = trace_graphs(function, args)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024
    (report,) = graph.reports
    assert report.verdict is Reason.COMPACTED
    assert (report.declared_bytes, report.final_bytes) == (1_073_745_920, 4_096)
    rows = {row.op: row for row in graph.before}
    assert rows["torchvm::alloc_verify_mask"].output == "bool[1073745920]"
    assert rows["torchvm::alloc_verify_mask"].nbytes == 1_073_745_920
    after = {row.op: row for row in graph.after}
    assert after["torchvm::alloc_verify_mask"].nbytes == 4_096
    reader = after["torchvm_tests::block"]
    assert "mask=bool[4096]" in reader.inputs
    assert "mask_mode=1" in reader.inputs
    assert reader.source.startswith(FILE)


def test_text_marks_changed_rows() -> None:
    text = dump_text(trace_graphs(*load_target(f"{FILE}:a_gib")))
    lines = text.splitlines()
    marked = [line.split()[2] for line in lines if line.startswith("*")]
    assert marked.count("torchvm::alloc_verify_mask") == 2
    assert marked.count("torchvm_tests::block") == 2
    assert any("COMPACTED" in line for line in lines)
    assert any(line.split()[:1] == ["arg0_1"] for line in lines)


def test_text_of_a_function_without_masks() -> None:
    text = dump_text(trace_graphs(*load_target(f"{FILE}:no_masks")))
    assert "graph 0, after: the same" in text
    assert text.endswith("masks\n  none")


def test_every_node() -> None:
    function, args = load_target(f"{FILE}:no_masks")
    (few,) = trace_graphs(function, args)
    (all_nodes,) = trace_graphs(function, args, every_node=True)
    assert few.before == ()
    assert [row.op for row in all_nodes.before] == [
        "placeholder", "aten::mul.Tensor", "aten::sum", "output",
    ]  # fmt: skip


def test_one_table_per_graph() -> None:
    graphs = trace_graphs(*load_target(f"{FILE}:dynamic_break"))
    assert [r.verdict for g in graphs for r in g.reports] == [Reason.RETURNED]
    assert len(graphs) == 2
    assert "graph 1, before" in dump_text(graphs)


def test_dynamic_sizes_are_expressions() -> None:
    function, args = load_target(f"{FILE}:no_masks")
    (graph,) = trace_graphs(function, args, every_node=True, dynamic=True)
    doubled = next(row for row in graph.before if row.op == "aten::mul.Tensor")
    assert isinstance(doubled.nbytes, str)
    assert doubled.nbytes.startswith("4*s")


def test_json() -> None:
    graphs = trace_graphs(*load_target(f"{FILE}:a_gib"))
    (graph,) = json.loads(dump_json(graphs))
    assert set(graph) == {"before", "after", "reports"}
    assert graph["reports"][0]["verdict"] == "COMPACTED"
    assert {row["op"] for row in graph["after"]} >= {"torchvm::build_tree_from_parents"}


def test_modules_are_targets_too() -> None:
    function, args = load_target("tests.dump_targets:no_masks")
    assert callable(function)
    assert len(args) == 1


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nothing", "TARGET must be file.py:function or module:function, got 'nothing'"),
        (":x", "TARGET must be"),
        ("absent.py:f", "absent.py is not a file"),
        ("no_such_module_here:f", "no_such_module_here cannot be imported: No module named"),
        (f"{FILE}:absent", "has no function 'absent'"),
        (f"{FILE}:broken", "raised RuntimeError: no such weights"),
        (f"{FILE}:not_a_pair", r"must return \(callable, example_args\), got int"),
        (f"{FILE}:wrong_args", "must return example_args as a tuple, got Tensor"),
    ],
)
def test_bad_targets_are_told_in_one_line(target: str, message: str) -> None:
    with pytest.raises(TargetError, match=message) as raised:
        load_target(target)
    assert "\n" not in str(raised.value)
