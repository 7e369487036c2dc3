"""The picture of torchvm tree: nothing overlaps or is cut, and nothing in it is markup."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import TYPE_CHECKING, NamedTuple
from xml.etree import ElementTree as ET

import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from torchvm.tools.cli import app

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = ["<b>", "&amp;", '"', "\x01", "]]>", "\u202e", "日本語" * 9, "[red]", "</svg>"]


def _random_tree(n: int, *, level_order: bool) -> list[int]:
    rng = random.Random(n)  # noqa: S311
    parents = [rng.randrange(max(0, i - 12), i) for i in range(1, n)]
    return [-1, *(sorted(parents) if level_order else parents)]


SHAPES = {
    "root": [-1],
    "pair": [-1, 0],
    "star of 64": [-1] + [0] * 63,
    "chain of 60": list(range(-1, 59)),
    "64, level by level": _random_tree(64, level_order=True),
    "64 in any order": _random_tree(64, level_order=False),
    "loose": [-1, -1, 1, 9, 2, 4, 0, 8, 3],
    "101 nodes": _random_tree(101, level_order=True),
}


class Box(NamedTuple):
    """A rectangle that something takes."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box) -> bool:
        return (
            self.left < other.right and other.left < self.right
            and self.top < other.bottom and other.top < self.bottom
        )  # fmt: skip


@pytest.fixture(params=SHAPES)
def picture(request: pytest.FixtureRequest, tmp_path: Path) -> ET.Element:
    parents = SHAPES[request.param]
    file = tmp_path / "tree.svg"
    options = ["--seq-len", "1Mi", "--mode", "packed", "--svg", str(file), "--only", "tree"]
    texts = json.dumps([TEXTS[i % len(TEXTS)] for i in range(len(parents))])
    listed = ",".join(map(str, parents))
    done = CliRunner().invoke(app, ["tree", "--parents", listed, "--tokens", texts, *options])
    assert done.exit_code == 0, done.exception
    return ET.parse(file).getroot()  # noqa: S314 - our own file


def _named(picture: ET.Element, tag: str) -> list[ET.Element]:
    return picture.findall(f"{{http://www.w3.org/2000/svg}}{tag}")


def _numbers(element: ET.Element, *names: str) -> list[float]:
    return [float(element.attrib[name]) for name in names]


def _text_box(element: ET.Element) -> Box:
    """What a monospaced text takes whose characters are 0.6 em wide, as most fonts have them."""
    kind = element.attrib.get("class", "").split()
    size = 14 if "title" in kind else 10 if "small" in kind else 7 if "tiny" in kind else 12
    width = 0.602 * size * cell_len(element.text or "")
    x, y = _numbers(element, "x", "y")
    left = x - width if "right" in kind else x - width / 2 if "middle" in kind else x
    return Box(left, y - 0.75 * size, left + width, y + 0.2 * size)


def _circle_box(element: ET.Element) -> Box:
    x, y, radius = _numbers(element, "cx", "cy", "r")
    return Box(x - radius, y - radius, x + radius, y + radius)


def test_nothing_overlaps_or_is_cut(picture: ET.Element) -> None:
    width, height = _numbers(picture, "width", "height")
    labels = [text for text in _named(picture, "text") if text.text]
    in_nodes = {"middle"}
    free = [_text_box(t) for t in labels if not in_nodes & set(t.attrib.get("class", "").split())]
    columns = [_text_box(t) for t in labels if t.attrib.get("class") == "small muted middle"]
    circles = [_circle_box(circle) for circle in _named(picture, "circle")]
    cells = [
        Box(x, y, x + w, y + h)
        for rect in _named(picture, "rect")
        if rect.attrib["class"] in ("one", "zero", "prefix")
        for x, y, w, h in [_numbers(rect, "x", "y", "width", "height")]
    ]
    for group in (free + columns, circles, cells):
        for box in group:
            assert box.left >= 0
            assert box.top >= 0
            assert box.right <= width
            assert box.bottom <= height
    for one, other in itertools.combinations([*free, *columns, *circles], 2):
        assert not one.meets(other), (one, other)
    for text in [*free, *columns]:
        assert not any(text.meets(cell) for cell in cells), text
    inside = [_text_box(t) for t in labels if "middle" in t.attrib.get("class", "").split()]
    numbers = [box for box in inside if box not in columns]
    assert len(numbers) == len(circles)
    for number, circle in zip(numbers, circles, strict=True):
        assert circle.left < number.left
        assert number.right < circle.right


