"""Tracing the same function again: what was traced before does not count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.readers import READERS
from tests.verify_graphs import CASES, FULL, batch
from torchvm import Reason, explain, plan_verify_mask
from torchvm.inspection import trace_graphs

if TYPE_CHECKING:
    from torch import Tensor

SIZES = ((2, 3), (5, 4), (7, 6))


def test_other_sizes_are_not_taken_for_dynamic_ones() -> None:
    function = CASES["alloc_of_fixed_size"].function
    for bs, n in SIZES:
        (mask,) = explain(function, *batch(bs, n)).masks
        assert mask.report.verdict is Reason.COMPACTED
        assert isinstance(mask.report.final_bytes, int)


def test_sizes_are_dynamic_where_they_are_asked_to_be() -> None:
    function = CASES["alloc_of_fixed_size"].function
    for bs, n in SIZES:
        (graph,) = trace_graphs(function, batch(bs, n), dynamic=True)
        assert [r.verdict for r in graph.reports] == [Reason.CAPACITY]


@pytest.mark.parametrize("bs", [2, 5, 7])
def test_plans_of_other_sizes(bs: int) -> None:
    def forward(parents: Tensor, seq_lens: Tensor, mask: Tensor) -> Any:
        torch.ops.torchvm.build_tree_from_parents(parents, seq_lens, mask, 4, FULL)
        return READERS.block(mask, seq_lens, 4, FULL)

    def make_inputs(mask: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        ids = torch.empty(bs, 4, dtype=torch.int64)
        return (ids, torch.empty(bs, dtype=torch.int64), mask), {}

    plan = plan_verify_mask(
        forward, make_inputs, max_bs=bs, num_draft_tokens=4, max_context_len=20, device="cpu"
    )
    assert plan.verdict is Reason.COMPACTED
