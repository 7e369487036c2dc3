"""select_draft_candidates against the oracle, and its ties against the trees they make."""

from __future__ import annotations

import json
import math
import random
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests import oracle
from tests.test_tree import CASES
from tests.trees import num_candidates
from torchvm.ops.candidates import select_draft_candidates

if TYPE_CHECKING:
    from torch import Tensor

SELECT = torch.ops.torchvm.select_draft_candidates.default
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Levels(NamedTuple):
    """What a draft hands over, one tensor a level."""

    scores: list[Tensor]
    tokens: list[Tensor]
    parents: list[Tensor]

    def rows(self) -> list[list[float]]:
        """Scores of each request by candidate id."""
        return torch.cat([level.flatten(1) for level in self.scores], dim=1).tolist()


def _levels(scores: list[Tensor], dtype: torch.dtype = torch.float32) -> Levels:
    """Put numbered tokens and parents beside scores."""
    size, topk = scores[0].shape[0], scores[0].shape[2]
    widths = [topk, *[topk * topk] * (len(scores) - 1)]
    numbers = torch.arange(size * sum(widths)).view(size, sum(widths)) * 3
    tokens = list(numbers.split(widths, dim=1))
    parents = [torch.arange(-1, topk).repeat(size, 1)]
    parents += [torch.full((size, topk), level) for level in range(1, len(scores))]
    return Levels([level.to(dtype) for level in scores], tokens, parents)


def _random(size: int, topk: int, depth: int, draw: Any) -> list[Tensor]:
    return [
        torch.tensor(
            [[[draw() for _ in range(topk)] for _ in range(beams)] for _ in range(size)],
            dtype=torch.float64,
        ).view(size, beams, topk)
        for beams in (1, *[topk] * (depth - 1))
    ]


def _check(levels: Levels, n: int) -> None:
    """Compare with the oracle."""
    parent_list, selected, drafts = select_draft_candidates(*levels, num_draft_tokens=n)
    wanted = [oracle.select(row, n - 1) for row in levels.rows()]
    assert selected.tolist() == wanted
    tokens = torch.cat(levels.tokens, dim=1).tolist()
    assert drafts.tolist() == [
        [row[i] for i in ids] for row, ids in zip(tokens, wanted, strict=True)
    ]
    joined: list[list[int]] = [[] for _ in wanted]
    for level in levels.parents[:-1]:
        for row, more in zip(joined, level.tolist(), strict=True):
            row.extend(more)
    assert parent_list.tolist() == joined
    assert {t.dtype for t in (parent_list, selected, drafts)} == {torch.int64}


def test_a_child_that_ties_with_its_parent() -> None:
    scores = [torch.tensor([[[0.5, 0.25]]]), torch.tensor([[[0.5, 0.0], [0.25, 0.0]]])]
    picked = select_draft_candidates(*_levels(scores), num_draft_tokens=4)
    assert picked.selected_index.tolist() == [[0, 1, 2]]
    assert picked.draft_tokens.tolist() == [[0, 3, 6]]
    assert picked.parent_list.tolist() == [[-1, 0, 1]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_scores(dtype: torch.dtype) -> None:
    rng = random.Random(10)  # noqa: S311
    strange = (math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 5e-324, 1e-40, -1e-40, -3.0)
    draws = (
        rng.random,
        lambda: rng.choice((0.25, 0.5, 1.0)),
        lambda: rng.choice((*strange, rng.random(), -rng.random())),
        lambda: -rng.expovariate(0.1),
    )
    for _ in range(60):
        topk, depth, size = rng.randint(1, 6), rng.randint(1, 4), rng.randint(0, 4)
        levels = _levels(_random(size, topk, depth, rng.choice(draws)), dtype)
        most = num_candidates(topk, depth) + 1
        for n in {1, min(2, most), rng.randint(1, most), most}:
            _check(levels, n)


def test_large_trees() -> None:
    rng = random.Random(11)  # noqa: S311
    _check(_levels(_random(2, 16, 8, rng.random)), 1024)


def test_no_orphans_among_ties() -> None:
    """Cumulative products of 1 tie with their parents all the way up."""
    rng = random.Random(12)  # noqa: S311
    topk, depth, n = 4, 3, 8
    orphans = orphans_of_other_rule = 0
    for _ in range(300):
        scores, rows, beams = [], [[-1, *range(topk)]], [1.0]
        for level in range(depth):
            found = [
                [b * p for p in sorted(rng.choices((1.0, 0.5, 0.25, 0.0), k=topk), reverse=True)]
                for b in beams
            ]
            scores.append(torch.tensor([found]))
            flat = [p for row in found for p in row]
            best = sorted((-p, i) for i, p in enumerate(flat))[:topk]
            beams = [-p for p, _ in best]
            if level:
                rows.append([topk + topk * topk * (level - 1) + i for _, i in best])
        levels = _levels(scores)
        levels.parents[:] = [torch.tensor([row]) for row in rows]
        picked = select_draft_candidates(*levels, num_draft_tokens=n)
        beams_row = picked.parent_list[0].tolist()
        ids = picked.selected_index[0].tolist()
        orphans += oracle.parents_of_candidates(beams_row, ids, topk, depth)[1:].count(None)
        last = [p for level in scores for p in level.flatten().tolist()]
        late = sorted(-i for _, i in sorted((-p, -i) for i, p in enumerate(last))[: n - 1])
        others = oracle.parents_of_candidates(beams_row, late, topk, depth)
        orphans_of_other_rule += others[1:].count(None)
    assert orphans == 0
    assert orphans_of_other_rule > 100


@pytest.mark.skipif(not CASES.exists(), reason="the shared case file is not beside the project")
def test_shared_cases() -> None:
    cases = json.loads(CASES.read_text())["build_cases"]
    scored = [case for case in cases if "score_list" in case["inputs"]]
    assert scored
    for case in scored:
        inputs, wanted = case["inputs"], case["expected"]
        levels = Levels(
            [torch.tensor(level) for level in inputs["score_list"]],
            [torch.tensor(level) for level in inputs["token_list"]],
            [torch.tensor(level) for level in inputs["parents_list"]],
        )
        n = case["params"]["num_draft_tokens"]
        picked = select_draft_candidates(*levels, num_draft_tokens=n)
        assert picked.parent_list.tolist() == wanted["parent_list"]
        assert picked.selected_index.tolist() == wanted["selected_index"]
        bonus = torch.tensor(inputs["bonus_tokens"]).unsqueeze(1)
        flat = torch.cat([bonus, picked.draft_tokens], dim=1).flatten()
        assert flat.tolist() == wanted["draft_tokens_flat_with_bonus"]


def test_int32_ids_are_converted_by_the_function_alone() -> None:
    levels = _levels(_random(2, 2, 2, random.Random(13).random))  # noqa: S311
    short = Levels(
        levels.scores, [t.int() for t in levels.tokens], [t.int() for t in levels.parents]
    )
    want = select_draft_candidates(*levels, num_draft_tokens=4)
    found = select_draft_candidates(*short, num_draft_tokens=4)
    assert all(map(torch.equal, found, want))
    with pytest.raises(ValueError, match=r"token_list\[0\] must be torch.int64, got torch.int32"):
        SELECT(*short, 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "depth", "n"), [(0, 2, 3), (1, 1, 2), (3, 3, 6), (3, 2, 1)])
