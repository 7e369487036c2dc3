"""The tree of a beam in plain loops, over whatever scores the continuations of a path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchvm.engine import Draft

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def plain_beam(
    scores_after: Callable[[list[int]], Sequence[float]], topk: int, depth: int, n: int
) -> Draft:
    """Each node is its score, its path and its parent's id; scores are log-probabilities."""
    nodes: list[tuple[float, list[int], int]] = []
    frontier: list[tuple[float, list[int], int]] = [(0.0, [], -1)]
    for _ in range(depth):
        level = []
        for score, path, own_id in frontier:
            logs = scores_after(path)
            level += [(score + logs[t], [*path, t], own_id) for t in _best(logs, topk)]
        start = len(nodes)
        nodes += level
        kept = _best([score for score, _, _ in level], topk)
        frontier = [(level[i][0], level[i][1], start + i) for i in kept]
    chosen = sorted(_best([score for score, _, _ in nodes], n - 1))
    index = {node: j for j, node in enumerate(chosen, start=1)} | {-1: 0}
    return Draft([nodes[i][1][-1] for i in chosen], [index[nodes[i][2]] for i in chosen])


def draft_lists(draft: Draft) -> tuple[list[int], list[int]]:
    return list(draft.tokens), list(draft.parents)


def _best(scores: Sequence[float], count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]
