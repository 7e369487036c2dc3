"""The drawings of `torchvm dump`: for Graphviz, and as a page that a browser shows."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from tests import dump_targets
from torchvm.graph_rows import NodeRow, Role
from torchvm.inspection import TracedGraph, trace_graphs
from torchvm.tools.cli import app
from torchvm.tools.dump_dot import dump_dot
from torchvm.tools.dump_drawing import draw_both, near_masks
from torchvm.tools.dump_html import dump_html
from torchvm.tools.dump_target import load_target

FILE = str(Path(dump_targets.__file__))
CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def a_gib() -> TracedGraph:
    (graph,) = trace_graphs(*load_target(f"{FILE}:a_gib"), every_node=True)
    return graph


def test_dot(a_gib: TracedGraph) -> None:
    kept = {"alloc_verify_mask", "auto_functionalized_v2", "block", "getitem_4"}
    rows = tuple(row for row in a_gib.after if row.name in kept)
    graph = msgspec.structs.replace(a_gib, before=(), after=rows, changed=("block",))
    assert (
        dump_dot([graph])
        == r"""digraph torchvm {
  node [shape=box, style="rounded,filled", fillcolor="#f4f4f4", fontname="Courier"];
  subgraph "cluster_0_before" {
    label="graph 0, before";
  }
  subgraph "cluster_0_after" {
    label="graph 0, after";
    "0_after/alloc_verify_mask" [label="alloc_verify_mask\ntorchvm::alloc_verify_mask\nbool[4096] @cpu\n4,096 B\nQLEN_ONLY", fillcolor="#ffd9a0"];
    "0_after/auto_functionalized_v2" [label="auto_functionalized_v2\ntorchvm::build_tree_from_parents\n(int64[1024], int64[256, 4], int64[256, 4], int64[256, 4], bool[4096]) @cpu\n36,864 B\nwrites QLEN_ONLY", fillcolor="#e3ccff"];
    "0_after/getitem_4" [label="getitem_4\ngetitem\nbool[4096] @cpu\n4,096 B\nQLEN_ONLY", fillcolor="#ffd9a0"];
    "0_after/block" [label="block\ntorchvm_tests::block\nfloat32[256, 4] @cpu\n4,096 B\nreads TREE_BLOCK of QLEN_ONLY", fillcolor="#bfe3c6", penwidth=2];
    "0_after/alloc_verify_mask" -> "0_after/auto_functionalized_v2" [color="#b45f06", penwidth=2];
    "0_after/auto_functionalized_v2" -> "0_after/getitem_4";
    "0_after/getitem_4" -> "0_after/block" [color="#b45f06", penwidth=2];
  }
}"""  # noqa: E501
    )


def test_names_are_never_markup() -> None:
    odd = '</svg><script>x"\\N\x1b&\udce9'
    row = NodeRow(odd, odd, (odd,), odd, None, odd, role=Role.reader, mode=odd, readers=(odd,))
    graph = TracedGraph((row,), (row,), (), (), (), (), (odd,), 1)
    page = dump_html([graph], odd)
    page.encode()
    assert page.count("<script>") == 1
    assert "\x1b" not in page
    assert r"&lt;/svg&gt;&lt;script&gt;x&quot;\N\x1b&amp;\udce9" in page
    assert '[label="</svg><script>x\\"\\\\N' in dump_dot([graph])
    (found,) = trace_graphs(*load_target(f"{FILE}:odd_name"))
    page = dump_html([found], "odd")
    assert "&lt;b&gt;\\N&lt;/b&gt;&lt;!--GRAPHS--&gt;.py:3" in page
    assert "<!--" not in page.replace("<!--GRAPHS", "")


def _row(name: str, *takes: str, role: Role = Role.other) -> NodeRow:
    return NodeRow(name, "op", (), "int64[2] @cpu", 16, "", role=role, takes=takes)


def test_a_drawing_has_its_nodes_edges_and_the_same_heights_on_both_sides() -> None:
    before = [
        _row("late", role=Role.input), _row("m", role=Role.mask), _row("gone", "m"),
        _row("r", "m", "gone", "late", role=Role.reader),
    ]  # fmt: skip
    after = [before[0], before[1], _row("new", "m"), _row("r", "m", "new", "late")]
    sides = draw_both(before, after, ["r"], "k")
    places = [dict(re.findall(r'data-node="(\w+)".*?<rect x="\d+" y="(\d+)"', s)) for s in sides]
    assert set(places[0]) == {"late", "m", "gone", "r"}
    assert set(places[1]) == {"late", "m", "new", "r"}
    for name in ("late", "m", "r"):
        assert places[0][name] == places[1][name]
    tops = {name: int(y) for side in places for name, y in side.items()}
    assert sorted(tops, key=tops.__getitem__) == ["m", "gone", "new", "late", "r"]
    edges = re.findall(r'class="(edge[ \w]*)" data-from="(\w+)" data-to="([\w ]+)"', sides[0])
    assert sorted(edges) == [
        ("edge", "gone", "r"), ("edge", "late", "r"), ("edge mask", "m", "gone r"),
    ]  # fmt: skip


def test_lanes_that_run_side_by_side_do_not_share_a_column() -> None:
    rows = [_row("a"), _row("b"), _row("c", "a", "b"), _row("d", "c")]
    drawing, _ = draw_both(rows, rows, [], "k")
    lanes = dict(re.findall(r'data-from="(\w)".*?V.*?Q(\d+) ', drawing))
    assert lanes["a"] != lanes["b"]
    assert lanes["c"] in (lanes["a"], lanes["b"])


def test_big_graphs_draw_what_is_near_masks() -> None:
    chain = [_row("n0", role=Role.input)]
    chain += [_row(f"n{i}", f"n{i - 1}") for i in range(1, 1000)]
    rows = [
        *chain[:500],
        _row("mask", role=Role.mask),
        _row("read", "mask", "n499", role=Role.reader),
        *chain[500:],
    ]
    assert [row.name for row in near_masks(rows)] == ["n499", "mask", "read"]
    graph = TracedGraph(tuple(rows), tuple(rows), (), (), (), (), (), len(rows))
    page = dump_html([graph], "big")
    drawn, _, folded = page.partition("<details>")
    assert drawn.count('<g class="node') == 2 * 3
    assert folded.count('<g class="node') == 2 * len(rows)


# Runs in the page when it is loaded, and leaves what it saw as text.
_VISIT = """
<script>
window.addEventListener("load", () => {
  const section = document.querySelector("section");
  const key = (node, name) =>
    node.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true }));
  const column = (i) => [...section.querySelectorAll("tbody tr")].map((r) => r.cells[i].innerText);
  const heads = section.querySelectorAll("th button"), sorted = [];
  for (const i of [4, 4, 0]) { heads[i].click(); sorted.push(column(i)); }
  const nodes = [...section.querySelectorAll("figure svg")].slice(0, 2).map(
    (svg) => [...svg.querySelectorAll(".node")].map((n) => n.dataset.node));
  const first = section.querySelector(".node");
  first.focus();
  key(first, "ArrowDown");
  const second = document.activeElement;
  key(second, "Enter");
  const shown = document.querySelector("#about dl").innerText;
  const picked = [...section.querySelectorAll("svg .node.picked")].map((n) => n.dataset.node);
  key(second, "ArrowRight");
  const side = document.activeElement.dataset.side;
  key(document.activeElement, "Escape");
  const filter = section.querySelector("input");
  filter.value = "build_tree";
  filter.dispatchEvent(new Event("input", { bubbles: true }));
  const left = [...section.querySelectorAll("tbody tr")].filter((r) => !r.hidden).length;
  const style = (item) => getComputedStyle(item);
  const outcome = { errors, sorted, nodes, shown, picked, side, left,
    closed: document.getElementById("about").hidden, width: window.innerWidth,
    wide: document.documentElement.scrollWidth, page: style(document.body).backgroundColor,
    mask: style(section.querySelector(".node.mask rect")).fill,
    text: style(section.querySelector("svg text")).fill,
    loaded: performance.getEntriesByType("resource").map((entry) => entry.name) };
  document.title = "outcome";
  document.body.replaceChildren(JSON.stringify(outcome));
});
</script>
"""
_LISTEN = """
<script>
const errors = [];
window.addEventListener("error", (event) => errors.push(String(event.message)));
document.addEventListener("securitypolicyviolation", (event) => errors.push(event.blockedURI));
</script>
"""


# A window is never as narrow as a phone; a frame is.
_FRAME = """
<html style="color-scheme: light dark"><body><iframe style="width: 360px; height: 700px; border: 0"
 srcdoc="{}" onload="const seen = this.contentDocument.body.innerText;
 document.body.replaceChildren(seen)"></iframe></body></html>