def test_opcheck(dtype: torch.dtype, size: int, depth: int, n: int) -> None:
    rng = random.Random(14)  # noqa: S311
    levels = _levels(_random(size, 3, depth, rng.random), dtype)
    torch.library.opcheck(SELECT, (*levels, n))
    strided = Levels(*([t.mT.contiguous().mT for t in part] for part in levels))
    assert size < 2 or not strided.tokens[0].is_contiguous()
    torch.library.opcheck(SELECT, (*strided, n))
    assert all(map(torch.equal, SELECT(*levels, n), SELECT(*strided, n)))


def test_fake_keeps_sizes_symbolic() -> None:
    fake = FakeTensorMode(shape_env=ShapeEnv())
    levels = _levels(_random(3, 4, 3, random.random))
    inputs = [[fake.from_tensor(t, static_shapes=False) for t in part] for part in levels]
    with fake:
        parent_list, selected, drafts = SELECT(*inputs, 6)
    size, topk = inputs[1][0].shape
    assert isinstance(topk, torch.SymInt)
    assert str(parent_list.shape[1]) == str(2 * topk + 1)
    assert [str(s) for s in selected.shape] == [str(size), "5"] == [str(s) for s in drafts.shape]


def test_refusals() -> None:
    good = _levels(_random(2, 2, 2, random.random))
    scores, tokens, parents = good
    for changed, n, message in (
        ((scores, tokens, parents), 8, r"num_draft_tokens must be <= 7, .* 2 levels of topk 2"),
        ((scores, tokens, parents), 0, r"num_draft_tokens must be >= 1, got 0"),
        ((scores, tokens[:1], parents), 3, r"token_list must have as many levels .* 2, got 1"),
        ((scores, tokens, parents[:1]), 3, r"parents_list must have as many levels .* got 1"),
        (([s.long() for s in scores], tokens, parents), 3, r"score_list\[0\] must be floating"),
        (([scores[0], scores[1].half()], tokens, parents), 3, r"score_list\[1\] must be torch.fl"),
        (([scores[0][0], scores[1]], tokens, parents), 3, r"score_list\[0\] must be 3-D, got 2-D"),
        (([scores[0], scores[1][:, :1]], tokens, parents), 3, r"score_list\[1\] .*\[2, 1, 2\]"),
        ((scores, [tokens[0], tokens[0]], parents), 3, r"token_list\[1\] must be of shape"),
        ((scores, tokens, [parents[1], parents[1]]), 3, r"parents_list\[0\] must be of shape"),
    ):
        with pytest.raises(ValueError, match=message):
            SELECT(*changed, n)
        with pytest.raises(ValueError, match=message):
            select_draft_candidates(*changed, num_draft_tokens=n)
    with pytest.raises(ValueError, match="score_list must have at least one level"):
        select_draft_candidates([], [], [], num_draft_tokens=1)


def test_inside_a_compiled_function() -> None:
    levels = _levels(_random(2, 3, 2, random.Random(15).random))  # noqa: S311

    @torch.compile(backend="eager", fullgraph=True)
    def step(*parts: list[Tensor]) -> tuple[Tensor, ...]:
        return select_draft_candidates(*parts, num_draft_tokens=5)

    want = select_draft_candidates(*levels, num_draft_tokens=5)
    assert all(map(torch.equal, step(*levels), want))
