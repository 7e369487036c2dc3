"""The pipeline: find the masks of a graph, let each pass try each mask, report every verdict."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from torch._inductor.custom_graph_pass import CustomGraphPass

from torchvm.ops.environment import flag
from torchvm.passes.cache_key import cache_key
from torchvm.passes.graph import source_line
from torchvm.passes.liveness import Mask, find_masks
from torchvm.passes.report import MaskReport, Reason
from torchvm.passes.rewrite import declared_storage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.fx import Graph, Node

__all__ = ["ChainedPasses", "MaskPass", "MaskPipeline"]


class MaskPass(ABC):
    """One rewrite of a mask; stateless, named by its class."""

    fired: Reason
    """The verdict of a mask that this pass rewrote."""
    settles: bool = True
    """Whether later passes leave such a mask alone; False for one that changes only readers."""

    @abstractmethod
    def declines(self, mask: Mask) -> Reason | None:
        """Say why this pass must leave the mask alone; None when it may rewrite it."""

    @abstractmethod
    def rewrite(self, mask: Mask) -> None:
        """Rewrite the graph around a mask that `declines` had nothing against."""


class MaskPipeline(CustomGraphPass):  # type: ignore[misc, unused-ignore]
    """All selected passes as one Inductor pass, for `joint_custom_pre_pass`.

    Args:
        passes: in the order in which they try a mask.
        sink: is given the reports of each graph, in a list.
    """

    def __init__(
        self, passes: Sequence[MaskPass], sink: Callable[[list[MaskReport]], None]
    ) -> None:
        self._passes = tuple(passes)
        self._sink = sink

    def __call__(self, graph: Graph) -> None:
        """Rewrite one functional graph in place and report on each of its masks."""
        self._sink(self.run(graph))

    def run(self, graph: Graph) -> list[MaskReport]:
        """Rewrite one functional graph in place; return the reports, which no sink is given."""
        masks = {mask.root: mask for mask in find_masks(graph)}
        before = {root: declared_storage(mask) for root, mask in masks.items()}
        readers = {root: mask.readers() for root, mask in masks.items()}
        if flag("TORCHVM_DISABLE"):
            verdicts = dict.fromkeys(masks, Reason.DISABLED)
        else:
            verdicts = self._rewrite(graph, masks)
        reports = []
        for root, mask in masks.items():
            (declared_mode, declared_bytes), after = before[root], declared_storage(mask)
            reports.append(
                MaskReport(
                    name=mask.origin.name,
                    source=source_line(mask.origin),
                    declared_mode=declared_mode,
                    final_mode=after[0],
                    declared_bytes=declared_bytes,
                    final_bytes=after[1],
                    verdict=verdicts[root],
                    readers=readers[root],
                )
            )
        return reports

    def uuid(self) -> str | None:
        """Return the compile-cache key; None (no caching) where a contract has no stable key."""
        names = [type(p).__name__ for p in self._passes]
        return cache_key([*names, f"TORCHVM_DISABLE={flag('TORCHVM_DISABLE')}"])

    def _rewrite(self, graph: Graph, masks: dict[Node, Mask]) -> dict[Node, Reason]:
        """Let every pass try every mask that none has settled.

        The verdict is that of the first pass that fired, unless a later one was wanted and
        refused; then it is that refusal.
        """
        verdicts = dict.fromkeys(masks, Reason.PASS_OFF)
        fired: dict[Node, Reason] = {}
        settled: set[Node] = set()
        for mask_pass in self._passes:
            pending = [root for root in masks if root not in settled]
            for root in pending:
                refusal = mask_pass.declines(masks[root])
                if refusal is not None:
                    verdicts[root] = refusal
                    continue
                mask_pass.rewrite(masks[root])
                verdicts[root] = fired.setdefault(root, mask_pass.fired)
                if mask_pass.settles:
                    settled.add(root)
            if fired and not mask_pass.settles:  # Readers changed: look again who reads.
                masks.update((mask.root, mask) for mask in find_masks(graph))
        return verdicts


class ChainedPasses(CustomGraphPass):  # type: ignore[misc, unused-ignore]
    """Several graph passes in one hook: torch 2.11 takes one callable, not a list."""

    def __init__(self, passes: Sequence[Callable[[Graph], None]]) -> None:
        self._passes = tuple(passes)

    def __call__(self, graph: Graph) -> None:
        """Run the passes in order."""
        for graph_pass in self._passes:
            graph_pass(graph)

    def uuid(self) -> tuple[Any, ...] | None:
        """Return the keys of all; None (no caching) when one of them has none."""
        keys = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self._passes]
        return None if any(not key for key in keys) else tuple(keys)
