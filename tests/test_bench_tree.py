"""The tree benchmark: its floor computes what the op does, and differences stop it."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from tests.trees import draw_batch, draw_malformed, draw_sizes
from torchvm.ops.candidates import DraftCandidates
from torchvm.ops.layout import TreeMaskMode, live_mask_numel
from torchvm.tools.bench import tree as bench

if TYPE_CHECKING:
    from torch import Tensor

    from torchvm.ops.tree import DraftTree

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="the floor needs a C compiler")


@pytest.fixture(scope="module")
def floor() -> bench.Floor:
    return bench.Floor()


@pytest.mark.parametrize("mode", [TreeMaskMode.FULL_MASK, TreeMaskMode.QLEN_ONLY])
def test_floor_does_the_work_of_the_op(floor: bench.Floor, mode: TreeMaskMode) -> None:
    """Malformed trees included."""
    rng = random.Random(30)  # noqa: S311
    for draw in (draw_batch, draw_malformed) * 60:
        batch = draw(rng, *draw_sizes(rng, 40), 3)
        parent_list, selected, seq_lens = batch.tensors()
        numel = int(live_mask_numel(mode, 3, batch.n, sum(batch.lengths)))
        case = bench.Case(
            mode, batch.n, batch.topk, batch.depth,
            DraftCandidates(parent_list, selected, selected), seq_lens,
            torch.zeros(numel, dtype=torch.bool),
        )  # fmt: skip
        mask = torch.ones_like(case.mask)
        assert all(map(torch.equal, case.build(), floor.build(case, mask)))
        assert torch.equal(mask, case.mask)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "BATCHES", (2,))
    monkeypatch.setattr(bench, "TREES", ((4, 2, 2), (16, 4, 3)))
    monkeypatch.setattr(bench, "CONTEXT", 40)
    monkeypatch.setattr(bench, "CAPACITY", (4, 4, 100))
    monkeypatch.setattr(bench, "BUDGET_US", 1e3)


@pytest.mark.usefixtures("small")
def test_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == 0
    table = capsys.readouterr().out
    assert [line.split()[:4] for line in table.splitlines()[2:6]] == [
        [mode, "2", "x", n] for mode in ("QLEN", "FULL") for n in ("4", "16")
    ]
    assert bench.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["build_tree"]) == 4
    assert all(row["floor_us"] > 0 and row["ratio"] >= 0 for row in found["build_tree"])
    assert found["live_cells"]["live_bytes"] == 4 * (40 + 4)
    assert len(found["select_draft_candidates"]) == 2


@pytest.mark.usefixtures("small")
def test_no_ratios_where_results_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = bench.python_loop

    def wrong(case: bench.Case, mask: Tensor) -> DraftTree:
        tree = right(case, mask)
        mask[-1] = not mask[-1]
        return tree

    monkeypatch.setattr(bench, "python_loop", wrong)
    for arguments in ([], ["--json"]):
        assert bench.main(arguments) == 1
        out, err = capsys.readouterr()
        assert "the Python loop have different results for QLEN_ONLY, 2 x 4" in err
        assert "2 x 4" not in out


def test_runs_as_a_script() -> None:
    run = subprocess.run(
        [sys.executable, bench.__file__, "--help"], capture_output=True, text=True, check=True
    )
    assert "--json" in run.stdout
