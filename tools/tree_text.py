"""What torchvm tree prints: a tree, its mask as a grid, its links, the walk, the bytes."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from rich.cells import cell_len, set_cell_size

from torchvm.tools.quantities import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

    from torchvm.tools.tree_layout import Layout, Node, Picture, Visit

__all__ = ["ASCII", "UNICODE", "Part", "Style", "as_text", "cut", "heading", "label"]


class Part(StrEnum):
    """Values of --only."""

    tree = "tree"
    mask = "mask"
    nodes = "nodes"
    walk = "walk"
    bytes = "bytes"
    notes = "notes"


class Style(NamedTuple):
    """Characters of a drawing."""

    quote: Callable[[str], str]
    """Writes a token's text with whatever is not printable escaped."""
    child: str
    last: str
    beside: str
    dash: str
    one: str
    zero: str
    more: str


UNICODE = Style(repr, "├", "└", "│", "─", "■", "·", "…")
ASCII = Style(ascii, "|", "`", "|", "-", "#", ".", "...")
# Deeper trees are drawn with one column a level.
_DEEP = 16
# Wider masks are drawn with one column a cell.
_WIDE = 32
_BITS = 8
_LONGEST = 40
_ACCEPTED = "*"


def label(node: Node, quote: Callable[[str], str]) -> str:
    """What a node is called beside its number."""
    if node.token is not None:
        return quote(node.token)
    return "" if node.path is None or node.node == 0 else str(node.path)


def cut(text: str, style: Style, most: int) -> str:
    """Shorten a label visibly to what a terminal shows in `most` columns."""
    if cell_len(text) <= most:
        return text
    return set_cell_size(text, most - len(style.more)).rstrip() + style.more


def as_text(picture: Picture, style: Style, parts: Iterable[Part]) -> str:
    """Write the parts that there is something to say of, an empty line between them."""
    made = {
        Part.tree: _tree,
        Part.mask: _mask,
        Part.nodes: _nodes,
        Part.walk: _walk,
        Part.bytes: _bytes,
        Part.notes: _notes,
    }
    blocks = [made[part](picture, style) for part in parts]
    return "\n\n".join("\n".join(line.rstrip() for line in block) for block in blocks if block)


def _tree(picture: Picture, style: Style) -> list[str]:
    """Draw the links, loose nodes behind the tree."""
    lines = [heading(picture)]
    if picture.source is not None:
        lines.append(picture.source)
    lines.append("")
    nodes = picture.nodes
    children: dict[int | None, list[Node]] = {}
    for node in nodes[1:]:
        children.setdefault(node.hangs_from, []).append(node)
    deepest = max(node.position for node in nodes) - picture.seq_len
    dash = style.dash + " " if deepest <= _DEEP else ""
    gap = " " * len(dash)

    def draw(top: Node) -> None:
        # Not by recursion: a chain may have a thousand nodes.
        pending = [(top, "", "")]
        while pending:
            node, lead, below = pending.pop()
            mark = f" {_ACCEPTED}" if node.accepted else ""
            lines.append(f"{lead}{node.node} {label(node, style.quote)}".rstrip() + mark)
            listed = children.get(node.node, [])
            for child in reversed(listed):
                is_last = child is listed[-1]
                corner, beside = (style.last, " ") if is_last else (style.child, style.beside)
                pending.append((child, f"{below}{corner}{dash}", f"{below}{beside}{gap}"))

    draw(nodes[0])
    if None in children:
        lines += ["", "hanging from nobody:"]
    for node in children.get(None, []):
        draw(node)
    if picture.accepted is not None:
        lines += ["", f"{_ACCEPTED} accepted"]
    return lines


def heading(picture: Picture) -> str:
    """Say how large it is."""
    n, seq_len = picture.num_draft_tokens, picture.seq_len
    nodes = "1 node, the root" if n == 1 else f"{n} nodes, node 0 the root"
    tokens = "1 committed token" if seq_len == 1 else f"{format_count(seq_len)} committed tokens"
    return f"{nodes}, behind {tokens}: n = {n}, L = {seq_len:,}"


def _mask(picture: Picture, style: Style) -> list[str]:
    n = picture.num_draft_tokens
    digits = len(str(n - 1))
    gap = " " if n <= _WIDE else ""
    indent = " " * (digits + 2)
    heads = [indent + gap.join(f"{j:>{digits}}"[at] for j in range(n)) for at in range(digits)]
    rows = []
    for node in picture.nodes:
        seen = set(node.attends)
        cells = gap.join(style.one if j in seen else style.zero for j in range(n))
        rows.append(f"{node.node:>{digits}}  {cells}")
    prefix = "; every row attends the L committed tokens" if picture.seq_len else ""
    legend = f"mask: row i has {style.one} in column j where node i attends node j{prefix}"
    return [legend, "", *heads, *rows]


def _nodes(picture: Picture, style: Style) -> list[str]:
    head = [
        "node", "", "parent", "position", "retrieve_index", "retrieve_next_token",
        "retrieve_next_sibling",
    ]  # fmt: skip
    body = []
    for node in picture.nodes:
        links = node.retrieve_index, node.retrieve_next_token, node.retrieve_next_sibling
        name = cut(label(node, style.quote), style, _LONGEST)
        body.append([str(node.node), name, _parent(node), str(node.position), *map(str, links)])
    return _table([head, *body], left={1})


