"""explain: what would happen to each mask, without computing or allocating anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._dynamo.utils import counters

import torchvm
from tests.readers import READERS
from tests.verify_graphs import CASES, CONTEXT, FULL, batch
from torchvm import Reason, explain
from torchvm.passes.report import REASONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["dead", "tree_block_reader", "returned", "two_masks_one_read"])
def test_it_says_what_a_compile_reports(name: str) -> None:
    torchvm.clear_reports()
    found = explain(CASES[name].function, *batch())
    assert torchvm.reports() == ()
    compiled = torch.compile(
        CASES[name].function, backend="torchvm", options={"inner": "aot_eager"}
    )
    compiled(*batch())
    assert tuple(mask.report for mask in found.masks) == torchvm.reports()
    assert [mask.report.verdict for mask in found.masks] == list(CASES[name].verdicts)
    for mask in found.masks:
        text = REASONS[mask.report.verdict]
        assert (mask.meaning, mask.remedy) == (text.meaning, text.remedy)


def test_every_mask_is_printed_with_readers_and_remedy() -> None:
    text = str(explain(CASES["two_masks_one_read"].function, *batch()))
    head, read, unread = text.split("\n\n")
    assert head == "2 masks in 1 graph"
    assert "verify_graphs.py:" in read.splitlines()[0]
    assert "FULL_MASK 138 B" in read
    assert "FULL_READ: a reader's contract says" in read
    assert "read by torchvm_tests::count (FULL) at " in read
    assert "to do: use a reader of the tree block" in read
    assert "FULL_MASK 138 B -> QLEN_ONLY 18 B" in unread
    assert "read by nothing" in unread


def test_a_gib_is_explained_without_being_allocated() -> None:
    def step(parents: Tensor, seq_lens: Tensor) -> Tensor:
        mask = torchvm.alloc_verify_mask(256, 4, 1 << 40, FULL)
        return torchvm.build_tree_from_parents(
            parents, seq_lens, mask, num_draft_tokens=4, tree_mask_mode=FULL
        ).positions

    (mask,) = explain(step, *batch(256, 4)).masks
    assert mask.report.final_bytes == 4096


def test_graphs_are_counted_over_breaks() -> None:
    def step(parents: Tensor, seq_lens: Tensor, *, twice: bool) -> Any:
        mask = torchvm.alloc_verify_mask(2, 3, CONTEXT, FULL)
        torch.ops.torchvm.build_tree_from_parents(parents, seq_lens, mask, 3, FULL)
        if twice:
            torch._dynamo.graph_break()
            torch.ops.torchvm.build_tree_from_parents(parents, seq_lens, mask, 3, FULL)
        return READERS.count(mask, 1)

    found = explain(step, *batch(), twice=True)
    verdicts = [(m.graph, m.report.verdict) for m in found.masks]
    assert verdicts == [(0, Reason.RETURNED), (1, Reason.GRAPH_INPUT)]
    assert str(found).startswith("2 masks in 2 graphs\n\ngraph 0, alloc_verify_mask at ")
    assert str(found).count("plan_verify_mask") == 2
    assert explain(step, *batch(), twice=False).graphs == 1


def test_no_mask_is_said() -> None:
    assert str(explain(torch.sin, torch.ones(2))) == "no verify mask is built in 1 graph"


def _wrapped(function: Callable[..., Any]) -> torch.nn.Module:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(6))

        def forward(self, *args: Tensor) -> Any:
            return function(*args) * self.weight

    return Module()


def test_compiled_functions_and_modules_are_looked_into() -> None:
    function = CASES["dead"].function
    for compiled in (torch.compile(function), torch.compile(_wrapped(function))):
        (mask,) = explain(compiled, *batch()).masks
        assert mask.report.verdict is Reason.ELIDED


def test_explaining_counts_and_dumps_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("TORCHVM_DUMP", str(tmp_path))
    counters.clear()
    explain(CASES["dead"].function, *batch())
    assert "torchvm" not in counters
    assert list(tmp_path.iterdir()) == []
