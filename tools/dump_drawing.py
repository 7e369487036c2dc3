"""A graph as SVG: a column of nodes in the order they run, and lanes that carry their results.

A column stays legible at any size, and the same node stands at the same height before and after.
"""

from __future__ import annotations

from difflib import SequenceMatcher
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from torchvm.tools.dump_text import mask_text, size_text
from torchvm.tools.messages import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torchvm.graph_rows import NodeRow

__all__ = ["draw_both", "near_masks", "page_text"]

_BOX, _LINE, _PAD, _GAP, _LANE, _MARGIN = 440, 17, 7, 12, 9, 8
_CHARACTERS = 58
"""Of a line in a box: monospace letters of 12 px."""
_RADIUS = 4
_OWN = ("mask", "builder", "reader", "torchvm")


class _Lane(NamedTuple):
    """Where the result of a node is used, top to bottom."""

    source: str
    users: tuple[str, ...]
    is_mask: bool


def page_text(text: object) -> str:
    """Escape text for HTML and SVG; what cannot be printed is shown as Python writes it."""
    return escape(printable(str(text)))


def near_masks(rows: Sequence[NodeRow]) -> tuple[NodeRow, ...]:
    """Keep masks, their builders and readers, torchvm's ops, and the neighbours of all of them."""
    own = {row.name for row in rows if row.role in _OWN}
    taken = {name for row in rows if row.name in own for name in row.takes}
    return tuple(r for r in rows if r.name in own | taken or not own.isdisjoint(r.takes))


def draw_both(
    before: Sequence[NodeRow], after: Sequence[NodeRow], changed: Iterable[str], key: str
) -> tuple[str, str]:
    """Draw a graph before and after the passes, each node at the same height in both.

    Args:
        before: rows of the drawn nodes.
        after: likewise.
        changed: names of nodes to be marked.
        key: tells the drawings of a page apart.
    """
    sides = [{row.name: row for row in rows} for rows in (before, after)]
    tops, height = _tops(_order(before, after), sides)
    marked = frozenset(changed)
    first, second = (
        _svg(side, tops, height, marked, f"{key}-{name}")
        for side, name in zip(sides, ("before", "after"), strict=True)
    )
    return first, second


def _order(before: Sequence[NodeRow], after: Sequence[NodeRow]) -> list[str]:
    """Merge the two orders, and put each input right above the first node that takes it."""
    old, new = [row.name for row in before], [row.name for row in after]
    merged: list[str] = []
    for _, i, j, k, m in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        merged += dict.fromkeys([*old[i:j], *new[k:m]])
    merged = list(dict.fromkeys(merged))
    places = {name: place for place, name in enumerate(merged)}
    first: dict[str, int] = {}
    for row in (*before, *after):
        for name in row.takes:
            first[name] = min(first.get(name, len(merged)), places[row.name])
    inputs = {row.name for row in (*before, *after) if row.role == "input"}
    sunk = {name: first[name] - 0.5 for name in inputs if name in first}
    return sorted(merged, key=lambda name: (sunk.get(name, places[name]), places[name]))


def _tops(
    order: Sequence[str], sides: Sequence[Mapping[str, NodeRow]]
) -> tuple[dict[str, int], int]:
    """Where each box begins, and the height of all."""
    tops, top = {}, _MARGIN
    for name in order:
        tops[name] = top
        top += max(_height(side[name]) for side in sides if name in side) + _GAP
    return tops, top - _GAP + _MARGIN


def _height(row: NodeRow) -> int:
    return len(_lines(row)) * _LINE + 2 * _PAD


def _lines(row: NodeRow) -> list[str]:
    size = f"{size_text(row.nbytes)} B" if row.nbytes is not None else ""
    about = " ".join(filter(None, (f"%{row.name}", row.output)))
    whole = f"{about} {size}".strip()
    # A size is never cut off.
    result = [whole] if len(whole) <= _CHARACTERS else [about, size]
    return [row.op, *filter(None, (*result, mask_text(row)))]


