"""Time the graph passes on hand-built graphs of 1,000 to 100,000 nodes with 100 masks.

    python -m torchvm.tools.bench.passes [--json]

Every fifth mask is unread, read by ops of the tree block, by one without a mode, in full, or
built twice; the other nodes are additions in a chain, as a model's own. Times are medians of runs
on a new graph each, on one thread; a walk over the nodes that does nothing is the floor.
"""

from __future__ import annotations

import argparse
import json
import operator
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2

from torchvm.compilation import PASSES
from torchvm.ops.contracts import MaskRead, register_mask_reader
from torchvm.passes.base import MaskPipeline
from torchvm.passes.capture_check import check_capture
from torchvm.passes.clone_check import verify_no_clone
from torchvm.passes.hoist_mask_readers import HoistMaskReaders
from torchvm.passes.keep_copies import KeepCopies
from torchvm.passes.liveness import find_masks
from torchvm.passes.report import Reason
from torchvm.tracing import fake_mode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.fx import Graph, Node

__all__ = ["Row", "main", "make_graph", "rows"]

SIZES = (1_000, 10_000, 100_000)
MASKS = 100
BS, N, CONTEXT = 256, 4, 1 << 20
READERS_EACH = 2
"""Layers that read a mask."""

_library = torch.library.Library("torchvm_bench", "FRAGMENT")
for _name, _rest in (("block", ", int mode"), ("block_full", ""), ("full", "")):
    _library.define(f"{_name}(Tensor mask, Tensor seq_lens{_rest}) -> Tensor")
_OPS = torch.ops.torchvm_bench
_BUILD = torch.ops.torchvm.build_tree_from_parents.default
_ALLOC = torch.ops.torchvm.alloc_verify_mask.default
_VERDICTS = (
    Reason.ELIDED,
    Reason.COMPACTED,
    Reason.PREFIX_SKIPPED,
    Reason.FULL_READ,
    Reason.ELIDED,
)
"""What each kind of mask must get."""


class Row(NamedTuple):
    """Median milliseconds for one graph size."""

    nodes: int
    walk: float
    find_masks: float
    mask_passes: float
    """All mask passes, liveness and reports included."""
    keep_copies: float
    hoist: float
    all_passes: float
    """What a compile adds: mask passes, KeepCopies, HoistMaskReaders and verify_no_clone."""
    check_capture: float


class _Builder:
    """Append nodes with values to a graph."""

    def __init__(self) -> None:
        self.graph = torch.fx.Graph()
        with fake_mode():
            self.mask = torch.empty(BS * N * (CONTEXT + N), dtype=torch.bool)
            self.ids = torch.empty(BS, N, dtype=torch.int64)
            self.rows = torch.empty(BS, N)
            self.lens = torch.empty(BS, dtype=torch.int64)

    def input(self, name: str, value: Tensor) -> Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        return node

    def call(self, target: Any, *args: Any, val: Any, **kwargs: Any) -> Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = val
        return node

    def build(self, parents: Node, seq_lens: Node, mask: Node) -> tuple[Node, Node]:
        """Build into a mask; return positions and the new version."""
        results = (self.ids.view(-1), self.ids, self.ids, self.ids, self.mask)
        wrapper = self.call(
            auto_functionalized_v2, _BUILD, val=results, parents=parents, seq_lens=seq_lens,
            num_draft_tokens=N, tree_mask_mode=0, fill_prefix=True,
            _tree_mask_base_index=0, _all_bases=[mask],
        )  # fmt: skip
        positions = self.call(operator.getitem, wrapper, 0, val=results[0])
        return positions, self.call(operator.getitem, wrapper, 4, val=self.mask)

    def add_mask(self, parents: Node, seq_lens: Node, kind: int) -> list[Node]:
        """Add one mask; return what is used of it."""
        mask = self.call(_ALLOC, BS, N, CONTEXT, 0, val=self.mask)
        positions, version = self.build(parents, seq_lens, mask)
        if kind == 4:
            positions, version = self.build(parents, seq_lens, version)
        reader, told = {
            1: (_OPS.block.default, (0,)),
            2: (_OPS.block_full.default, ()),
            3: (_OPS.full.default, ()),
        }.get(kind, (None, ()))
        if reader is None:
            return [positions]
        return [
            positions,
            *(
                self.call(reader, version, seq_lens, *told, val=self.rows)
                for _ in range(READERS_EACH)
            ),
        ]