def _segments(path: str) -> list[tuple[float, float, float, float]]:
    """Lines of a path of M, H and V."""
    found = []
    x = y = 0.0
    for command, arguments in re.findall(r"([MHV])([-\d. ]+)", path):
        numbers = [float(number) for number in arguments.split()]
        to_x = numbers[0] if command in "MH" else x
        to_y = numbers[-1] if command in "MV" else y
        if command != "M":
            found.append((x, y, to_x, to_y))
        x, y = to_x, to_y
    return found


def test_lines_of_two_parents_never_lie_on_each_other(picture: ET.Element) -> None:
    """A vertical line belongs to one list of children, and passes no other node."""
    circles = [_circle_box(circle) for circle in _named(picture, "circle")]
    spans: list[tuple[float, float, float]] = []
    for path in _named(picture, "path"):
        for x, y, to_x, to_y in _segments(path.attrib["d"]):
            if x == to_x:
                assert not any(c.left < x < c.right and c.top < to_y and y < c.bottom
                               for c in circles)  # fmt: skip
                spans.append((x, y, to_y))
    for one, other in itertools.combinations(spans, 2):
        assert one[0] != other[0] or one[2] <= other[1] or other[2] <= one[1], (one, other)


def test_there_is_a_line_to_each_linked_node(picture: ET.Element) -> None:
    ends = set()
    for path in _named(picture, "path"):
        *_, (_, _, x, y) = _segments(path.attrib["d"])
        ends.add((x, y))
    places = {tuple(_numbers(circle, "cx", "cy")) for circle in _named(picture, "circle")}
    loose = {
        tuple(_numbers(circle, "cx", "cy"))
        for circle in _named(picture, "circle")
        if "loose" in circle.attrib["class"]
    }
    root = tuple(_numbers(_named(picture, "circle")[0], "cx", "cy"))
    assert places - loose - {root} <= ends


def test_it_is_for_light_and_dark_and_stands_alone(tmp_path: Path) -> None:
    file = tmp_path / "tree.svg"
    CliRunner().invoke(
        app, ["tree", "--parents", "-1,0,0", "--accepted", "0,2", "--svg", str(file)]
    )
    text = file.read_text()
    light, dark = text.split("@media (prefers-color-scheme: dark)")
    for kind in (".paper", ".node", ".one", ".path", ".sibling", ".token", ".taken"):
        assert f"{kind} {{" in light
        assert f"{kind} {{" in dark
    assert not re.search(r"href|url\(|<script|<image|@import", text)
    assert text.count("http") == 1
    kinds = [circle.attrib["class"] for circle in _named(ET.fromstring(text), "circle")]  # noqa: S314
    assert kinds == ["node path", "node", "node path"]


def test_texts_are_what_they_are(tmp_path: Path) -> None:
    file = tmp_path / "tree.svg"
    listed = ",".join(["-1"] + ["0"] * (len(TEXTS) - 1))
    done = CliRunner().invoke(
        app, ["tree", "--parents", listed, "--tokens", json.dumps(TEXTS), "--svg", str(file)]
    )
    assert done.exit_code == 0
    root = ET.parse(file).getroot()  # noqa: S314 - our own file
    shown = [text.text for text in _named(root, "text")]
    for text in TEXTS[:6] + TEXTS[7:]:
        assert repr(text) in shown
    assert f"'{('日本語' * 9)[:11]}…" in shown
