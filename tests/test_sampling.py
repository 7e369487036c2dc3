"""verify_tree_sampling against the oracle: literal cases, random trees, malformed links."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torchvm
from tests.buffers import check_outputs
from tests.sampling_cases import Case, draw_case, large_case, poisoned_outputs
from tests.sampling_launches import ODD

if TYPE_CHECKING:
    from torch import Tensor

VERIFY_AS_USERS_DO: Any = torchvm.verify_tree_sampling
VERIFY = torch.ops.torchvm.verify_tree_sampling.default
ALMOST_ONE = 1 - 2.0**-24
# A root with children 1 and 2, the first of which has child 3.
CHILDREN, SIBLINGS = [1, 3, -1, -1], [-1, 2, -1, -1]
QUARTERS = [[0.25, 0.5, 0.25, 0.0], [0.0, 0.25, 0.25, 0.5], [0.5, 0.5, 0.0, 0.0], [0, 0, 0, 1.0]]


def _run(case: Case) -> list[list[Any]]:
    before = [t.clone() if isinstance(t, torch.Tensor) else t for t in case]
    with poisoned_outputs():
        found = VERIFY(*case)
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in found)
    for mine, other in zip(case[:7], before, strict=False):
        assert mine.view(torch.uint8).equal(other.view(torch.uint8))  # type: ignore[union-attr]
    return [t.tolist() for t in found]


def _check(case: Case) -> int:
    with poisoned_outputs():
        found = VERIFY(*case)
    check_outputs(found, case.expected())
    return int(found[2].sum())


def _small(**changes: Any) -> Case:
    """One request of four nodes; `changes` are lists of its row, or numbers."""
    rows: dict[str, Any] = {
        "candidates": [9, 1, 2, 3], "retrieve_index": [0, 1, 2, 3],
        "retrieve_next_token": CHILDREN, "retrieve_next_sibling": SIBLINGS,
        "target_probs": QUARTERS, "coins": [0.25, 0.25, 0.25, 0.25], "coins_for_final": 0.5,
        "max_accept": 4,
    } | changes  # fmt: skip
    for name in Case._fields[:7]:
        dtype = torch.int64 if name in Case._fields[:4] else torch.float32
        rows[name] = torch.tensor([rows[name]], dtype=dtype)
    return Case(**rows)


@pytest.mark.parametrize(
    ("changes", "predicts", "path"),
    [
        pytest.param({"coins": [0.5, 0.5, 0, 0]}, [1, 3, -1, 3], [0, 1, 3, -1], id="both"),
        pytest.param({"coins": [0.625, 0, 0, 0]}, [2, -1, 1, -1], [0, 2, -1, -1], id="sibling"),
        pytest.param({"coins": [0.875, 0, 0, 0]}, [0, -1, -1, -1], [0, -1, -1, -1], id="neither"),
        pytest.param(
            {"coins": [0.5, 0.625, 0, 0]}, [1, 2, -1, -1], [0, 1, -1, -1], id="child-rejected"
        ),
        pytest.param({"max_accept": 1}, [1, -1, -1, -1], [0], id="root-alone"),
        pytest.param({"max_accept": 2}, [1, 3, -1, -1], [0, 1], id="no-more-room"),
        pytest.param(
            {"candidates": [9, 1, 1, 3], "coins": [0.625, 0, 0, 0], "coins_for_final": 0.25},
            [0, -1, -1, -1], [0, -1, -1, -1], id="a-token-counts-once",
        ),
        pytest.param(
            {"candidates": [9, 3, 1, 3], "coins": [0.0, 0, 0, 0]},
            [1, -1, 1, -1], [0, 2, -1, -1], id="probability-zero-at-coin-zero",
        ),
        pytest.param(
            {"candidates": [9, -1, 4, 3]}, [1, -1, -1, -1], [0, -1, -1, -1], id="no-tokens"
        ),
        pytest.param(
            {"coins": [0.75, 0.75, 0, 0], "threshold_single": 0.5},
            [1, 3, -1, 3], [0, 1, 3, -1], id="threshold-single",
        ),
        pytest.param(
            {"coins": [0.9375, 0.9375, 0, 0], "threshold_acc": 0.5},
            [1, 3, -1, 3], [0, 1, 3, -1], id="threshold-acc",
        ),
        pytest.param(
            {"retrieve_index": [-1, 1, 2, 3]}, [-1] * 4, [-1] * 4, id="root-nowhere"
        ),
        pytest.param(
            {"retrieve_index": [0, 4, 2, 3]}, [1, -1, -1, -1], [0, -1, -1, -1],
            id="child-nowhere",
        ),
        pytest.param(
            {"retrieve_next_token": [1, 9, -1, -1]}, [1, 3, -1, -1], [0, 1, -1, -1],
            id="child-out-of-range",
        ),
        pytest.param(
            {"retrieve_next_sibling": [-1, 1, -1, -1], "coins": [0.75, 0, 0, 0]},
            [2, -1, -1, -1], [0, -1, -1, -1], id="siblings-in-a-circle",
        ),
        pytest.param(
            {"max_accept": 1, "coins_for_final": ALMOST_ONE}, [2, -1, -1, -1], [0], id="last-coin"
        ),
        pytest.param(
            {"max_accept": 1, "target_probs": [[0.0, 0, 0.5, 0]] * 4, "coins_for_final": 0.0},
            [2, -1, -1, -1], [0], id="first-coin",
        ),
        pytest.param(
            {"max_accept": 1, "target_probs": [[0.0] * 4] * 4}, [0, -1, -1, -1], [0], id="no-mass"
        ),
        pytest.param(
            {"max_accept": 1, "target_probs": [[-9.0, float("nan"), -1, 0.5]] * 4},
            [3, -1, -1, -1], [0], id="not-a-number",
        ),
        pytest.param(
            {"target_probs": [[0.0, 0.25, 0.5, 0]] * 4, "coins": [0.875, 0, 0, 0]},
            [2, -1, -1, -1], [0, -1, -1, -1], id="all-rejected",
        ),
        pytest.param(
            {"target_probs": [[2.0**-45, 0.25, 0.5, 2.0**-44]] * 4, "coins": [0.875, 0, 0, 0]},
            [3, -1, -1, -1], [0, -1, -1, -1], id="too-little-left",
        ),
    ],
)  # fmt: skip
def test_small_trees(changes: dict[str, Any], predicts: list[int], path: list[int]) -> None:
    case = _small(**changes)
    found = _run(case)
    assert found == [predicts, [path], [max(sum(i >= 0 for i in path) - 1, 0)]]
    check_outputs(list(VERIFY(*case)), case.expected())


@pytest.mark.parametrize(("wild", "least"), [(False, 500), (True, 100)])
def test_random_trees(wild: bool, least: int) -> None:
    rng = random.Random(7)  # noqa: S311
    accepted = sum(
        _check(draw_case(rng, rng.randint(0, 4), rng.randint(1, 12), rng.randint(1, 9), wild=wild))
        for _ in range(600)
    )
    assert accepted > least


@pytest.mark.parametrize(("n", "vocab"), [(33, 40), (129, 17), (5, 4097)])
def test_large_trees_and_vocabularies(n: int, vocab: int) -> None:
    _check(large_case(random.Random(8), 3, n, vocab))  # noqa: S311


def test_threads_give_what_one_gives() -> None:
    case = large_case(random.Random(9), 5, 2, 40_000)  # noqa: S311
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = _run(case)
        torch.set_num_threads(3)
        assert _run(case) == want
    finally:
        torch.set_num_threads(before)


def test_one_hot_is_greedy() -> None:
    rng = random.Random(10)  # noqa: S311
    accepted = 0
    for i in range(300):
        case = draw_case(rng, 3, rng.randint(1, 9), 3, wild=i % 2 == 1)
        size, n = case.candidates.shape
        target = torch.tensor([rng.randrange(3) for _ in range(size * n)])
        inside = (case.retrieve_index // n) == torch.arange(size)[:, None]
        # The greedy rule looks a node's token up at its place.
        node_target = target[case.retrieve_index.where(inside, 0)]
        tree = tuple(
            t.where((t >= 0) & (t < 3), 9) if not j else t for j, t in enumerate(case[:4])
        )
        want = torchvm.verify_tree_greedy(*tree, target.view(size, n), max_accept=case.max_accept)  # type: ignore[misc, arg-type]
        probs = torch.nn.functional.one_hot(node_target, 3).float()
        found = VERIFY_AS_USERS_DO(
            *tree, probs, case.coins, case.coins_for_final, max_accept=case.max_accept
        )
        assert isinstance(found, torchvm.Verification)
        assert all(map(torch.equal, found, want))
        accepted += int(found.accept_token_num.sum())
    assert accepted > 200


def test_numbers_that_are_no_probabilities() -> None:
    """Whatever there is, a token comes out that exists and, if one can, has a probability."""
    rng = random.Random(13)  # noqa: S311
    for _ in range(200):
        case = draw_case(rng, 4, 4, 5)
        for tensor in (case.target_probs, case.coins, case.coins_for_final):
            odd = torch.tensor([rng.choice(ODD) for _ in range(tensor.numel())])
            tensor.copy_(odd.view(tensor.shape))
        predicts, accept_index, _ = VERIFY(*case)
        for place in accept_index[accept_index >= 0].tolist():
            row, token = case.target_probs.view(16, 5)[place], int(predicts[place])
            assert 0 <= token < 5
            assert row[token] > 0 or (token == 0 and not (row > 0).any())


@pytest.mark.parametrize("size", [0, 1, 3])
def test_opcheck(size: int) -> None:
    case = draw_case(random.Random(2), size, 5, 6)  # noqa: S311
    torch.library.opcheck(VERIFY, tuple(case))
    strided = [t.mT.contiguous().mT if t.dim() > 1 else t for t in case[:7]]
    assert size < 2 or not strided[0].is_contiguous()
    torch.library.opcheck(VERIFY, (*strided, 3, 0.5, 0.25))
    assert all(map(torch.equal, VERIFY(*strided, 3), VERIFY(*case[:7], 3)))


def test_fake_keeps_sizes_symbolic() -> None:
    fake = FakeTensorMode(shape_env=ShapeEnv())
    case = draw_case(random.Random(2), 3, 5, 6)  # noqa: S311
    inputs = [fake.from_tensor(tensor, static_shapes=False) for tensor in case[:7]]
    with fake:
        predicts, accept_index, accepted = VERIFY(*inputs, 4)
    size, n = inputs[0].shape
    assert isinstance(size, torch.SymInt)
    assert str(predicts.shape[0]) == str(size * n)
    assert [str(s) for s in accept_index.shape] == [str(size), "4"]
    assert [str(s) for s in accepted.shape] == [str(size)]


def test_compiles_once_for_every_size() -> None:
    def step(logits: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        probs = torchvm.sampling_probs(logits, temperature=0.7, top_k=3, top_p=0.9)
        return tuple(VERIFY_AS_USERS_DO(*rest[:4], probs, *rest[4:], max_accept=3))

    compiled = torch.compile(step, dynamic=True, fullgraph=True, backend="aot_eager")
    with torch.compiler.set_stance("default"), torch._dynamo.config.patch(error_on_recompile=True):
        for size, n, vocab in ((3, 5, 6), (4, 7, 9), (2, 3, 5)):
            case = draw_case(random.Random(size), size, n, vocab)  # noqa: S311
            inputs = (case.target_probs.log(), *case[:4], *case[5:7])
            assert all(map(torch.equal, compiled(*inputs), step(*inputs)))


@pytest.mark.parametrize("place", range(7))
def test_refusals(place: int) -> None:
    inputs = list(draw_case(random.Random(2), 3, 5, 6)[:7])  # noqa: S311
    name, tensor = Case._fields[place], inputs[place]
    wrong = tensor.int() if place < 4 else tensor.double()
    kind = "int64, got torch.int32" if place < 4 else "float32, got torch.float64"
    for changed, message in (
        (wrong, f"{name} must be torch.{kind}"),
        (tensor[None], f"{name} must be {tensor.dim()}-D, got"),
        (tensor[:2], r"must be of shape \[[32]"),
    ):
        arguments: list[Any] = [*inputs[:place], changed, *inputs[place + 1 :]]
        with pytest.raises(ValueError, match=message):
            VERIFY(*arguments, 3)
        with FakeTensorMode() as fake, pytest.raises(ValueError, match=message):
            VERIFY(*map(fake.from_tensor, arguments), 3)


def test_refused_numbers() -> None:
    inputs = draw_case(random.Random(2), 3, 5, 6)[:7]  # noqa: S311
    with pytest.raises(ValueError, match="max_accept must be >= 1, got 0"):
        VERIFY(*inputs, 0)
    for name in ("threshold_single", "threshold_acc"):
        for value in (0.0, -1.0, 1.5, float("nan")):
            with pytest.raises(ValueError, match=rf"{name} must be in \(0, 1\], got"):
                VERIFY(*inputs, 3, **{name: value})
    empty = [*inputs[:4], inputs[4][..., :0], *inputs[5:]]
    with pytest.raises(ValueError, match="target_probs must be of 1 to 4194304 tokens, got 0"):
        VERIFY(*empty, 3)
