"""What torchvm bench prints and draws."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torchvm.tools.bars import Bar, Panel
from torchvm.tools.quantities import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchvm.tools.bench.measure import Row, Spread

__all__ = ["Measured", "as_dict", "differences", "group_text", "machine_text", "panels"]


class Measured(NamedTuple):
    """One group of rows."""

    name: str
    title: str
    notes: tuple[str, ...]
    rows: tuple[Row, ...]


def machine_text(facts: dict[str, Any]) -> str:
    """Two lines: the machine, and what ran on it."""
    pinned = f"kept on core {facts['core']}" if facts["core"] is not None else "on any core"
    commit = "no checkout"
    if facts["commit"] is not None:
        commit = f"commit {facts['commit'][:12]}" + (", changed since" if facts["dirty"] else "")
    versions = ", ".join(
        f"{name} {facts[name]}" for name in ("torch", "numba", "numpy", "python") if facts[name]
    )
    return (
        f"{facts['cpu']}, {facts['cores']} cores, {format_bytes(facts['memory_bytes'])}, "
        f"load {facts['load_average']:.2f}; 1 thread, {pinned}\n"
        f"torchvm {facts['torchvm']} ({commit}), {versions}"
    )


def group_text(group: Measured) -> str:
    """Tables of medians, half the distance of the quartiles, and ratios to the first contender."""
    parts = [group.title]
    for what, rows in _by_work(group).items():
        parts.append("\n" + _table(what, rows))
    parts += ["", *(f"  {note}" for note in group.notes)]
    return "\n".join(parts).rstrip()


def _by_work(group: Measured) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in group.rows:
        found.setdefault(row.what, []).append(row)
    return found


def _table(what: str, rows: Sequence[Row]) -> str:
    """Contenders across and sizes down, or the other way where that is narrower."""
    names = list(dict.fromkeys(name for row in rows for name in (*row.times, *row.differing)))
    names.sort(key=lambda name: name != rows[0].base)
    cells = [[_cell(row, name) for name in names] for row in rows]
    sizes = [row.size for row in rows]
    across, down = names, sizes
    if len(names) > len(sizes):
        cells = [list(column) for column in zip(*cells, strict=True)]
        across, down = sizes, names
    columns = [_aligned(title, [line[i] for line in cells]) for i, title in enumerate(across)]
    width = max(map(len, down))
    lines = [
        "  " + "   ".join([name.ljust(width), *parts]).rstrip()
        for name, *parts in zip(["", *down], *columns, strict=True)
    ]
    unit = rows[0].unit.replace("us ", "microseconds ")
    head = f"{what}: {unit} (x: in multiples of {rows[0].base})"
    facts = [
        f"  {row.size}: " + ", ".join(f"{name} {_number(value)}" for name, value in known.items())
        for row in rows
        if (known := row.facts)
    ]
    return "\n".join([head, *lines, *facts])


def _cell(row: Row, name: str) -> tuple[str, str, str]:
    """Median, spread and ratio."""
    if name in row.differing:
        return "differs", "", ""
    if name not in row.times:
        return "", "", ""
    spread, ratio = row.times[name], row.ratio(name)
    shown = "" if ratio is None or name == row.base else f"{_ratio(ratio)} x"
    return _number(spread.median), _relative(spread), shown


def _ratio(value: float) -> str:
    return _number(value) if value > 0.0995 else f"{value:.2g}"


def _aligned(title: str, cells: list[tuple[str, str, str]]) -> list[str]:
    """A column of equally wide texts under its title."""
    widths = [max(map(len, part)) for part in zip(*cells, strict=True)]
    texts = [
        "  ".join(text.rjust(width) for text, width in zip(cell, widths, strict=True) if width)
        for cell in cells
    ]
    width = max(map(len, [title, *texts]))
    return [text.rjust(width) for text in [title, *texts]]


def _relative(spread: Spread) -> str:
    if spread.low is None or spread.high is None:
        return ""
    return f"±{50 * (spread.high - spread.low) / spread.median:.0f} %"


def _number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def differences(group: Measured) -> list[str]:
    """A line for every contender that no ratio is given of."""
    return [
        f"no ratio: {name} differs from {row.reference} in {row.what}, {row.size}"
        for row in group.rows
        for name in row.differing
    ]


def as_dict(group: Measured) -> dict[str, Any]:
    """The rows as plain values."""
    rows = [
        {
            "what": row.what,
            "size": row.size,
            "unit": row.unit,
            "base": row.base,
            "reference": row.reference,
            "times": {
                name: {**spread._asdict(), "ratio": row.ratio(name)}
                for name, spread in row.times.items()
            },
            "differing": list(row.differing),
            "facts": row.facts,
        }
        for row in group.rows
    ]
    return {"title": group.title, "notes": list(group.notes), "rows": rows}


def panels(group: Measured) -> list[Panel]:
    """Bars of every size, on one axis for each kind of work."""
    found = []
    for what, rows in _by_work(group).items():
        kept = [row for row in rows if row.times]
        groups = tuple((row.size, tuple(_bars(row))) for row in kept)
        if groups:
            unit = kept[0].unit.replace("us ", "microseconds ")
            title = f"{what} (x: in multiples of {kept[0].base})"
            found.append(Panel(title, unit, lambda value: f"{value:,.10g}", groups))
    return found


def _bars(row: Row) -> list[Bar]:
    bars = []
    for name, spread in row.times.items():
        ratio = row.ratio(name)
        times = "" if ratio is None or name == row.base else f"  ({_ratio(ratio)} x)"
        text = f"{_number(spread.median)}{times}"
        bars.append(Bar(name, spread.median, text, spread.low, spread.high))
    return bars
