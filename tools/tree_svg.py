"""The picture that torchvm tree --svg draws: a row a node, from the tree to its mask bytes."""

from __future__ import annotations

import itertools
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from rich.cells import cell_len

from torchvm.tools.messages import CommandError
from torchvm.tools.tree_text import UNICODE, cut, heading, label

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchvm.tools.tree_layout import Node, Picture

__all__ = ["as_svg"]

_MOST_NODES = 256
_ROW = 24
_MARGIN = 24
_RADIUS = 9
_GAP = 26
_PREFIX = 58
# Width of a character of 12 and of 10 pixels in the widest of the usual monospaced fonts.
_CHARACTER = 7.3
_SMALL = 6.1
_LONGEST_LABEL = 24
_DEEP = 12
_LANE = 5

_STYLE = """
svg { color-scheme: light dark; }
text { font: 12px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  fill: #1f2328; white-space: pre; }
.paper { fill: #ffffff; }
.stripe { fill: #f3f5f8; }
.taken { fill: #dff3e4; }
.small { font-size: 10px; }
.tiny { font-size: 7px; }
.muted { fill: #59636e; }
.title { font-size: 14px; font-weight: bold; }
.right { text-anchor: end; }
.middle { text-anchor: middle; }
.one { fill: #2f6fd6; }
.zero { fill: none; stroke: #c4ccd6; }
.prefix { fill: #a9c6f5; }
.token { fill: none; stroke: #59636e; stroke-width: 2; }
.sibling { fill: none; stroke: #c2570c; stroke-width: 2; stroke-dasharray: 3 2; }
.node { fill: #ffffff; stroke: #59636e; stroke-width: 1.4; }
.loose { stroke-dasharray: 3 2; }
.path { stroke: #1a7f37; }
.node.path { fill: #1a7f37; }
text.on { fill: #ffffff; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .paper { fill: #0d1117; }
  .stripe { fill: #151b23; }
  .taken { fill: #12301c; }
  .muted { fill: #9aa4b0; }
  .one { fill: #4d8df0; }
  .zero { stroke: #3d444d; }
  .prefix { fill: #27446f; }
  .token { stroke: #9aa4b0; }
  .sibling { stroke: #f0883e; }
  .node { fill: #0d1117; stroke: #9aa4b0; }
  .path { stroke: #3fb950; }
  .node.path { fill: #238636; }
}
"""


class _Column(NamedTuple):
    """A column of text."""

    head: tuple[str, str]
    cells: list[str]
    is_number: bool

    @property
    def width(self) -> float:
        texts = [cell_len(cell) * _CHARACTER for cell in self.cells]
        return max(*texts, *(len(head) * _SMALL for head in self.head))


class _Canvas:
    """Elements in the order they are painted."""

    def __init__(self) -> None:
        self.elements: list[str] = []
        self.right = 0.0

    def add(self, tag: str, kind: str, **attributes: float | str) -> None:
        """Add a shape."""
        written = "".join(f' {name}="{_number(value)}"' for name, value in attributes.items())
        self.elements.append(f'<{tag} class="{kind}"{written}/>')

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        """Add a text, its baseline at y."""
        kind_of = f' class="{kind}"' if kind else ""
        self.elements.append(
            f'<text{kind_of} x="{_number(x)}" y="{_number(y)}">{escape(text)}</text>'
        )
        size = _SMALL if "small" in kind else _CHARACTER * (1.2 if "title" in kind else 1)
        if "right" not in kind and "middle" not in kind:
            self.right = max(self.right, x + cell_len(text) * size)


def as_svg(picture: Picture) -> str:
    """Draw the picture; what comes from models and users is escaped.

    Raises:
        CommandError: for more nodes than a browser shows with ease.
    """
    if picture.num_draft_tokens > _MOST_NODES:
        raise CommandError(
            f"--svg must be of at most {_MOST_NODES} nodes, got {picture.num_draft_tokens:,}"
        )
    canvas = _Canvas()
    canvas.text(_MARGIN, 30, heading(picture), "title")
    top = 46.0
    if picture.source is not None:
        canvas.text(_MARGIN, 48, picture.source, "small muted")
        top += 14
    first = top + 46
    rows = [first + _ROW * node.node for node in picture.nodes]
    marks = len(canvas.elements)
    left = _draw_tree(canvas, picture, rows)
    left = _draw_columns(canvas, picture, rows, left + _GAP)
    left = _draw_mask(canvas, picture, rows, left + _GAP)
    left = _draw_bytes(canvas, picture, rows, left + _GAP)
    bottom = _draw_legend(canvas, picture, rows[-1] + _ROW)
    width = max(left, canvas.right) + _MARGIN
    canvas.elements[marks:marks] = _bands(picture, rows, width)
    return _wrap(canvas, picture, width, bottom + _MARGIN)


