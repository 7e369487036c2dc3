"""Inputs of verify_tree_sampling, drawn, and outputs that show which cells were not written."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tests import oracle
from tests.sampling_reference import verify_sampling

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from torch import Tensor


class Case(NamedTuple):
    """Arguments of the op, in its order."""

    candidates: Tensor
    retrieve_index: Tensor
    retrieve_next_token: Tensor
    retrieve_next_sibling: Tensor
    target_probs: Tensor
    coins: Tensor
    coins_for_final: Tensor
    max_accept: int
    threshold_single: float = 1.0
    threshold_acc: float = 1.0

    def expected(self) -> dict[str, list[list[int]] | list[int]]:
        """What the oracle makes of it."""
        rows: list[Any] = [v.tolist() if isinstance(v, torch.Tensor) else v for v in self]
        return verify_sampling(*rows)

    def to(self, device: torch.device) -> Case:
        """The same on another device."""
        return Case._make([v.to(device) if isinstance(v, torch.Tensor) else v for v in self])


def links(rng: random.Random, size: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """The three link tensors of random trees."""
    parents = [[-1, *(rng.randint(0, i - 1) for i in range(1, n))] for _ in range(size)]
    trees = [oracle.tree(oracle.parents_of_nodes(row), n) for row in parents]
    children = torch.tensor([t.next_token for t in trees], dtype=torch.int64)
    siblings = torch.tensor([t.next_sibling for t in trees], dtype=torch.int64)
    return torch.arange(size * n).view(size, n), children.view(size, n), siblings.view(size, n)


def _probs(rng: random.Random, rows: int, vocab: int) -> Tensor:
    """Rows of eighths, which coins meet exactly, and of any numbers; not all add up to 1."""
    eighths = torch.tensor([[rng.randint(0, 3) / 8 for _ in range(vocab)] for _ in range(rows)])
    scores = torch.tensor([[rng.uniform(-2, 2) for _ in range(vocab)] for _ in range(rows)])
    exact = torch.tensor([rng.random() < 0.5 for _ in range(rows)], dtype=torch.bool)
    return eighths.view(rows, vocab).where(exact[:, None], scores.view(rows, vocab).softmax(-1))


def _coins(rng: random.Random, count: int) -> Tensor:
    """Coins of 24 bits, many of them at eighths."""
    drawn = [rng.choice((rng.randrange(8) << 21, rng.randrange(1 << 24))) for _ in range(count)]
    return torch.tensor(drawn, dtype=torch.float32) / (1 << 24)


def draw_case(rng: random.Random, size: int, n: int, vocab: int, *, wild: bool = False) -> Case:
    """Random trees with many equal siblings; `wild` ones with links and tokens to anywhere."""
    index, children, siblings = links(rng, size, n)
    tokens = [rng.randrange(vocab) for _ in range(size * n)]
    if wild:
        odd = (-1, n, -(2**62), 2**62)
        drawn = [[rng.choice((rng.randrange(n), rng.choice(odd))) for _ in range(n)] for _ in odd]
        children, siblings = (
            torch.tensor([rng.choice(drawn) for _ in range(size)], dtype=torch.int64).view(size, n)
            for _ in range(2)
        )
        strange = [
            rng.choice((*[i] * 6, rng.randint(-2, size * n + 1), 2**62)) for i in index.ravel()
        ]
        index = torch.tensor([int(i) for i in strange], dtype=torch.int64).view(size, n)
        tokens = [rng.choice((*[t] * 12, -1, vocab, 2**62, -(2**63))) for t in tokens]
    thresholds = (1.0, 1.0, rng.choice((0.25, 0.5, 0.9)))
    return Case(
        torch.tensor(tokens, dtype=torch.int64).view(size, n), index, children, siblings,
        _probs(rng, size * n, vocab).view(size, n, vocab), _coins(rng, size * n).view(size, n),
        _coins(rng, size), rng.randint(1, 6), rng.choice(thresholds), rng.choice(thresholds),
    )  # fmt: skip


def large_case(rng: random.Random, size: int, n: int, vocab: int) -> Case:
    """Many tokens of few sixteen-bit weights each, children among the likeliest."""
    index, children, siblings = links(rng, size, n)
    weights = torch.tensor([rng.randint(0, 7) for _ in range(size * n * vocab)])
    probs = (weights / (1 << 16)).view(size, n, vocab)
    tokens = torch.tensor([rng.randrange(vocab) for _ in range(size * n)]).view(size, n)
    for b in range(size):
        for node in range(n):
            probs[b, node, tokens[b]] += 1 / 16
    coins, final = _coins(rng, size * n).view(size, n), _coins(rng, size)
    return Case(tokens, index, children, siblings, probs, coins, final, 4)


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Tensors that are made empty hold the largest integer, which no output does."""
    torch.use_deterministic_algorithms(mode=True)
    try:
        assert int(torch.empty(1, dtype=torch.int32)) == 2**31 - 1
        yield
    finally:
        torch.use_deterministic_algorithms(mode=False)
