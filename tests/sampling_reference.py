"""What verify_tree_sampling must compute, in plain loops; and rules that are not lossless."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Ints = list[int]
Floats = list[float]
Wrong = Literal["a fresh coin for each sibling", "duplicates count twice", "last token from all"]


def draw(weights: Sequence[float], coin: float) -> int | None:
    """Inverse CDF in exact arithmetic; None where there is no mass."""
    exact = [Fraction(w) if w > 0 else Fraction(0) for w in weights]
    goal = Fraction(coin) * sum(exact)
    for token, weight in enumerate(exact):
        if weight > goal:
            return token
        goal -= weight
    return None


def most_probable(weights: Sequence[float]) -> int | None:
    """The first of the largest; None where none is positive."""
    best = max((w for w in weights if w > 0), default=0.0)
    return list(weights).index(best) if best > 0 else None


def last_token(p: Floats, rejected: set[int], coin: float) -> int:
    """What is drawn after the last accepted node."""
    rest = [0.0 if token in rejected else w for token, w in enumerate(p)]
    # Below 2 ** -40 a weight is too small to be drawn by.
    drawn = draw([w if w >= 2.0**-40 else 0.0 for w in rest], coin)
    for token in (drawn, most_probable(rest), most_probable(p)):
        if token is not None:
            return token
    return 0


def meet(
    siblings: list[tuple[int, int]],
    p: Floats,
    coin: float,
    single: float,
    acc: float,
    wrong: Wrong | None,
    fresh: Callable[[], float],
) -> tuple[int | None, set[int]]:
    """The accepted one of (node, token) pairs, and the tokens that were rejected before it."""
    total, rejected = np.float32(0), set[int]()
    for node, token in siblings:
        if not 0 <= token < len(p) or not p[token] > 0:
            continue
        if token in rejected and wrong != "duplicates count twice":
            continue
        own = np.float32(p[token])
        total = np.float32(total + own)
        accepts = np.float32(coin) <= total / np.float32(acc)
        if wrong == "a fresh coin for each sibling":
            accepts = np.bool_(fresh() < own)
        if accepts or own >= np.float32(single):
            return node, rejected
        rejected.add(token)
    return None, rejected


def list_of_siblings(first: int, next_sibling: Ints, n: int) -> Ints:
    """Nodes of a list, which ends outside [0, n) and after n steps."""
    nodes: Ints = []
    while 0 <= first < n and len(nodes) < n:
        nodes.append(first)
        first = next_sibling[first]
    return nodes


def verify_sampling(
    candidates: list[Ints],
    retrieve_index: list[Ints],
    next_token: list[Ints],
    next_sibling: list[Ints],
    probs: list[list[Floats]],
    coins: list[Floats],
    final_coins: Floats,
    max_accept: int,
    single: float = 1.0,
    acc: float = 1.0,
    *,
    wrong: Wrong | None = None,
) -> dict[str, list[Ints] | Ints]:
    """The three outputs by name, or those of a wrong rule."""
    fresh = random.Random(5).random  # noqa: S311
    batch = len(candidates)
    n = len(candidates[0]) if batch else 0
    predicts, accept_index, accepted = [-1] * (batch * n), [], []
    for b in range(batch):
        places = range(b * n, (b + 1) * n)
        path = [retrieve_index[b][0]] if retrieve_index[b][0] in places else []
        node = 0
        last = None
        while path and last is None:
            p, found, rejected = probs[b][node], None, set[int]()
            if len(path) < max_accept:
                nodes = list_of_siblings(next_token[b][node], next_sibling[b], n)
                pairs = [(c, candidates[b][c]) for c in nodes]
                found, rejected = meet(pairs, p, coins[b][node], single, acc, wrong, fresh)
            if found is None:
                if wrong == "last token from all":
                    rejected = set()
                last = last_token(p, rejected, final_coins[b])
            elif retrieve_index[b][found] not in places:
                last = candidates[b][found]
            else:
                predicts[path[-1]] = candidates[b][found]
                path.append(retrieve_index[b][found])
                node = found
        if last is not None:
            predicts[path[-1]] = last
        accept_index.append(path + [-1] * (max_accept - len(path)))
        accepted.append(max(len(path) - 1, 0))
    return {"predicts": predicts, "accept_index": accept_index, "accept_token_num": accepted}