def _draw_tree(canvas: _Canvas, picture: Picture, rows: list[float]) -> float:
    """Draw nodes by depth from left to right; return where the drawing ends."""
    nodes = picture.nodes
    children = _children(nodes)
    lanes = _lanes(picture, children)
    columns = _column_places(picture, lanes)
    places = [columns[node.position - picture.seq_len] for node in nodes]
    for parent, listed in children.items():
        lane = places[parent] + _RADIUS + _LANE * (lanes[parent] + 1)
        first = listed[0]
        canvas.add("path", "token", d=f"M{places[parent]} {rows[parent]}H{lane}V{rows[first]}"
                   f"H{places[first]}")  # fmt: skip
        for above, child in itertools.pairwise(listed):
            canvas.add("path", "sibling", d=f"M{lane} {rows[above]}V{rows[child]}")
            canvas.add("path", "sibling", d=f"M{lane} {rows[child]}H{places[child]}")
    for node, x, y in zip(nodes, places, rows, strict=True):
        loose = node.node > 0 and node.hangs_from is None
        kind = "node" + " path" * node.accepted + " loose" * loose
        canvas.add("circle", kind, cx=x, cy=y, r=_RADIUS)
        size = "small" if node.node < 100 else "tiny"
        canvas.text(x, y + 3.5, str(node.node), f"{size} middle" + " on" * node.accepted)
    canvas.text(_MARGIN, rows[0] - 24, "tree", "small muted")
    return columns[-1] + _RADIUS


