"""Exported programs: compacted, saved, loaded and packaged, with eager's numbers."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram, export

import torchvm
from tests.readers import READERS
from tests.verify_graphs import CONTEXT, FULL, QLEN, batch
from torchvm import Reason, compact
from torchvm.passes.graph import format_graph

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    # torch.export uses what its own pytree deprecates.
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    # torch.export.load in torch 2.11.
    pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning"),
]
COMPACT_BYTES = 2 * 3 * 3


class _Step(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, parents: Tensor, seq_lens: Tensor) -> Any:
        bs, n = parents.shape
        mask = torchvm.alloc_verify_mask(bs, n, CONTEXT, FULL)
        tree = torchvm.build_tree_from_parents(
            parents, seq_lens, mask, num_draft_tokens=n, tree_mask_mode=FULL
        )
        return tree.positions, self.linear(READERS.block(mask, seq_lens, n, FULL))


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torchvm.clear_reports()
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def _mask_sizes(program: ExportedProgram) -> set[str]:
    nodes = format_graph(program.graph, every_node=True).splitlines()
    return {line.split(" : ")[1] for line in nodes if " : bool" in line}


def _assert_equal(actual: Any, expected: Any) -> None:
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)


def test_a_program_is_compacted_and_the_original_left_alone() -> None:
    step = _Step()
    program = export(step, batch())
    before = format_graph(program.graph, every_node=True)
    compacted = compact(program)
    assert [r.verdict for r in torchvm.reports()] == [Reason.COMPACTED]
    assert _mask_sizes(compacted) == {f"bool[{COMPACT_BYTES}]"}
    assert format_graph(program.graph, every_node=True) == before
    _assert_equal(compacted.module()(*batch()), step(*batch()))
    assert "aten.linear" in format_graph(compacted.graph, every_node=True)


@pytest.mark.parametrize("first", ["decompose", "compact"])
def test_decomposed_before_or_after(first: str) -> None:
    step = _Step()
    program = export(step, batch())
    if first == "decompose":
        compacted = compact(program.run_decompositions())
    else:
        compacted = compact(program).run_decompositions()
    assert [r.verdict for r in torchvm.reports()] == [Reason.COMPACTED]
    assert _mask_sizes(compacted) == {f"bool[{COMPACT_BYTES}]"}
    assert "aten.linear" not in format_graph(compacted.graph, every_node=True)
    _assert_equal(compacted.module()(*batch()), step(*batch()))


def test_dynamic_batches() -> None:
    step = _Step()
    bs = Dim("bs", min=2, max=64)
    compacted = compact(export(step, batch(), dynamic_shapes=({0: bs}, {0: bs})))
    assert [r.verdict for r in torchvm.reports()] == [Reason.COMPACTED]
    other = batch(5, 3, seed=1)
    _assert_equal(compacted.module()(*other), step(*other))


def test_selected_passes_and_refusals() -> None:
    program = export(_Step(), batch())
    compact(program, passes=["ElideUnreadMasks"])
    assert [r.verdict for r in torchvm.reports()] == [Reason.TREE_BLOCK_READ]
    with pytest.raises(ValueError, match=r"passes must be .* got \['Nope'\]"):
        compact(program, passes=["Nope"])


def test_a_mask_that_is_a_buffer_is_kept() -> None:
    class Owner(torch.nn.Module):
        mask: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.zeros(2 * 3 * 3, dtype=torch.bool))

        def forward(self, parents: Tensor, seq_lens: Tensor) -> Any:
            torch.ops.torchvm.build_tree_from_parents(parents, seq_lens, self.mask, 3, QLEN)
            return (READERS.block(self.mask, seq_lens, 3, QLEN),)

    owner = Owner()
    compacted = compact(export(owner, batch())).module()
    assert [r.verdict for r in torchvm.reports()] == [Reason.GRAPH_INPUT]
    _assert_equal(compacted(*batch()), owner(*batch()))


_LOAD = """
import sys, torch, torchvm, tests.readers
from tests.verify_graphs import batch
program = torch.export.load(sys.argv[1])
torch.save(program.module()(*batch()), sys.argv[2])
"""


def test_another_process_loads_a_saved_program(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    step = _Step()
    saved, result = tmp_path / "step.pt2", tmp_path / "result.pt"
    torch.export.save(compact(export(step, batch())), saved)
    assert _mask_sizes(torch.export.load(saved)) == {f"bool[{COMPACT_BYTES}]"}
    run = subprocess.run(
        [sys.executable, "-c", _LOAD, str(saved), str(result)],
        cwd=pytestconfig.rootpath,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    _assert_equal(torch.load(result), step(*batch()))


def test_an_aotinductor_package_runs_from_python(tmp_path: Path) -> None:
    from torch.profiler import ProfilerActivity, profile

    step = _Step()
    fast = {"aot_inductor.compile_wrapper_opt_level": "O0"}
    package = torch._inductor.aoti_compile_and_package(
        compact(export(step, batch())),
        package_path=str(tmp_path / "step.pt2"),
        inductor_configs=fast,
    )
    packaged = torch._inductor.aoti_load_package(package)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as prof:
        result = packaged(*batch())
    _assert_equal(result, step(*batch()))
    events = prof.events() or []
    (built,) = [e for e in events if e.name == "torchvm::build_tree_from_parents"]
    assert built.input_shapes[2] == [COMPACT_BYTES]
