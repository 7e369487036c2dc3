"""build_tree_from_parents against the oracle, and against build_tree on the same trees."""

from __future__ import annotations

import random

import pytest
import torch

from tests import oracle
from tests.buffers import MODES_AND_DTYPES, check_outputs, poisoned, poisons
from tests.trees import SIZES, draw_batch, draw_sizes
from torchvm.ops.tree import build_tree_from_parents


def _check(parents: list[list[int]], lengths: list[int], n: int) -> None:
    trees = [oracle.tree(oracle.parents_of_nodes(row), max(n - 1, 1)) for row in parents]
    expected = oracle.outputs(trees, lengths)
    named = torch.tensor(parents, dtype=torch.int64).view(len(lengths), n)
    seq_lens = torch.tensor(lengths, dtype=torch.int64)
    for mode, dtype in MODES_AND_DTYPES:
        for fill_prefix in (True, False):
            cells = oracle.mask(trees, lengths, mode, fill_prefix)
            for poison in poisons(dtype):
                buffer = poisoned(oracle.numel(mode, lengths, n), dtype, poison)
                found = build_tree_from_parents(
                    named, seq_lens, buffer.mask,
                    num_draft_tokens=n, tree_mask_mode=mode, fill_prefix=fill_prefix,
                )  # fmt: skip
                buffer.check(cells)
                check_outputs(found, expected)


@pytest.mark.parametrize(
    ("parents", "packed", "token", "sibling", "depths"),
    [
        pytest.param(
            [9, 0, 0, 1, 1], [1, 3, 5, 11, 19], [1, 3, -1, -1, -1], [-1, 2, -1, 4, -1],
            [0, 1, 1, 2, 2], id="well-formed",
        ),
        pytest.param(
            [0, 1, 4, -1, 3], [1, 3, 5, 9, 25], [-1, -1, -1, 4, -1], [-1, -1, -1, -1, -1],
            [0, 1, 1, 1, 2], id="self, later, none",
        ),
        pytest.param(
            [0, 0, 1, 2, 2**62], [1, 3, 7, 15, 17], [1, 2, 3, -1, -1], [-1, -1, -1, -1, -1],
            [0, 1, 2, 3, 1], id="out of range",
        ),
    ],
)  # fmt: skip
def test_small_trees(
    parents: list[int], packed: list[int], token: list[int], sibling: list[int], depths: list[int]
) -> None:
    mask = torch.full((5,), 0xA5, dtype=torch.uint8)
    tree = build_tree_from_parents(
        torch.tensor([parents]), torch.tensor([30]), mask, num_draft_tokens=5, tree_mask_mode=2
    )
    assert mask.tolist() == packed
    assert tree.retrieve_next_token.tolist() == [token]
    assert tree.retrieve_next_sibling.tolist() == [sibling]
    assert tree.positions.tolist() == [30 + depth for depth in depths]
    _check([parents], [30], 5)


@pytest.mark.parametrize("n", SIZES)
def test_every_change_of_layout(n: int) -> None:
    rng = random.Random(n)  # noqa: S311
    _check([[rng.randint(max(0, i - 9), i) for i in range(n)] for _ in range(2)], [3, 0], n)


def test_chain_of_the_largest_size() -> None:
    """A walk may take n - 1 steps."""
    _check([[-1, *range(1023)]], [4], 1024)


def test_random_trees() -> None:
    rng = random.Random(5)  # noqa: S311
    requests = 0
    while requests < 1000:
        n, size = rng.randint(1, 40), rng.randint(0, 9)
        low, high = rng.choice(((0, 0), (-2, 2), (-n, n)))
        parents = [[rng.randint(low, max(i - 1, 0) + high) for i in range(n)] for _ in range(size)]
        _check(parents, [rng.randint(0, 40) for _ in range(size)], n)
        requests += size


def test_same_as_from_candidates() -> None:
    rng = random.Random(6)  # noqa: S311
    for _ in range(50):
        batch = draw_batch(rng, *draw_sizes(rng, 40), 3)
        trees = batch.trees()
        parents = [[-1, *(p for p in tree.parents if p is not None)] for tree in trees]
        again = [oracle.tree(oracle.parents_of_nodes(row), batch.n) for row in parents]
        assert [t.rows for t in again] == [t.rows for t in trees]
        _check(parents, batch.lengths, batch.n)
