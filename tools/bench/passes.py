"""The graph passes on hand-built graphs of 1,000 to 100,000 nodes with 100 masks.

Every fifth mask is unread, read by ops of the tree block, by one without a mode, in full, or
built twice; the other nodes are additions in a chain, as a model's own. Every run is on
a new graph; a walk over the nodes that does nothing is the floor.
"""

from __future__ import annotations

import operator
from functools import partial
from typing import TYPE_CHECKING, Any

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
from torchvm.tools.bench.measure import Case, Contender, sample_us
from torchvm.tracing import fake_mode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor
    from torch.fx import Graph, Node

    from torchvm.passes.report import MaskReport

__all__ = ["TITLE", "cases", "make_graph", "passes_case"]

TITLE = "passes: what a compile adds, on graphs of a model's size"
NOTES = (
    "mask passes: all of them, liveness and reports included",
    "all passes: what a compile adds: those, KeepCopies, HoistMaskReaders and verify_no_clone",
)

SIZES = (1_000, 10_000, 100_000)
QUICK = (1_000,)
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


def cases(sizes: Sequence[int] = SIZES) -> Iterator[Case]:
    """Every part for each size of graph."""
    _register()
    for nodes in sizes:
        yield passes_case(nodes)


def _register() -> None:
    for name, reads, mode_arg in (
        ("block", MaskRead.TREE_BLOCK, "mode"),
        ("block_full", MaskRead.TREE_BLOCK, None),
        ("full", MaskRead.FULL, None),
    ):
        register_mask_reader(f"torchvm_bench::{name}", arg="mask", reads=reads, mode_arg=mode_arg)


def passes_case(nodes: int) -> Case:
    """Compare the verdicts of all masks with those of their kinds, and time each part."""
    reports: list[MaskReport] = []
    pipeline = MaskPipeline([p() for p in PASSES], reports.extend)
    keep, hoist = KeepCopies(), HoistMaskReaders()

    def all_passes(graph: Graph) -> None:
        for graph_pass in (pipeline, keep, hoist, verify_no_clone):
            graph_pass(graph)

    def verdicts(part: Callable[[Graph], object]) -> Callable[[], list[Reason]]:
        def find() -> list[Reason]:
            reports.clear()
            part(make_graph(nodes))
            return [report.verdict for report in reports]

        return find

    def changing(name: str, part: Callable[[Graph], object], *, reports: bool) -> Contender:
        return Contender(
            name,
            lambda: part(make_graph(nodes)),
            verdicts(part) if reports else None,
            lambda calls: _sample_us(nodes, calls, part),
        )

    read = make_graph(nodes)
    return Case(
        f"graphs with {MASKS} masks",
        f"{nodes:,} nodes",
        (
            Contender("walk", lambda: [node.target for node in read.nodes]),
            Contender("find_masks", lambda: find_masks(read)),
            changing("mask passes", pipeline, reports=True),
            changing("KeepCopies", keep, reports=False),
            changing("HoistMaskReaders", hoist, reports=False),
            changing("all passes", all_passes, reports=True),
            Contender("check_capture", lambda: check_capture(read)),
        ),
        lambda: [_VERDICTS[i % len(_VERDICTS)] for i in range(MASKS)],
        "the verdicts that the masks must get",
        unit="us a graph",
    )


def _sample_us(nodes: int, calls: int, part: Callable[[Graph], object]) -> list[float]:
    """Times on a new graph each, the making of which is not counted."""
    times = []
    for _ in range(calls):
        graph = make_graph(nodes)
        times += sample_us(partial(part, graph), 1)
    return times
