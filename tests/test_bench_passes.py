"""The benchmark of the passes times graphs in which every mask gets the verdict of its kind."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from torch._inductor.utils import fresh_cache

from tests.verify_graphs import CASES, batch
from torchvm.ops import contracts
from torchvm.passes.liveness import find_masks
from torchvm.tools.bench import passes as bench
from torchvm.tools.bench.compile_share import measured

if TYPE_CHECKING:
    from torchvm import MaskReport


@pytest.fixture(autouse=True)
def _contracts_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = {op: dict(by_arg) for op, by_arg in contracts._READERS.items()}
    monkeypatch.setattr(contracts, "_READERS", copied)


@pytest.mark.parametrize("nodes", [1_000, 3_000])
def test_graphs_have_the_size_and_the_masks(nodes: int) -> None:
    graph = bench.make_graph(nodes)
    graph.lint()
    assert abs(len(graph.nodes) - nodes) < 10
    assert len(find_masks(graph)) == bench.MASKS


def test_rows_cover_every_size() -> None:
    rows = bench.rows((1_000, 1_500), runs=1)
    assert [row.nodes for row in rows] == [1_000, 1_500]
    assert all(value > 0 for row in rows for value in row)


def test_a_wrong_verdict_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[MaskReport]] = []
    check = bench._check_verdicts
    monkeypatch.setattr(bench, "_check_verdicts", lambda reports: found.append(reports))
    bench.rows((1_000,), runs=1)
    check(found[0])
    with pytest.raises(AssertionError):
        check(found[0][1:])


def test_output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "SIZES", (1_000,))
    monkeypatch.setattr(sys, "argv", ["passes", "--runs", "1"])
    bench.main()
    assert "us a node in the largest graph" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["passes", "--runs", "1", "--json"])
    bench.main()
    (row,) = json.loads(capsys.readouterr().out)
    assert set(row) == set(bench.Row._fields)


def test_the_share_of_a_compile_counts_every_part() -> None:
    def compile_once() -> None:
        torch._dynamo.reset()
        torch.compile(CASES["tree_block_reader"].function, backend="torchvm")(*batch())

    with fresh_cache(), torch.no_grad():
        cold, warm = measured(compile_once), measured(compile_once)
    passes = {"mask passes", "KeepCopies", "HoistMaskReaders", "verify_no_clone"}
    always = {"cache keys", "reports", "torchvm", "compile", "percent"}
    assert set(cold) == passes | always
    assert set(warm) == always
    assert 0 < cold["torchvm"] < cold["compile"]
