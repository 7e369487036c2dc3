"""What the ops make of a draft tree: links, mask bytes in each layout, the accepted path."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import msgspec
import torch

from torchvm.ops.layout import TreeMaskMode, mask_storage, tree_row_numel
from torchvm.ops.mask import alloc_verify_mask, mask_convert
from torchvm.ops.tree import build_tree_from_parents
from torchvm.ops.verify import verify_tree_greedy
from torchvm.tools.messages import CommandError
from torchvm.tools.quantities import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from torchvm.ops.tree import DraftTree
    from torchvm.tools.tree_input import Given

__all__ = ["Layout", "Node", "Picture", "Row", "Visit", "lay_out"]

_MOST_BYTES = 1 << 28
_WHOLE_PREFIX = 8
_ENDS = 3

Mode = TreeMaskMode


class Node(msgspec.Struct, frozen=True):
    """One node, as the ops placed it."""

    node: int
    token: str | None
    path: list[int] | None
    """Ranks from the root to it, where the tree came as choices."""
    parent: int
    """As it was given."""
    hangs_from: int | None
    """The node in whose list of children the links have it; None for the root and loose ones."""
    position: int
    retrieve_index: int
    retrieve_next_token: int
    retrieve_next_sibling: int
    attends: list[int]
    """Columns of its mask row that are 1."""
    accepted: bool


class Row(msgspec.Struct, frozen=True):
    """The bytes of one node's mask row, in hex."""

    first_byte: int
    """In the buffer."""
    prefix: str
    """The prefix cells, all of them or the first and last."""
    tree: str


class Layout(msgspec.Struct, frozen=True):
    """A mask buffer as `build_tree_from_parents` wrote it."""

    mode: str
    dtype: str
    nbytes: int
    cell_bits: int
    """8, or 1 where cells are packed."""
    row_bytes: int
    """Of the tree cells of one row."""
    prefix_bytes: int
    """Of the prefix cells of one row."""
    prefix_is_ones: bool
    prefix_is_cut: bool
    """Whether the rows show the first and last of its bytes only."""
    same_by_mask_convert: bool
    """Whether `mask_convert` makes these bytes of the QLEN_ONLY mask too."""
    rows: list[Row]


class Visit(msgspec.Struct, frozen=True):
    """What verification did at one accepted node."""

    node: int
    target: str | None
    """Text of the target's token after it."""
    tried: list[int]
    """Children in the order of the links, up to the accepted one."""
    accepted: int | None


class Picture(msgspec.Struct, frozen=True):
    """All there is to draw."""

    num_draft_tokens: int
    seq_len: int
    source: str | None
    nodes: list[Node]
    accepted: list[int] | None
    accepted_by: str | None
    walk: list[Visit]
    """A visit for each accepted node."""
    nbytes: dict[str, int]
    """Of the mask of this request in every layout."""
    layouts: list[Layout]
    notes: list[str]


def lay_out(given: Given, modes: Sequence[TreeMaskMode]) -> Picture:
    """Run the ops on one request.

    Args:
        given: the tree.
        modes: the layouts whose bytes are wanted.

    Raises:
        CommandError: when a mask is too large to show, or the accepted nodes are no path.
    """
    n, seq_len = len(given.parents), given.seq_len
    nbytes = {mode.name: int(mask_storage(mode, 1, n, seq_len)[0]) for mode in Mode}
    for mode in modes:
        if nbytes[mode.name] > _MOST_BYTES:
            raise CommandError(
                f"a mask in the layout {mode.name} must be at most {format_bytes(_MOST_BYTES)} "
                f"to be shown, got {format_bytes(nbytes[mode.name])}: take a smaller --seq-len"
            )
    block, tree = _build(given, Mode.QLEN_ONLY)
    child, sibling = (links[0].tolist() for links in tree[2:])
    children = _children(child, sibling)
    above = {low: high for high, listed in enumerate(children) for low in listed}
    accepted, by, next_tokens = _accepted(given, tree)
    _check_path(accepted or [0], children)
    cells = block.view(n, n).tolist()
    nodes = [
        Node(
            node=i,
            token=None if given.tokens is None else given.tokens[i],
            path=None if given.paths is None else given.paths[i],
            parent=given.parents[i],
            hangs_from=above.get(i),
            position=int(tree.positions[i]),
            retrieve_index=int(tree.retrieve_index[0, i]),
            retrieve_next_token=child[i],
            retrieve_next_sibling=sibling[i],
            attends=[j for j in range(n) if cells[i][j]],
            accepted=i in (accepted or ()),
        )
        for i in range(n)
    ]
    return Picture(
        num_draft_tokens=n,
        seq_len=seq_len,
        source=given.source,
        nodes=nodes,
        accepted=accepted,
        accepted_by=by,
        walk=_walk(accepted or [], next_tokens, children),
        nbytes=nbytes,
        layouts=[_layout(given, mode, block) for mode in modes],
        notes=[*given.notes, *_loose(nodes, recorded=given.source is not None)],
    )


def _build(given: Given, mode: TreeMaskMode) -> tuple[Tensor, DraftTree]:
    """Build a mask and the links."""
    n = len(given.parents)
    mask = alloc_verify_mask(1, n, given.seq_len, mode)
    tree = build_tree_from_parents(
        torch.tensor([given.parents]),
        torch.tensor([given.seq_len]),
        mask,
        num_draft_tokens=n,
        tree_mask_mode=mode,
    )
    return mask, tree


