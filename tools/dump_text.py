"""What `torchvm dump` found, as tables."""

from __future__ import annotations

import textwrap
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchvm.graph_rows import NodeRow
    from torchvm.inspection import TracedGraph
    from torchvm.passes.report import MaskReport

__all__ = ["dump_text", "mask_text", "readers_text", "report_text", "size_text", "summary"]

_HEAD = ("", "node", "op", "inputs", "output", "bytes", "mask", "readers", "source")
_RIGHT = _HEAD.index("bytes")
_MOST_READERS = 3
_JOINED = "\N{NO-BREAK SPACE}"


def dump_text(graphs: Sequence[TracedGraph], width: int | None = None) -> str:
    """Write tables of all graphs; a row that a pass changed has a `*` before it.

    Args:
        graphs: of one target.
        width: columns of the terminal; where a table is wider, every node is a paragraph
            instead. None is as wide as it gets.
    """
    if not graphs:
        return "no graph: nothing of the target is compiled"
    return "\n\n".join(_graph_text(number, graph, width) for number, graph in enumerate(graphs))


def summary(graphs: Sequence[TracedGraph]) -> str:
    """Count graphs, masks and findings in one line."""
    counts = {
        "graph": len(graphs),
        "mask": sum(len(graph.reports) for graph in graphs),
        "finding": sum(len(graph.findings) for graph in graphs),
    }
    return ", ".join(f"{count} {name}{'s' * (count != 1)}" for name, count in counts.items())


def mask_text(row: NodeRow) -> str:
    """Say what a node is to a mask: its layout, that it builds it, or how much it reads of it."""
    if row.role == "builder":
        return f"writes {row.mode}"
    return f"reads {row.reads} of {row.mode}" if row.role == "reader" else row.mode


def report_text(report: MaskReport) -> str:
    """Name a mask, its place, and its layout and bytes as declared and as they become."""
    place = f" at {report.source}" if report.source else ""
    copied = ", copied before a build" if report.copied else ""
    layouts = [
        f"{report.declared_mode.name} {size_text(report.declared_bytes)} B",
        f"{report.final_mode.name} {size_text(report.final_bytes)} B",
    ]
    return f"{report.name}{place}: {' -> '.join(dict.fromkeys(layouts))}{copied}"


def readers_text(report: MaskReport) -> str:
    """Say who reads a mask and how much, each op once."""
    counts = Counter((reader.op, reader.reads.name) for reader in report.readers)
    found = [f"{op}{f' x {n}' if n > 1 else ''} ({reads})" for (op, reads), n in counts.items()]
    return f"read by {', '.join(found) or 'nothing'}"


def size_text(nbytes: int | str | None) -> str:
    """Write bytes with the thousands apart, or the expression they are."""
    if nbytes is None:
        return ""
    return f"{nbytes:,}" if isinstance(nbytes, int) else nbytes


def _graph_text(number: int, graph: TracedGraph, width: int | None) -> str:
    changed = set(graph.changed)
    hidden = graph.nodes - len(graph.before)
    more = f" ({hidden} of {graph.nodes} nodes left out: --all)" if hidden else ""
    tables = [_table(graph.before, changed, width)] if graph.before else ["  no op of torchvm"]
    after = [_table(graph.after, changed, width)] if changed else []
    parts = [
        f"graph {number}, before{more}",
        *tables,
        "",
        f"graph {number}, after" + ("" if changed else ": the same"),
        *after,
        "",
        *_notes(graph, width),
    ]
    return "\n".join(parts)


def _notes(graph: TracedGraph, width: int | None) -> list[str]:
    lines = ["masks"]
    for report, remedy in zip(graph.reports, graph.remedies, strict=True):
        lines += _folded(f"{report_text(report)}: {report.verdict}", width, "  ")
        details = [readers_text(report), remedy.meaning, f"to do: {remedy.remedy}"]
        lines += [line for text in details for line in _folded(text, width, "    ")]
    if not graph.reports:
        lines.append("  none")
    if graph.plans:
        lines += ["", "plans of masks that come in, for this graph alone"]
        plans = [f"{report_text(plan)}: {plan.verdict}" for plan in graph.plans]
        lines += [line for plan in plans for line in _folded(plan, width, "  ")]
    lines += ["", "findings"]
    lines += [line for found in graph.findings for line in _folded(str(found), width, "  ")]
    return lines if graph.findings else [*lines, "  none"]


def _folded(text: str, width: int | None, indent: str) -> list[str]:
    if width is None:
        return [indent + text]
    lines = textwrap.wrap(
        text,
        max(width, 40),
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_JOINED, " ") for line in lines]


def _table(rows: Sequence[NodeRow], changed: set[str], width: int | None) -> str:
    cells = [_HEAD, *(_cells(row, changed) for row in rows)]
    used = [i for i in range(len(_HEAD)) if i < 2 or any(line[i] for line in cells[1:])]
    widths = {i: max(len(line[i]) for line in cells) for i in used}
    if width is not None and sum(widths.values()) + 2 * (len(used) - 1) > width:
        return "\n".join(line for row in rows for line in _paragraph(row, changed, width))
    lines = [
        "  ".join(
            line[i].rjust(widths[i]) if i == _RIGHT else line[i].ljust(widths[i]) for i in used
        )
        for line in cells
    ]
    return "\n".join(line.rstrip() for line in lines)


def _cells(row: NodeRow, changed: set[str]) -> tuple[str, ...]:
    return (
        "*" if row.name in changed else "",
        row.name,
        row.op,
        ", ".join(row.inputs),
        row.output,
        size_text(row.nbytes),
        mask_text(row),
        _first(row.readers),
        row.source,
    )


def _first(names: Sequence[str]) -> str:
    """A few names, and how many more there are."""
    more = len(names) - _MOST_READERS
    return ", ".join(names[:_MOST_READERS]) + (f" and {more} more" if more > 0 else "")


def _paragraph(row: NodeRow, changed: set[str], width: int) -> list[str]:
    """A node in a few lines, for a terminal that is narrower than the table."""
    mark, name, op, _, output, nbytes, mask, readers, source = _cells(row, changed)
    # A short argument stays on one line.
    parts = [part.replace(" ", _JOINED) if len(part) < width // 2 else part for part in row.inputs]
    inputs = ", ".join(parts)
    about = [f"{nbytes} B" if nbytes else "", mask, f"read by {readers}" if readers else ""]
    results = "  ".join(part for part in (f"-> {output}" if output else "", *about) if part)
    details = [part for part in (inputs, results, source) if part]
    head = f"{mark or ' '}  {name}  {op}"
    return [head, *(line for part in details for line in _folded(part, width, "     "))]