def _parent(node: Node) -> str:
    if node.node == 0:
        return "root"
    return "nobody" if node.hangs_from is None else str(node.hangs_from)


def _walk(picture: Picture, style: Style) -> list[str]:
    if picture.accepted is None:
        return []
    path = " ".join(map(str, picture.accepted))
    lines = [f"accepted: {path} ({picture.accepted_by})"]
    for visit in picture.walk:
        lines += _visit(visit, picture, style)
    bonus = picture.walk[-1].target
    if bonus is not None:
        count = len(picture.accepted) - 1
        drafts = "1 draft token" if count == 1 else f"{count} draft tokens"
        lines.append(f"  the step yields {drafts} and the bonus token {style.quote(bonus)}")
    return lines


def _visit(visit: Visit, picture: Picture, style: Style) -> list[str]:
    """Tell how the children of an accepted node were gone through."""
    where = f"  at node {visit.node}"
    if visit.target is not None:
        where += f" the target's token is {style.quote(visit.target)}"
    lines = [where]
    for at, child in enumerate(visit.tried):
        link = "retrieve_next_sibling" if at else "retrieve_next_token"
        name = label(picture.nodes[child], style.quote)
        verdict = "accepted" if child == visit.accepted else "no"
        lines.append(f"    {link} {child} {name}".rstrip() + f": {verdict}")
    if visit.accepted is None:
        link = "retrieve_next_sibling" if visit.tried else "retrieve_next_token"
        lines.append(f"    {link} -1: the end")
    return lines


def _notes(picture: Picture, style: Style) -> list[str]:  # noqa: ARG001
    return [f"note: {note}" for note in picture.notes]


def _bytes(picture: Picture, style: Style) -> list[str]:  # noqa: ARG001
    lines: list[str] = []
    for layout in picture.layouts:
        packed = layout.cell_bits == 1
        lines += ["", *_layout_head(layout, picture, packed=packed), ""]
        lines += _byte_table(layout, picture, packed=packed)
    return lines[1:]


def _layout_head(layout: Layout, picture: Picture, *, packed: bool) -> list[str]:
    """Say where each cell lies, and show it for one."""
    size = f"{layout.nbytes:,} byte{'s' if layout.nbytes != 1 else ''}"
    stride = layout.prefix_bytes + layout.row_bytes
    shift = f" + {layout.prefix_bytes}" if layout.prefix_bytes else ""
    lines = [f"{layout.mode}: {size}, {layout.dtype}, {stride:,} a row"]
    deepest = max(picture.nodes, key=lambda node: node.position)
    i, j = deepest.node, deepest.hangs_from or 0
    cells = layout.rows[i].tree.split()
    if packed:
        value = cells[j // _BITS]
        lines.append(
            f"cell (i, j) is bit j % 8 of byte {stride} * i + j // 8, where bit 7 is written first"
        )
        example = (
            f"bit {j % _BITS} of byte {stride * i + j // _BITS}, which is {int(value, 16):08b}: "
            f"{int(value, 16) >> j % _BITS & 1}"
        )
    else:
        lines.append(f"cell (i, j) is byte {stride} * i{shift} + j")
        at = stride * i + layout.prefix_bytes + j
        example = f"byte {stride} * {i}{shift} + {j} = {at}: {cells[j]}"
    lines.append(f"so cell ({i}, {j}) is {example}")
    if layout.prefix_bytes:
        all_ones = ", all 01" if layout.prefix_is_ones else ""
        cut = "; the first and last 3 are shown" if layout.prefix_is_cut else ""
        count = layout.prefix_bytes
        cells_of = "1 prefix cell" if count == 1 else f"{count:,} prefix cells"
        lines.append(f"the {cells_of} of a row come first{all_ones}{cut}")
    if layout.mode != "QLEN_ONLY":
        same = "these" if layout.same_by_mask_convert else "OTHER"
        lines.append(f"mask_convert makes {same} bytes of the QLEN_ONLY mask, too")
    return lines


def _byte_table(layout: Layout, picture: Picture, *, packed: bool) -> list[str]:
    n, width = picture.num_draft_tokens, layout.row_bytes
    head = ["node", "at byte"]
    if layout.prefix_bytes:
        head.append("prefix")
    head.append("hex" if packed else f"cell{'s' if n > 1 else ''} 0{f' to {n - 1}' * (n > 1)}")
    with_bits = packed and width <= _BITS
    if with_bits:
        head.append(
            " ".join(f"{_BITS * at + 7}..{_BITS * at}".center(_BITS) for at in range(width))
        )
    body = []
    for node, row in enumerate(layout.rows):
        line = [str(node), f"{row.first_byte:,}"]
        if layout.prefix_bytes:
            line.append(row.prefix)
        line.append(row.tree)
        if with_bits:
            line.append(" ".join(f"{int(byte, 16):08b}" for byte in row.tree.split()))
        body.append(line)
    return _table([head, *body], left=range(2, len(head)))


def _table(rows: Sequence[Sequence[str]], left: Container[int]) -> list[str]:
    """Pad columns to the width that a terminal gives their text."""
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    kept = [at for at, width in enumerate(widths) if width]
    lines = []
    for row in rows:
        padded = []
        for at in kept:
            fill = " " * (widths[at] - cell_len(row[at]))
            padded.append(row[at] + fill if at in left else fill + row[at])
        lines.append("  ".join(padded))
    return lines
