"""verify_tree_greedy against the oracle: literal cases, random trees, malformed links."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests import oracle
from tests.buffers import check_outputs
from tests.test_tree import CASES
from tests.trees import SIZES
from torchvm.ops.verify import verify_tree_greedy

if TYPE_CHECKING:
    from torch import Tensor

VERIFY = torch.ops.torchvm.verify_tree_greedy.default
ARGUMENTS = (
    "candidates", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling",
    "target_predict",
)  # fmt: skip

Rows = list[list[int]]
Inputs = tuple[Rows, Rows, Rows, Rows, Rows]


def _check(rows: Inputs, max_accept: int) -> int:
    """Compare with the oracle; return how many draft tokens were accepted."""
    size = len(rows[0])
    n = len(rows[0][0]) if size else 3
    inputs = [torch.tensor(part, dtype=torch.int64).view(size, n) for part in rows]
    before = [tensor.clone() for tensor in inputs]
    first, second, third, fourth, fifth = inputs
    found = verify_tree_greedy(first, second, third, fourth, fifth, max_accept=max_accept)
    check_outputs(found, oracle.verify_greedy(*rows, max_accept))
    assert all(tensor.dtype == torch.int32 for tensor in found)
    assert all(torch.equal(*pair) for pair in zip(inputs, before, strict=True))
    return int(found.accept_token_num.sum())


def _links(rng: random.Random, size: int, n: int) -> tuple[Rows, Rows, Rows]:
    parents = [[-1, *(rng.randint(0, i - 1) for i in range(1, n))] for _ in range(size)]
    trees = [oracle.tree(oracle.parents_of_nodes(row), n) for row in parents]
    index = [list(range(b * n, (b + 1) * n)) for b in range(size)]
    return index, [t.next_token for t in trees], [t.next_sibling for t in trees]


@pytest.mark.parametrize(
    ("rows", "max_accept", "predicts", "accept_index", "accepted"),
    [
        pytest.param(
            (
                [[0, 1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12]],
                [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]],
                [[1, 2, -1, 4, 5, -1], [4, 2, 3, -1, 5, -1]],
                [[-1, 3, -1, -1, -1, -1], [-1, -1, -1, -1, 1, -1]],
                [[3, 18, 18, 4, 5, 18], [11, 18, 18, 18, 12, 18]],
            ),
            4, [3, -1, -1, 4, 5, 18, 11, -1, -1, -1, 12, 18], [[0, 3, 4, 5], [6, 10, 11, -1]],
            [3, 2], id="two requests",
        ),
        pytest.param(
            ([[5], [6]], [[0], [1]], [[-1], [-1]], [[-1], [-1]], [[8], [9]]),
            1, [8, 9], [[0], [1]], [0, 0], id="root alone",
        ),
        pytest.param(
            ([[0, 1, 2, 3]], [[0, 1, 2, 3]], [[1, 2, 3, -1]], [[-1] * 4], [[1, 2, 3, 4]]),
            3, [1, 2, 3, -1], [[0, 1, 2]], [2], id="path longer than max_accept",
        ),
        pytest.param(
            ([[0, 7, 7, 8]], [[0, 1, 2, 3]], [[1, -1, 3, -1]], [[-1, 2, -1, -1]], [[7, 9, 8, 1]]),
            4, [7, 9, -1, -1], [[0, 1, -1, -1]], [1], id="first of two equal siblings",
        ),
        pytest.param(
            ([[0, 1, 2]], [[-4, 1, 2]], [[1, 2, -1]], [[-1] * 3], [[1, 2, 3]]),
            3, [-1, -1, -1], [[-1, -1, -1]], [0], id="root nowhere",
        ),
        pytest.param(
            ([[0, 1, 2]], [[0, 1, 3]], [[1, 2, -1]], [[-1] * 3], [[1, 2, 3]]),
            3, [1, 2, -1], [[0, 1, -1]], [1], id="place past the batch",
        ),
        pytest.param(
            ([[0, 1, 2]], [[0, 1, 2]], [[1, 9, -1]], [[-1] * 3], [[1, 2, 3]]),
            3, [1, 2, -1], [[0, 1, -1]], [1], id="child out of range",
        ),
        pytest.param(
            ([[0, 1, 2]], [[0, 1, 2]], [[1, -1, -1]], [[-1, 2, 1]], [[5, 2, 3]]),
            3, [5, -1, -1], [[0, -1, -1]], [0], id="siblings in a circle",
        ),
    ],
)  # fmt: skip
def test_small_trees(
    rows: Inputs,
    max_accept: int,
    predicts: list[int],
    accept_index: Rows,
    accepted: list[int],
) -> None:
    first, second, third, fourth, fifth = (torch.tensor(part) for part in rows)
    found = verify_tree_greedy(first, second, third, fourth, fifth, max_accept=max_accept)
    assert found.predicts.tolist() == predicts
    assert found.accept_index.tolist() == accept_index
    assert found.accept_token_num.tolist() == accepted
    _check(rows, max_accept)


@pytest.mark.skipif(not CASES.exists(), reason="the shared case file is not beside the project")
def test_shared_cases() -> None:
    cases = json.loads(CASES.read_text())["verify_greedy_cases"]
    assert len(cases) > 2
    for case in cases:
        first, second, third, fourth, fifth = (torch.tensor(case["inputs"][a]) for a in ARGUMENTS)
        found = verify_tree_greedy(
            first, second, third, fourth, fifth, max_accept=case["inputs"]["accept_width"]
        )
        for name, tensor in found._asdict().items():
            assert tensor.tolist() == case["expected"][name], (case["id"], name)


def test_random_trees() -> None:
    rng = random.Random(7)  # noqa: S311
    accepted = requests = 0
    while requests < 2000:
        n, size = rng.randint(1, 40), rng.randint(0, 9)
        tokens = [[rng.randint(0, 2) for _ in range(n)] for _ in range(size)]
        target = [[rng.randint(0, 2) for _ in range(n)] for _ in range(size)]
        accepted += _check((tokens, *_links(rng, size, n), target), rng.randint(1, 9))
        requests += size
    assert accepted > 1000


@pytest.mark.parametrize("n", SIZES)
def test_long_paths(n: int) -> None:
    index, token, sibling = [list(range(n))], [[*range(1, n), -1]], [[-1] * n]
    path = [list(range(100, 100 + n))]
    assert _check((path, index, token, sibling, [[*path[0][1:], 5]]), n) == n - 1


def test_malformed_links() -> None:
    rng = random.Random(8)  # noqa: S311
    for _ in range(1000):
        n, size = rng.randint(1, 12), rng.randint(1, 4)

        def nodes(n: int = n, size: int = size) -> Rows:
            wild = (-1, n, -(2**62), 2**62)
            return [
                [rng.choice((rng.randrange(n), rng.choice(wild))) for _ in range(n)]
                for _ in range(size)
            ]

        index, _, _ = _links(rng, size, n)
        for row in index:
            row[:] = [rng.choice((i, i, rng.randint(-2, size * n + 1), 2**62)) for i in row]
        tokens = [[rng.randint(0, 1) for _ in range(n)] for _ in range(size)]
        target = [[rng.randint(0, 1) for _ in range(n)] for _ in range(size)]
        _check((tokens, index, nodes(), nodes(), target), rng.randint(1, 6))


def _inputs(size: int, n: int = 5) -> list[Tensor]:
    rng = random.Random(9)  # noqa: S311
    tokens = torch.arange(n).repeat(size, 1) % 2
    links = [torch.tensor(part, dtype=torch.int64).view(size, n) for part in _links(rng, size, n)]
    return [tokens, *links, 1 - tokens]


@pytest.mark.parametrize("size", [0, 1, 3])
def test_opcheck(size: int) -> None:
    inputs = _inputs(size)
    torch.library.opcheck(VERIFY, (*inputs, 3))
    strided = [tensor.t().contiguous().t() for tensor in inputs]
    assert size < 2 or not strided[0].is_contiguous()
    torch.library.opcheck(VERIFY, (*strided, 3))
    assert all(map(torch.equal, VERIFY(*inputs, 3), VERIFY(*strided, 3)))


def test_fake_keeps_sizes_symbolic() -> None:
    fake = FakeTensorMode(shape_env=ShapeEnv())
    inputs = [fake.from_tensor(tensor, static_shapes=False) for tensor in _inputs(3)]
    with fake:
        predicts, accept_index, accepted = VERIFY(*inputs, 4)
    size, n = inputs[0].shape
    assert isinstance(size, torch.SymInt)
    assert str(predicts.shape[0]) == str(size * n)
    assert [str(s) for s in accept_index.shape] == [str(size), "4"]
    assert [str(s) for s in accepted.shape] == [str(size)]
    assert {t.dtype for t in (predicts, accept_index, accepted)} == {torch.int32}


@pytest.mark.parametrize("place", range(5))
def test_refusals(place: int) -> None:
    name = ARGUMENTS[place]
    inputs = _inputs(3)
    for wrong, message in (
        (inputs[place].int(), f"{name} must be torch.int64, got torch.int32"),
        (inputs[place].view(-1), f"{name} must be 2-D, got"),
        (inputs[place][:2], r"must be of shape \[[32], 5\], got \[[23], 5\]"),
        (inputs[place][:, 1:], r"must be of shape \[3, [45]\], got \[3, [45]\]"),
    ):
        changed: list[Any] = [*inputs[:place], wrong, *inputs[place + 1 :]]
        with pytest.raises(ValueError, match=message):
            VERIFY(*changed, 3)
        with FakeTensorMode() as fake, pytest.raises(ValueError, match=message):
            VERIFY(*map(fake.from_tensor, changed), 3)
    with pytest.raises(ValueError, match="max_accept must be >= 1, got 0"):
        VERIFY(*inputs, 0)
    with pytest.raises(ValueError, match="candidates must have at least 1 column, got 0"):
        VERIFY(*(tensor[:, :0] for tensor in inputs), 1)
