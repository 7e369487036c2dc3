"""What the ops must compute, in plain loops over Python numbers; shares no code with them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

FULL, QLEN, PACKED = 0, 1, 2

Ints = list[int]


class Tree(NamedTuple):
    """One request's tree; -1 stands for no node, and None for a parent that is not found."""

    parents: list[int | None]
    rows: list[list[int]]
    depths: Ints
    next_token: Ints
    next_sibling: Ints


class Mask(NamedTuple):
    """What a mask buffer must hold after a build."""

    cells: NDArray[np.uint8]
    written: NDArray[np.bool_]


def parents_of_candidates(
    parent_list: Ints, selected: Ints, topk: int, depth: int
) -> list[int | None]:
    """Parent of every node; the root has none."""
    width = topk * (depth - 1) + 1 if depth > 1 else 0
    parents: list[int | None] = [None]
    for j, candidate in enumerate(selected):
        parent = None
        if 0 <= candidate < topk:
            parent = 0
        elif candidate >= topk and candidate // topk < width:
            wanted = parent_list[candidate // topk]
            for smaller in range(j):
                if wanted >= 0 and selected[smaller] == wanted:
                    parent = smaller + 1
        parents.append(parent)
    return parents


def parents_of_nodes(named: Ints) -> list[int | None]:
    """Parent of every node; what is not an earlier node is not found."""
    return [None, *(p if 0 <= p < i else None for i, p in enumerate(named) if i > 0)]


def tree(parents: list[int | None], limit: int) -> Tree:
    """Lay out one request; a walk to the root takes at most `limit` steps."""
    n = len(parents)
    rows, depths = [], []
    for i in range(n):
        row = [0] * n
        row[0] = row[i] = 1
        current: int | None = i
        for _ in range(limit):
            assert current is not None
            current = parents[current]
            if current is None:
                break
            row[current] = 1
        rows.append(row)
        depths.append(sum(row) - 1)
    next_token, next_sibling = [], []
    for i in range(n):
        next_token.append(next((c for c in range(n) if parents[c] == i), -1))
        mine = parents[i]
        later = (s for s in range(i + 1, n) if mine is not None and parents[s] == mine)
        next_sibling.append(next(later, -1))
    return Tree(parents, rows, depths, next_token, next_sibling)


def packed_bytes(row: Ints) -> Ints:
    """Little-endian bit string of a row: 1, 2 or 4 bytes, or whole 64-bit words above n = 32."""
    n = len(row)
    size = 1 if n <= 8 else 2 if n <= 16 else 4 if n <= 32 else 8 * math.ceil(n / 64)
    number = sum(cell << j for j, cell in enumerate(row))
    return list(number.to_bytes(size, "little"))


def row_elements(mode: int, n: int) -> int:
    """Elements that the tree cells of a row take."""
    return len(packed_bytes([0] * n)) if mode == PACKED else n


def numel(mode: int, lengths: Sequence[int], n: int) -> int:
    """Elements that a batch of these lengths occupies."""
    prefix = sum(lengths) if mode == FULL else 0
    return n * (prefix + len(lengths) * row_elements(mode, n))


def mask(trees: Sequence[Tree], lengths: Sequence[int], mode: int, fill_prefix: bool) -> Mask:
    """Cells of a batch, and which of them are written."""
    pieces: list[Ints | NDArray[np.uint8]] = []
    touched: list[NDArray[np.bool_]] = []
    for request, length in zip(trees, lengths, strict=True):
        for row in request.rows:
            if mode == FULL:
                pieces.append(np.ones(length, dtype=np.uint8))
                touched.append(np.full(length, fill_prefix))
            pieces.append(packed_bytes(row) if mode == PACKED else row)
            touched.append(np.full(len(pieces[-1]), True))
    if not pieces:
        return Mask(np.zeros(0, np.uint8), np.zeros(0, np.bool_))
    cells = np.concatenate([np.asarray(piece, dtype=np.uint8) for piece in pieces])
    return Mask(cells, np.concatenate(touched))


def outputs(trees: Sequence[Tree], lengths: Sequence[int]) -> dict[str, list[Ints] | Ints]:
    """The four outputs of a build, by name."""
    index, place = [], 0
    for request in trees:
        index.append(list(range(place, place + len(request.rows))))
        place += len(request.rows)
    positions = [
        length + depth
        for request, length in zip(trees, lengths, strict=True)
        for depth in request.depths
    ]
    return {
        "positions": positions,
        "retrieve_index": index,
        "retrieve_next_token": [request.next_token for request in trees],
        "retrieve_next_sibling": [request.next_sibling for request in trees],
    }


def select(scores: Sequence[float], count: int) -> Ints:
    """Ids of the best candidates in ascending order: by score, then by id; NaN below all."""

    def rank(i: int) -> tuple[bool, float, int]:
        return (math.isnan(scores[i]), 0.0 if math.isnan(scores[i]) else -scores[i], i)

    return sorted(sorted(range(len(scores)), key=rank)[:count])


def verify_greedy(
    candidates: list[Ints],
    retrieve_index: list[Ints],
    next_token: list[Ints],
    next_sibling: list[Ints],
    target: list[Ints],
    max_accept: int,
) -> dict[str, list[Ints] | Ints]:
    """The three outputs of a greedy verification, by name."""
    batch = len(candidates)
    n = len(candidates[0]) if batch else 0
    predicts, accept_index, accepted = [-1] * (batch * n), [], []
    for b in range(batch):

        def usable(place: int, b: int = b) -> bool:
            return b * n <= place < (b + 1) * n

        path = [retrieve_index[b][0]] if usable(retrieve_index[b][0]) else []
        node = 0
        while path and len(path) < max_accept:
            wanted = target[path[-1] // n][path[-1] % n]
            child, steps = next_token[b][node], 0
            while 0 <= child < n and steps < n and candidates[b][child] != wanted:
                child, steps = next_sibling[b][child], steps + 1
            if not 0 <= child < n or candidates[b][child] != wanted:
                break
            if not usable(retrieve_index[b][child]):
                break
            path.append(retrieve_index[b][child])
            node = child
        for place in path:
            predicts[place] = target[place // n][place % n]
        accept_index.append(path + [-1] * (max_accept - len(path)))
        accepted.append(max(len(path) - 1, 0))
    return {"predicts": predicts, "accept_index": accept_index, "accept_token_num": accepted}
