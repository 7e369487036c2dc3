"""The page of `torchvm dump --html`: graphs drawn before and after, masks, findings, a table."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING

from torchvm.ops.version import __version__
from torchvm.tools.dump_drawing import draw_both, near_masks, page_text
from torchvm.tools.dump_text import mask_text, readers_text, report_text, size_text, summary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchvm.findings import Finding
    from torchvm.graph_rows import NodeRow
    from torchvm.inspection import TracedGraph
    from torchvm.passes.report import MaskReport, ReasonText

__all__ = ["dump_html"]

_LEGEND = (
    ("mask", "mask"),
    ("builder", "builds one"),
    ("reader", "reads one"),
    ("torchvm", "other op of torchvm"),
    ("other", "anything else"),
)
_COLUMNS = (
    ("node", ""),
    ("op", ""),
    ("output", ""),
    ("bytes before", "number"),
    ("bytes after", "number"),
    ("mask", ""),
    ("readers", ""),
    ("inputs", ""),
    ("source", ""),
)


def dump_html(graphs: Sequence[TracedGraph], target: str) -> str:
    """Write one page that needs nothing else: styles, script and drawings are in it.

    Args:
        graphs: of one target.
        target: what they are called.
    """
    page = resources.files("torchvm.tools").joinpath("dump_page.html").read_text("utf-8")
    parts = {
        "TITLE": page_text(target),
        "SUMMARY": page_text(f"{summary(graphs)}; torchvm {__version__}"),
        "LEGEND": "".join(f'<li class="{name}">{text}</li>' for name, text in _LEGEND),
    }
    for name, text in parts.items():
        page = page.replace(f"<!--{name}-->", text)
    body = "\n".join(_section(number, graph) for number, graph in enumerate(graphs))
    # Last, since a target's names may look like the marks.
    head, _, tail = page.partition("<!--GRAPHS-->")
    return head + (body or "<p>No graph: nothing of the target is compiled.</p>") + tail


def _section(number: int, graph: TracedGraph) -> str:
    near_before, near_after = near_masks(graph.before), near_masks(graph.after)
    drawn = near_before or near_after
    drawings = _figures(near_before, near_after, graph, f"graph {number}") if drawn else ""
    every = ""
    if (len(near_before), len(near_after)) != (len(graph.before), len(graph.after)):
        figures = _figures(graph.before, graph.after, graph, f"graph {number}, every node")
        every = f"<details><summary>Draw every node ({graph.nodes})</summary>{figures}</details>"
    return (
        f'<section aria-label="graph {number}"><h2>Graph {number}</h2>'
        f"<p>{graph.nodes} nodes, {len(graph.changed)} changed by the passes.</p>"
        f"{_masks(graph)}{_findings(graph.findings)}"
        f"{drawings or '<p>No op of torchvm in this graph.</p>'}{every}"
        f"{_table(graph, number)}</section>"
    )


def _masks(graph: TracedGraph) -> str:
    cards = [_card(r, remedy) for r, remedy in zip(graph.reports, graph.remedies, strict=True)]
    plans = [
        f'<li class="card">Plan for this graph alone: {page_text(report_text(plan))}: '
        f"<b>{plan.verdict}</b></li>"
        for plan in graph.plans
    ]
    return f"<h3>Masks</h3><ul>{''.join([*cards, *plans]) or '<li>none</li>'}</ul>"


def _card(report: MaskReport, remedy: ReasonText) -> str:
    return (
        f'<li class="card"><b>{page_text(report_text(report))}</b>'
        f'<br><span class="verdict">{report.verdict}</span> {page_text(remedy.meaning)}'
        f"<br>{page_text(readers_text(report))}"
        f"<br>to do: {page_text(remedy.remedy)}</li>"
    )


def _findings(findings: Sequence[Finding]) -> str:
    items = [f'<li class="card finding">{page_text(found)}</li>' for found in findings]
    return f"<h3>Findings</h3><ul>{''.join(items) or '<li>none</li>'}</ul>"


def _figures(
    before: Sequence[NodeRow], after: Sequence[NodeRow], graph: TracedGraph, key: str
) -> str:
    drawings = zip(("before", "after"), draw_both(before, after, graph.changed, key), strict=True)
    figures = [
        f"<figure><figcaption>{side}</figcaption>"
        f'<div class="scroll" role="region" tabindex="0" aria-label="{key}, {side}">{svg}</div>'
        "</figure>"
        for side, svg in drawings
    ]
    return f'<div class="sides">{"".join(figures)}</div>'


def _table(graph: TracedGraph, number: int) -> str:
    before, after = ({row.name: row for row in rows} for rows in (graph.before, graph.after))
    changed = set(graph.changed)
    names = dict.fromkeys([*before, *after])
    if not names:
        return ""
    rows = [_table_row(before.get(n), after.get(n), n in changed) for n in names]
    heads = [
        f'<th scope="col" aria-sort="none"{" data-number" if kind else ""}>'
        f'<button type="button">{name}</button></th>'
        for name, kind in _COLUMNS
    ]
    return (
        f'<label class="filter">Show rows with <input type="search" '
        f'aria-label="filter the rows of graph {number}"></label>'
        f'<div class="scroll" role="region" tabindex="0" aria-label="nodes of graph {number}">'
        f"<table><thead><tr>{''.join(heads)}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        "</div>"
    )


def _table_row(before: NodeRow | None, after: NodeRow | None, changed: bool) -> str:
    row = after or before
    assert row is not None
    sizes = [None if side is None else side.nbytes for side in (before, after)]
    cells = [
        f'<td><button type="button" class="pick">{"* " * changed}{page_text(row.name)}</button>',
        f"<td>{page_text(row.op)}",
        _cell(*(None if side is None else side.output for side in (before, after))),
        *(
            f'<td class="number" data-value="{"" if n is None else page_text(n)}">'
            f"{page_text(size_text(n))}"
            for n in sizes
        ),
        _cell(*(None if side is None else mask_text(side) for side in (before, after))),
        f"<td>{page_text(', '.join(row.readers))}",
        _cell(*(None if side is None else ", ".join(side.inputs) for side in (before, after))),
        f"<td>{page_text(row.source)}",
    ]
    kind = f' class="{row.role}{" changed" if changed else ""}"'
    return f'<tr{kind} data-node="{page_text(row.name)}">{"</td>".join(cells)}</td></tr>'


def _cell(before: str | None, after: str | None) -> str:
    """What it was, and what it became if that differs; a node that is missing has a dash."""
    if before == after:
        return f"<td>{page_text(before)}"
    shown = ["—" if side is None else page_text(side) for side in (before, after)]
    return f"<td>{shown[0]}<br>→ {shown[1]}"