def _children(child: list[int], sibling: list[int]) -> list[list[int]]:
    """Follow each node's list of children."""
    children = []
    for low in child:
        listed = []
        while low >= 0:
            listed.append(low)
            low = sibling[low]
        children.append(listed)
    return children


def _accepted(
    given: Given, tree: DraftTree
) -> tuple[list[int] | None, str | None, list[str] | None]:
    """Return the accepted nodes, who says so, and the target's token after each."""
    if given.source is not None:
        return given.accepted, "recorded", given.next_tokens
    if given.target is None:
        return given.accepted, None if given.accepted is None else "given", None
    assert given.tokens is not None
    ids = {text: i for i, text in enumerate(dict.fromkeys([*given.tokens, *given.target]))}
    n = len(given.parents)
    found = verify_tree_greedy(
        torch.tensor([[ids[text] for text in given.tokens]]),
        tree.retrieve_index,
        tree.retrieve_next_token,
        tree.retrieve_next_sibling,
        torch.tensor([[ids[text] for text in given.target]]),
        max_accept=n,
    )
    count = int(found.accept_token_num[0])
    accepted = found.accept_index[0, : count + 1].tolist()
    texts = list(ids)
    return accepted, "verify_tree_greedy", [texts[int(found.predicts[i])] for i in accepted]


def _check_path(accepted: list[int], children: list[list[int]]) -> None:
    if accepted[0] != 0:
        raise CommandError(f"accepted nodes must begin with the root, 0, got {accepted[0]}")
    for high, low in itertools.pairwise(accepted):
        if low not in children[high]:
            listed = ", ".join(map(str, children[high])) or "none"
            raise CommandError(
                f"accepted nodes must each be a child of the one before: node {high} has "
                f"{listed}, got {low}"
            )


def _walk(
    accepted: list[int], next_tokens: list[str] | None, children: list[list[int]]
) -> list[Visit]:
    walk = []
    for at, node in enumerate(accepted):
        taken = accepted[at + 1] if at + 1 < len(accepted) else None
        listed = children[node]
        tried = listed if taken is None else listed[: listed.index(taken) + 1]
        walk.append(Visit(node, next_tokens[at] if next_tokens else None, tried, taken))
    return walk


def _layout(given: Given, mode: TreeMaskMode, block: Tensor) -> Layout:
    n = len(given.parents)
    mask, _ = _build(given, mode)
    converted = mask_convert(
        block, torch.tensor([given.seq_len]), from_mode=Mode.QLEN_ONLY, to_mode=mode,
        num_draft_tokens=n, max_context_len=given.seq_len,
    )  # fmt: skip
    rows = mask.view(torch.uint8).view(n, -1)
    width = int(tree_row_numel(mode, n))
    prefix = rows.shape[1] - width
    return Layout(
        mode=mode.name,
        dtype=str(mask.dtype).removeprefix("torch."),
        nbytes=mask.nbytes,
        cell_bits=1 if mode is Mode.QLEN_ONLY_BITPACKING else 8,
        row_bytes=width,
        prefix_bytes=prefix,
        prefix_is_cut=prefix > _WHOLE_PREFIX,
        prefix_is_ones=bool((rows[:, :prefix] == 1).all()),
        same_by_mask_convert=torch.equal(mask, converted),
        rows=[
            Row(i * rows.shape[1], _ends(row[:prefix]), _hex(row[prefix:]))
            for i, row in enumerate(rows)
        ],
    )


def _ends(prefix: Tensor) -> str:
    """All bytes of a short prefix, the first and last of a long one."""
    if len(prefix) <= _WHOLE_PREFIX:
        return _hex(prefix)
    return f"{_hex(prefix[:_ENDS])} .. {_hex(prefix[-_ENDS:])}"


def _hex(cells: Tensor) -> str:
    return bytes(cells.tolist()).hex(" ")


def _loose(nodes: list[Node], *, recorded: bool) -> list[str]:
    """Say of nodes whose parent is not found why, and what became of them."""

    def reason(node: Node) -> str | None:
        if node.node == 0 or node.hangs_from is not None:
            return None
        if not 0 <= node.parent < len(nodes):
            return f"parent {node.parent} is no node"
        if node.parent == node.node:
            return f"parent {node.parent} is the node itself"
        return f"parent {node.parent} does not come before it"

    runs = itertools.groupby(nodes, key=reason)
    notes = [_complaint(why, list(run)) for why, run in runs if why is not None]
    if recorded and notes:
        notes.append("a drafter's nodes are filled up to n with nodes whose parent is -1")
    return notes


def _complaint(why: str, run: list[Node]) -> str:
    """Of adjacent nodes that lack their parents for the same reason."""
    first, last = run[0], run[-1]
    if len(run) == 1:
        who, they = f"node {first.node}", "it hangs from nobody, attends"
        themselves, them = "itself", "it"
    else:
        joined = "and" if len(run) == 2 else "to"
        who = f"nodes {first.node} {joined} {last.node}"
        they, themselves, them = "they hang from nobody, attend", "themselves", "them"
    others = sorted({j for node in run for j in node.attends} - {0, *(n.node for n in run)})
    seen = f"the root, {', '.join(map(str, others))}" if others else "the root"
    return (
        f"{who}: {why}, so it is not found: {they} {seen} and {themselves} alone, and no list of "
        f"children has {them}"
    )
