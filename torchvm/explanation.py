"""explain: what compiling a function would do to each verify mask, why, and what helps."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.utils._pytree import tree_map_only

from torchvm.compilation import PASSES
from torchvm.passes.base import MaskPipeline
from torchvm.passes.graph import graph_modules
from torchvm.passes.report import REASONS, MaskReport
from torchvm.tracing import fake_mode, trace, uncompiled

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Explanation", "MaskExplanation", "explain"]


class MaskExplanation(msgspec.Struct, frozen=True):
    """What would become of one mask."""

    graph: int
    """Number of the graph, in the order in which they would be compiled."""
    report: MaskReport
    meaning: str
    """What the report's verdict means."""
    remedy: str
    """What to do about it."""

    def __str__(self) -> str:
        """Several lines: the mask and its bytes, the verdict, the readers, the remedy."""
        report = self.report
        place = f" at {report.source}" if report.source else ""
        readers = [
            f"  read by {reader.op} ({reader.reads.name})"
            + (f" at {reader.source}" if reader.source else "")
            for reader in report.readers
        ]
        return "\n".join(
            [
                f"{report.name}{place}: {report.change}",
                f"  {report.verdict}: {self.meaning}",
                *(readers or ["  read by nothing"]),
                f"  to do: {self.remedy}",
            ]
        )


class Explanation(msgspec.Struct, frozen=True):
    """What would become of every mask that a function builds, graph by graph."""

    graphs: int
    """Graphs that the function compiles to; more than one where it breaks the graph."""
    masks: tuple[MaskExplanation, ...]

    def __str__(self) -> str:
        """A paragraph a mask, under a line with the counts."""
        graphs = f"{self.graphs} graph" + "s" * (self.graphs != 1)
        if not self.masks:
            return f"no verify mask is built in {graphs}"
        masks = f"{len(self.masks)} mask" + "s" * (len(self.masks) != 1)
        several = self.graphs > 1
        parts = [f"graph {m.graph}, {m}" if several else str(m) for m in self.masks]
        return "\n\n".join([f"{masks} in {graphs}", *parts])


def explain(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Say what `torch.compile(function, backend="torchvm")` would do to each mask, and why.

    The function is traced under fake tensors: nothing is computed and no mask is allocated.

    Args:
        function: what would be compiled, or a compiled function or module.
        args: example arguments; tensors are replaced by fakes of the same metadata.
        kwargs: example keyword arguments.

    Returns:
        An object to print; `masks` has the reports, their meanings and remedies.
    """
    mode = fake_mode()
    fake = partial(mode.from_tensor, static_shapes=True)
    fake_args, fake_kwargs = tree_map_only(torch.Tensor, fake, (args, kwargs))
    traced = trace(uncompiled(function), fake_args, fake_kwargs, mode=mode)
    pipeline = MaskPipeline([p() for p in PASSES], lambda _: None)
    masks = [
        MaskExplanation(number, report, *_text(report))
        for number, found in enumerate(traced)
        for module in graph_modules(found.module)
        for report in pipeline.run(module.graph)
    ]
    return Explanation(len(traced), tuple(masks))


def _text(report: MaskReport) -> tuple[str, str]:
    text = REASONS[report.verdict]
    return text.meaning, text.remedy
