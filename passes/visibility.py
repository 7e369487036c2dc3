"""What users see of a compile: a log, counters, trace artifacts and a folder of printed graphs.

`TORCH_LOGS=torchvm` shows the log, `TORCH_TRACE` (and tlparse) the artifacts, `TORCHVM_DUMP` names
the folder. Nothing is printed or built for what is off.
"""

from __future__ import annotations

import fcntl
import logging
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
from torch._dynamo.utils import counters
from torch._logging._internal import trace_structured

from torchvm.ops.environment import text
from torchvm.passes.base import MaskPipeline
from torchvm.passes.graph import format_graph
from torchvm.passes.report import REASONS, MaskReport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.fx import Graph

__all__ = ["DumpedGraph", "VisiblePipeline", "announce"]

_log = logging.getLogger("torchvm")


class DumpedGraph(msgspec.Struct, frozen=True):
    """An entry of `report.json`; `number` names the files."""

    number: str
    reports: tuple[MaskReport, ...]


class VisiblePipeline(MaskPipeline):
    """The mask passes of a compile, and what is shown of them."""

    def __call__(self, graph: Graph) -> None:
        """Rewrite one graph in place, report on its masks, and show both."""
        folder = _dump_folder()
        _trace("torchvm_before", "string", lambda: format_graph(graph, every_node=True))
        before = format_graph(graph, every_node=True) if folder is not None else ""
        reports = self.run(graph)
        _trace("torchvm_after", "string", lambda: format_graph(graph, every_node=True))
        if folder is not None:
            _dump(folder, before, format_graph(graph, every_node=True), reports)
        announce(reports)
        self._sink(reports)

    def uuid(self) -> str | None:
        """Return the compile-cache key; None while graphs are dumped, which a hit has none of."""
        return None if text("TORCHVM_DUMP") else super().uuid()


def announce(reports: Sequence[MaskReport]) -> None:
    """Log and count the verdicts of one graph, compiled or out of a compile cache."""
    counters["torchvm"].update(Counter(report.verdict.value for report in reports))
    _trace("torchvm_reports", "json", lambda: msgspec.json.encode(list(reports)).decode())
    if _log.isEnabledFor(logging.INFO):
        for report in reports:
            _log.info("%s: %s", report, REASONS[report.verdict].remedy)


def _trace(name: str, encoding: str, payload: Callable[[], str]) -> None:
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=payload,
        expect_trace_id=False,
    )


def _dump_folder() -> Path | None:
    """Return where this process dumps; every rank has a folder of its own."""
    root = text("TORCHVM_DUMP")
    if not root:
        return None
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return Path(root) / f"rank{distributed.get_rank()}"
    return Path(root)


def _dump(folder: Path, before: str, after: str, reports: Sequence[MaskReport]) -> None:
    """Add one graph to a folder that other processes may write too."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            index = folder / "report.json"
            known = index.read_bytes() if index.exists() else b"[]"
            graphs = msgspec.json.decode(known, type=list[DumpedGraph])
            number = f"{len(graphs):04d}"
            graphs.append(DumpedGraph(number, tuple(reports)))
            (folder / f"{number}_before.txt").write_text(before + "\n")
            (folder / f"{number}_after.txt").write_text(after + "\n")
            (folder / "index.md").write_text(_index(graphs))
            index.write_bytes(msgspec.json.format(msgspec.json.encode(graphs)))
    except (OSError, msgspec.DecodeError) as error:
        _log.warning("TORCHVM_DUMP: nothing written to %s: %s", folder, error)


def _index(graphs: Sequence[DumpedGraph]) -> str:
    """Write a table with a line for each mask, and one for each graph without any."""
    lines = [
        "# Graphs as torchvm's passes got and left them",
        "",
        "| graph | mask | layout | verdict | what to do |",
        "|---|---|---|---|---|",
    ]
    for graph in graphs:
        n = graph.number
        files = f"{n} [before]({n}_before.txt) [after]({n}_after.txt)"
        lines.extend(f"| {files} | {_cells(report)} |" for report in graph.reports)
        if not graph.reports:
            lines.append(f"| {files} | none | | | |")
    return "\n".join(lines) + "\n"


def _cells(report: MaskReport) -> str:
    mask = f"`{report.name}` {report.source}".rstrip()
    return f"{mask} | {report.change} | {report.verdict} | {REASONS[report.verdict].remedy}"
