"""Random draft trees for the tests, well-formed and not, as plain numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from tests import oracle

if TYPE_CHECKING:
    import random

    from torch import Tensor

SIZES = (1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 1000, 1024)
"""Numbers of draft tokens on both sides of every change of layout."""


class Batch(NamedTuple):
    """Inputs of `build_tree` for some requests of the same sizes."""

    topk: int
    depth: int
    n: int
    parent_list: list[list[int]]
    selected: list[list[int]]
    lengths: list[int]

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """parent_list, selected_index and seq_lens, int64."""
        size = len(self.lengths)
        width = self.topk * (self.depth - 1) + 1 if self.depth > 1 else 0
        return (
            torch.tensor(self.parent_list, dtype=torch.int64).view(size, width),
            torch.tensor(self.selected, dtype=torch.int64).view(size, self.n - 1),
            torch.tensor(self.lengths, dtype=torch.int64),
        )

    def trees(self) -> list[oracle.Tree]:
        """What the oracle makes of each request."""
        return [
            oracle.tree(
                oracle.parents_of_candidates(beams, ids, self.topk, self.depth),
                min(self.depth, self.n),
            )
            for beams, ids in zip(self.parent_list, self.selected, strict=True)
        ]


def num_candidates(topk: int, depth: int) -> int:
    """Candidates of all levels of a draft."""
    return topk + (depth - 1) * topk * topk


def draw_beams(rng: random.Random, topk: int, depth: int) -> list[int]:
    """Row of `parent_list`: which candidates were expanded, level by level."""
    if depth == 1:
        return []
    row = [-1, *range(topk)]
    for level in range(depth - 2):
        first = topk + topk * topk * level
        row.extend(rng.sample(range(first, first + topk * topk), topk))
    return row


def draw_selection(rng: random.Random, beams: list[int], topk: int, count: int) -> list[int]:
    """So many candidates in ascending order, each with its parent."""
    children: dict[int, list[int]] = {}
    for q, parent in enumerate(beams):
        children.setdefault(parent if q else -1, []).extend(range(q * topk, (q + 1) * topk))
    open_ids = list(children.get(-1, range(topk)))
    taken = []
    for _ in range(count):
        candidate = open_ids.pop(rng.randrange(len(open_ids)))
        taken.append(candidate)
        open_ids.extend(children.get(candidate, ()))
    return sorted(taken)


def draw_sizes(rng: random.Random, largest: int) -> tuple[int, int, int]:
    """Topk 1-10, depth 1-8, and n up to `largest` that they allow."""
    topk, depth = rng.randint(1, 10), rng.randint(1, 8)
    return topk, depth, rng.randint(1, min(largest, num_candidates(topk, depth) + 1))


def draw_batch(
    rng: random.Random, topk: int, depth: int, n: int, size: int, *, longest: int = 300
) -> Batch:
    """Well-formed trees."""
    parent_list = [draw_beams(rng, topk, depth) for _ in range(size)]
    selected = [draw_selection(rng, beams, topk, n - 1) for beams in parent_list]
    lengths = [rng.choice((0, rng.randint(0, longest))) for _ in range(size)]
    return Batch(topk, depth, n, parent_list, selected, lengths)


def draw_malformed(rng: random.Random, topk: int, depth: int, n: int, size: int) -> Batch:
    """Strictly ascending ids whose parents may be missing, themselves, later, or nonsense.

    Some trees are deeper than `depth`: every beam hangs from the largest id before its own.
    """
    good = draw_batch(rng, topk, depth, n, size, longest=20)
    last = num_candidates(topk, depth)
    parent_list, selected = [], []
    for beams, ids in zip(good.parent_list, good.selected, strict=True):
        pool = set(ids)
        if rng.random() < 0.7:
            pool |= set(range(-3, last + 9)) | {2**40, 2**62, -(2**40), -(2**63)}
        taken = sorted(rng.sample(sorted(pool), n - 1))
        if rng.random() < 0.5:
            found = [max((i for i in taken if i < q * topk), default=0) for q in range(len(beams))]
        else:
            strange = [*taken, -1, last, last + topk, 2**62, -(2**63), rng.randint(-3, last + 3)]
            found = [rng.choice(strange) if rng.random() < 0.4 else beam for beam in beams]
        parent_list.append(found)
        selected.append(taken)
    return Batch(topk, depth, n, parent_list, selected, good.lengths)