def _children(nodes: list[Node]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for node in nodes:
        if node.hangs_from is not None:
            found.setdefault(node.hangs_from, []).append(node.node)
    return found


def _lanes(picture: Picture, children: dict[int, list[int]]) -> dict[int, int]:
    """Give each parent a lane for its vertical line, so that no two lie on each other.

    Later parents come first and so further left: where nodes are numbered level by level, no
    line crosses another.
    """
    lanes: dict[int, int] = {}
    ends: dict[tuple[int, int], int] = {}
    for parent in sorted(children, reverse=True):
        depth = picture.nodes[parent].position
        lane = 0
        while ends.get((depth, lane), picture.num_draft_tokens) <= children[parent][-1]:
            lane += 1
        ends[depth, lane] = parent
        lanes[parent] = lane
    return lanes


def _column_places(picture: Picture, lanes: dict[int, int]) -> list[float]:
    """Where the nodes of each depth stand."""
    deepest = max(node.position for node in picture.nodes) - picture.seq_len
    counts = [0] * (deepest + 1)
    for parent, lane in lanes.items():
        depth = picture.nodes[parent].position - picture.seq_len
        counts[depth] = max(counts[depth], lane + 1)
    spare = 12 if deepest <= _DEEP else 0
    places = [float(_MARGIN + _RADIUS)]
    for count in counts[:-1]:
        places.append(places[-1] + 2 * _RADIUS + _LANE * (count + 1) + spare)
    return places


def _draw_columns(canvas: _Canvas, picture: Picture, rows: list[float], left: float) -> float:
    """Write what is known of each node."""
    for column in _columns(picture.nodes):
        if not any(column.cells):
            continue
        x = left + column.width if column.is_number else left
        kind = " right" if column.is_number else ""
        for line, head in enumerate(column.head):
            canvas.text(x, rows[0] - 36 + 12 * line, head, f"small muted{kind}")
        for y, cell in zip(rows, column.cells, strict=True):
            canvas.text(x, y + 4, cell, kind.strip())
        left += column.width + 18
    return left - 18


def _columns(nodes: list[Node]) -> list[_Column]:
    def numbers(first: str, second: str, read: Callable[[Node], int]) -> _Column:
        return _Column((first, second), [str(read(node)) for node in nodes], is_number=True)

    labels = [cut(label(node, repr), UNICODE, _LONGEST_LABEL) for node in nodes]
    has_tokens = nodes[0].token is not None
    return [
        numbers("", "node", lambda node: node.node),
        _Column(("", "token" if has_tokens else "path"), labels, is_number=False),
        numbers("", "position", lambda node: node.position),
        numbers("retrieve_", "index", lambda node: node.retrieve_index),
        numbers("retrieve_", "next_token", lambda node: node.retrieve_next_token),
        numbers("retrieve_", "next_sibling", lambda node: node.retrieve_next_sibling),
    ]


def _draw_mask(canvas: _Canvas, picture: Picture, rows: list[float], left: float) -> float:
    """Draw the prefix as a strip and the tree block cell by cell."""
    n = picture.num_draft_tokens
    digits = len(str(n - 1))
    cell = _ROW - 4 if digits < 3 else digits * _SMALL + 4
    if picture.seq_len:
        canvas.text(left, rows[0] - 36, "prefix", "small muted")
        canvas.text(left, rows[0] - 24, f"L = {picture.seq_len:,}", "small muted")
        width = max(_PREFIX, len(f"L = {picture.seq_len:,}") * _SMALL)
        for y in rows:
            canvas.add("rect", "prefix", x=left, y=y - 10, width=width, height=20, rx=2)
        left += width + 8
    head = "mask: column"
    canvas.text(left, rows[0] - 36, head, "small muted")
    for node, y in zip(picture.nodes, rows, strict=True):
        canvas.text(left + (cell + 2) * node.node + cell / 2, rows[0] - 20,
                    str(node.node), "small muted middle")  # fmt: skip
        seen = set(node.attends)
        for j in range(n):
            kind = "one" if j in seen else "zero"
            inset = 0 if kind == "one" else 0.5
            canvas.add("rect", kind, x=left + (cell + 2) * j + inset, y=y - 10 + inset,
                       width=cell - 2 * inset, height=20 - 2 * inset, rx=2)  # fmt: skip
    return left + max((cell + 2) * n, len(head) * _SMALL)


def _draw_bytes(canvas: _Canvas, picture: Picture, rows: list[float], left: float) -> float:
    """Write each row's packed bytes, where they were asked for."""
    for layout in picture.layouts:
        if layout.prefix_bytes == 0 and layout.mode.endswith("PACKING"):
            canvas.text(left, rows[0] - 36, "packed row", "small muted")
            canvas.text(left, rows[0] - 24, "in hex", "small muted")
            for row, y in zip(layout.rows, rows, strict=True):
                canvas.text(left, y + 4, row.tree)
            return left + len(layout.rows[0].tree) * _CHARACTER
    return left - _GAP


def _draw_legend(canvas: _Canvas, picture: Picture, y: float) -> float:
    prefix = "; every row attends the prefix" if picture.seq_len else ""
    lines = [
        f"a filled cell: the row's node attends the column's{prefix}",
        "whole line: retrieve_next_token, the first child; dashed: on to retrieve_next_sibling",
    ]
    if picture.accepted is not None:
        path = " ".join(map(str, picture.accepted))
        lines.append(f"green: accepted {path} ({picture.accepted_by})")
    lines += [f"note: {note}" for note in picture.notes]
    for line in lines:
        y += 16
        canvas.text(_MARGIN, y, line, "small muted")
    return y


def _bands(picture: Picture, rows: list[float], width: float) -> list[str]:
    """Tint every second row, and the accepted ones."""
    canvas = _Canvas()
    for node, y in zip(picture.nodes, rows, strict=True):
        if node.accepted or node.node % 2 == 0:
            kind = "taken" if node.accepted else "stripe"
            canvas.add("rect", kind, x=_MARGIN / 2, y=y - _ROW / 2, width=width - _MARGIN,
                       height=_ROW)  # fmt: skip
    return canvas.elements


def _wrap(canvas: _Canvas, picture: Picture, width: float, height: float) -> str:
    size = f'width="{_number(width)}" height="{_number(height)}"'
    body = "\n".join(canvas.elements)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size} '
        f'viewBox="0 0 {_number(width)} {_number(height)}">\n'
        f"<title>{escape(heading(picture))}</title>\n<style>{_STYLE}</style>\n"
        f'<rect class="paper" width="100%" height="100%"/>\n{body}\n</svg>\n'
    )


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.1f}".rstrip("0").rstrip(".")
