"""The benchmark of the passes times graphs in which every mask gets the verdict of its kind."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.utils import fresh_cache

from tests.verify_graphs import CASES, batch
from torchvm.ops import contracts
from torchvm.passes.liveness import find_masks
from torchvm.tools.bench import passes as bench
from torchvm.tools.bench.compile_share import measured
from torchvm.tools.bench.measure import QUICK, measure


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


def test_every_part_is_timed_and_verdicts_are_compared() -> None:
    (case,) = bench.cases(bench.QUICK)
    wanted = case.expected()
    row = measure(case._replace(expected=lambda: wanted[1:] + wanted[:1]), QUICK)
    assert row.differing == ("mask passes", "all passes")
    assert set(row.times) == {
        "walk", "find_masks", "KeepCopies", "HoistMaskReaders", "check_capture",
    }  # fmt: skip
    for contender in case.contenders:
        if contender.results is not None:
            assert contender.results() == wanted


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
