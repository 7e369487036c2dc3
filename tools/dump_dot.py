"""The graphs of `torchvm dump` for Graphviz, before and after as two clusters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchvm.tools.dump_text import mask_text, size_text
from torchvm.tools.messages import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchvm.graph_rows import NodeRow
    from torchvm.inspection import TracedGraph

__all__ = ["dump_dot"]

_FILLS = {
    "mask": "#ffd9a0",
    "builder": "#e3ccff",
    "reader": "#bfe3c6",
    "torchvm": "#cfe2ff",
}
_MASK_EDGE = ' [color="#b45f06", penwidth=2]'


def dump_dot(graphs: Sequence[TracedGraph]) -> str:
    """Write all graphs as one digraph; bold nodes were changed by a pass."""
    lines = [
        "digraph torchvm {",
        '  node [shape=box, style="rounded,filled", fillcolor="#f4f4f4", fontname="Courier"];',
    ]
    for number, graph in enumerate(graphs):
        for side in ("before", "after"):
            lines += _cluster(f"{number}_{side}", f"graph {number}, {side}", graph, side)
    return "\n".join([*lines, "}"])


def _cluster(key: str, title: str, graph: TracedGraph, side: str) -> list[str]:
    rows = graph.before if side == "before" else graph.after
    shown = {row.name: row for row in rows}
    changed = set(graph.changed)
    nodes = [f"    {_id(key, row.name)}{_style(row, row.name in changed)};" for row in rows]
    edges = [
        f"    {_id(key, name)} -> {_id(key, row.name)}"
        f"{_MASK_EDGE if shown[name].role == 'mask' else ''};"
        for row in rows
        for name in row.takes
        if name in shown
    ]
    head = [f"  subgraph {_quoted(f'cluster_{key}')} {{", f"    label={_quoted(title)};"]
    return [*head, *nodes, *edges, "  }"]


def _id(key: str, name: str) -> str:
    return _quoted(f"{key}/{name}")


def _style(row: NodeRow, changed: bool) -> str:
    size = f"{size_text(row.nbytes)} B" if row.nbytes is not None else ""
    label = "\n".join(filter(None, (row.name, row.op, row.output, size, mask_text(row))))
    parts = [f"label={_quoted(label)}"]
    if row.role in _FILLS:
        parts.append(f'fillcolor="{_FILLS[row.role]}"')
    if changed:
        parts.append("penwidth=2")
    return f" [{', '.join(parts)}]"


def _quoted(text: str) -> str:
    """A string of the language: its escapes are those of labels, so a backslash is doubled."""
    escaped = printable(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