def make_graph(nodes: int, masks: int = MASKS) -> Graph:
    """Make a functional graph of about `nodes` nodes, its masks spread evenly.

    Args:
        nodes: at least ten for each mask.
        masks: masks, of the five kinds in turn.
    """
    builder = _Builder()
    parents = builder.input("parents", builder.ids)
    seq_lens = builder.input("seq_lens", builder.lens)
    x = builder.input("x", builder.rows)
    results: list[Node] = []
    for i in range(masks):
        results.extend(builder.add_mask(parents, seq_lens, i % len(_VERDICTS)))
        while len(builder.graph.nodes) < nodes * (i + 1) // masks:
            x = builder.call(torch.ops.aten.add.Tensor, x, 1.0, val=builder.rows)
    builder.graph.output((*results, x))
    return builder.graph


def rows(sizes: Sequence[int], *, runs: int = 5) -> list[Row]:
    """Time every part for each size.

    Raises:
        AssertionError: when a mask gets another verdict than its kind must.
    """
    _register()
    return [_row(nodes, runs) for nodes in sizes]


def _register() -> None:
    for name, reads, mode_arg in (
        ("block", MaskRead.TREE_BLOCK, "mode"),
        ("block_full", MaskRead.TREE_BLOCK, None),
        ("full", MaskRead.FULL, None),
    ):
        register_mask_reader(f"torchvm_bench::{name}", arg="mask", reads=reads, mode_arg=mode_arg)


def _row(nodes: int, runs: int) -> Row:
    pipeline = MaskPipeline([p() for p in PASSES], _check_verdicts)
    keep, hoist = KeepCopies(), HoistMaskReaders()

    def all_passes(graph: Graph) -> None:
        for graph_pass in (pipeline, keep, hoist, verify_no_clone):
            graph_pass(graph)

    measured: list[Callable[[Graph], object]] = [
        lambda graph: [node.target for node in graph.nodes],
        find_masks,
        pipeline,
        keep,
        hoist,
        all_passes,
        check_capture,
    ]
    return Row(nodes, *(_median_ms(nodes, runs, part) for part in measured))


def _median_ms(nodes: int, runs: int, part: Callable[[Graph], object]) -> float:
    times = []
    for _ in range(runs):
        graph = make_graph(nodes)
        begin = time.perf_counter()
        part(graph)
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def _check_verdicts(reports: Sequence[Any]) -> None:
    expected = [_VERDICTS[i % len(_VERDICTS)] for i in range(len(reports))]
    assert [report.verdict for report in reports] == expected
    assert len(reports) == MASKS


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON list")
    parser.add_argument("--runs", type=int, default=5, help="runs of each, of which the median")
    options = parser.parse_args()
    torch.set_num_threads(1)
    measured = rows(SIZES, runs=options.runs)
    if options.json:
        print(json.dumps([row._asdict() for row in measured]))
        return
    print(f"{MASKS} masks, torch {torch.__version__}, one thread, milliseconds")
    print("  ".join(f"{name:>13}" for name in Row._fields))
    for row in measured:
        print(f"{row.nodes:>13,}  " + "  ".join(f"{value:>13.2f}" for value in row[1:]))
    last = measured[-1]
    print(f"all passes: {last.all_passes / last.nodes * 1e3:.2f} us a node in the largest graph")


if __name__ == "__main__":
    main()