"""


def _visited(page: str, folder: Path, *options: str, narrow: bool = False) -> dict[str, Any]:
    """Open a page in a browser and say what it saw."""
    assert CHROMIUM is not None
    path = folder / "page.html"
    page = page.replace("<title>", f"{_LISTEN}<title>", 1).replace("</body>", f"{_VISIT}</body>")
    path.write_text(_FRAME.format(escape(page)) if narrow else page)
    fixed = [
        "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
        f"--user-data-dir={folder / 'profile'}", "--dump-dom",
    ]  # fmt: skip
    done = subprocess.run(
        [CHROMIUM, *fixed, *options, path.as_uri()],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr
    body = re.search(r"<body>(.*)</body>", done.stdout, re.DOTALL)
    assert body is not None, done.stdout
    seen: dict[str, Any] = json.loads(body[1].replace("&gt;", ">").replace("&amp;", "&"))
    return seen


def _luminance(color: str) -> float:
    red, green, blue = (int(part) for part in re.findall(r"\d+", color)[:3])
    return (0.299 * red + 0.587 * green + 0.114 * blue) / 255


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on PATH")
def test_a_browser_shows_the_page(a_gib: TracedGraph, tmp_path: Path) -> None:
    page = dump_html([a_gib], f"{FILE}:a_gib")
    light = _visited(page, tmp_path, "--window-size=1280,900")
    assert light["errors"] == light["loaded"] == []
    up, down, names = light["sorted"]
    sizes = [int(text.replace(",", "")) for text in up if text]
    assert sizes == sorted(sizes) == sorted(sizes, reverse=True)[::-1]
    assert max(sizes) == 36_864
    assert [text for text in down if text] == [text for text in up if text][::-1] != up
    assert up[-1] == down[-1] == ""  # The output node has no bytes.
    assert names[0].strip("* ") == "alloc_verify_mask"
    drawn = {row.name for row in a_gib.before}
    assert [set(side) for side in light["nodes"]] == [drawn, drawn]
    assert light["picked"] == [light["nodes"][0][1]] * 2
    assert light["picked"][0] in light["shown"]
    assert (light["side"], light["left"], light["closed"]) == ("graph 0-after", 1, True)
    assert _luminance(light["page"]) > 0.9 > 0.2 > _luminance(light["text"])
    dark = _visited(page, tmp_path, "--blink-settings=preferredColorScheme=0", narrow=True)
    assert dark["errors"] == []
    assert dark["wide"] <= dark["width"] == 360
    assert _luminance(dark["page"]) < 0.2 < 0.8 < _luminance(dark["text"])
    assert dark["mask"] != light["mask"]


def test_the_command_writes_the_page_and_nothing_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    done = CliRunner().invoke(app, ["dump", f"{FILE}:a_gib", "--html", str(path)])
    assert done.stdout == f"{path}: 1 graph, 1 mask, 0 findings\n"
    page = path.read_text()
    assert page.startswith("<!doctype html>")
    assert not re.search(r'(?:src|href)="(?!data:)', page)
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    done = CliRunner().invoke(app, ["dump", f"{FILE}:dynamic_break", "--dot"])
    assert done.stdout.count("subgraph") == 4
    done = CliRunner().invoke(app, ["dump", f"{FILE}:broken", "--html", str(tmp_path / "no.html")])
    assert done.exit_code == 1
    assert [p.name for p in tmp_path.iterdir()] == ["out.html"]