def _svg(
    side: Mapping[str, NodeRow],
    tops: Mapping[str, int],
    height: int,
    changed: frozenset[str],
    key: str,
) -> str:
    lanes = _lanes(side, tops)
    columns = _columns(lanes, tops)
    left = _MARGIN + _LANE * (max(columns, default=-1) + 2)
    width = left + _BOX + _MARGIN
    edges = [
        _edge(lane, left - _LANE * (column + 1), left, tops)
        for lane, column in zip(lanes, columns, strict=True)
    ]
    names = sorted(side, key=tops.__getitem__)
    boxes = [_box(side[name], left, tops[name], name in changed, key) for name in names]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="group" aria-label="{page_text(key)}">'
        f"{''.join(edges)}{''.join(boxes)}</svg>"
    )


def _lanes(side: Mapping[str, NodeRow], tops: Mapping[str, int]) -> list[_Lane]:
    users: dict[str, list[str]] = {}
    for row in sorted(side.values(), key=lambda row: tops[row.name]):
        for name in row.takes:
            if name in side:
                users.setdefault(name, []).append(row.name)
    return [_Lane(name, tuple(found), side[name].role == "mask") for name, found in users.items()]


def _columns(lanes: Sequence[_Lane], tops: Mapping[str, int]) -> list[int]:
    """Give each lane the nearest free column: masks first, then the short before the long."""
    taken: list[list[tuple[int, int]]] = []
    columns: dict[int, int] = {}

    def urgency(index: int) -> tuple[bool, int]:
        lane = lanes[index]
        return not lane.is_mask, tops[lane.users[-1]] - tops[lane.source]

    for index in sorted(range(len(lanes)), key=urgency):
        start, end = tops[lanes[index].source], tops[lanes[index].users[-1]]
        free = (
            c for c, spans in enumerate(taken) if all(end <= a or b <= start for a, b in spans)
        )
        column = next(free, len(taken))
        if column == len(taken):
            taken.append([])
        taken[column].append((start, end))
        columns[index] = column
    return [columns[index] for index in range(len(lanes))]


def _edge(lane: _Lane, x: int, left: int, tops: Mapping[str, int]) -> str:
    """A line down from the source's box, and an arrow into each user's."""
    start, r = tops[lane.source] + _PAD + _LINE + 4, _RADIUS
    ends = [tops[user] + _PAD + 8 for user in lane.users]
    path = f"M{left} {start}H{x + r}Q{x} {start} {x} {start + r}V{ends[-1] - r}"
    arrows = "".join(
        f"M{x} {end - r}Q{x} {end} {x + r} {end}H{left - 2}m-4-3l4 3l-4 3" for end in ends
    )
    kind = "edge mask" if lane.is_mask else "edge"
    ends_at = page_text(" ".join(lane.users))
    return (
        f'<path class="{kind}" data-from="{page_text(lane.source)}" data-to="{ends_at}" '
        f'd="{path}{arrows}"/>'
    )


def _box(row: NodeRow, left: int, top: int, changed: bool, key: str) -> str:
    op, *lines = _lines(row)
    star = "* " if changed else ""
    title = "\n".join([f"{star}{op}", *lines, row.source])
    classes = f"node {row.role}{' changed' if changed else ''}"
    texts = [
        f'<text x="{left + 10}" y="{top + _PAD + 12 + i * _LINE}"{_weight(i)}>{_cut(line)}</text>'
        for i, line in enumerate([star + op, *lines])
    ]
    shown = "".join(f"{page_text(line)}&#10;" for line in title.split("\n") if line)
    return (
        f'<g class="{classes}" role="button" tabindex="-1" data-node="{page_text(row.name)}" '
        f'data-side="{page_text(key)}"><title>{shown}</title>'
        f'<rect x="{left}" y="{top}" width="{_BOX}" height="{_height(row)}" rx="6"/>'
        f"{''.join(texts)}</g>"
    )


def _weight(line: int) -> str:
    return ' class="op"' if line == 0 else ""


def _cut(text: str) -> str:
    return page_text(text if len(text) <= _CHARACTERS else f"{text[: _CHARACTERS - 1]}…")
