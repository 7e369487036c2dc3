"""Tokens that verify_tree_sampling emits are distributed as the target's own, by chi-square."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from tests import oracle
from tests.sampling_reference import Wrong, verify_sampling
from torchvm.ops.sampling import verify_tree_sampling
from torchvm.sampling import sampling_probs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    Verify = Callable[..., Sequence[Tensor]]

VOCAB, SIZE, ROOT = 6, 20_000, 0

# Parents and tokens of the nodes.
DRAFTS = {
    "chain": ([-1, 0, 1, 2], [ROOT, 2, 4, 1]),
    "tree": ([-1, 0, 0, 0, 1, 1, 2, 2, 4], [ROOT, 1, 3, 4, 0, 2, 5, 3, 1]),
    "equal siblings": ([-1, 0, 0, 0, 1, 1, 3, 3], [ROOT, 1, 1, 3, 2, 2, 0, 5]),
}
PROCESSED = {
    "as they are": {"temperature": 1.0},
    "temperature": {"temperature": 0.7},
    "top-p": {"temperature": 0.8, "top_p": 0.8},
    "top-k": {"temperature": 1.3, "top_k": 4},
    "all three": {"temperature": 0.9, "top_p": 0.85, "top_k": 5},
}


class Fit(NamedTuple):
    """How well counts fit a distribution."""

    statistic: float
    degrees: int
    p: float


def chi_square(tokens: Tensor, probs: Tensor) -> Fit:
    """Test samples against a distribution; one that it excludes fits not at all."""
    counts = torch.bincount(tokens, minlength=probs.numel()).double()
    expected = probs.double() / probs.double().sum() * tokens.numel()
    possible = expected > 0
    assert expected[possible].min() >= 5
    degrees = int(possible.sum()) - 1
    if counts[~possible].any():
        return Fit(float("inf"), degrees, 0.0)
    terms = (counts - expected).square() / expected
    statistic = terms[possible].sum()
    tail = torch.special.gammaincc(torch.tensor(degrees / 2).double(), statistic / 2)
    return Fit(float(statistic), degrees, float(tail))


def transitions(**options: float) -> Tensor:
    """(V, V), the target's distribution of the token after each token."""
    logits = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3))
    return sampling_probs(logits, **options)  # type: ignore[arg-type]


def two_tokens(
    verify: Verify, target: Tensor, parents: list[int], tokens: Tensor, seed: int
) -> Tensor:
    """The first two tokens of SIZE requests as one number; a second step adds what is missing."""
    generator = torch.Generator().manual_seed(seed)
    n = len(parents)
    tree = oracle.tree(oracle.parents_of_nodes(parents), n)
    links = [torch.tensor([row]).repeat(SIZE, 1) for row in (tree.next_token, tree.next_sibling)]
    index = torch.arange(SIZE * n).view(SIZE, n)
    coins, final = torch.rand(SIZE, n, generator=generator), torch.rand(SIZE, generator=generator)
    predicts, accepted, count = verify(
        tokens, index, *links, target[tokens], coins, final, max_accept=n
    )
    first = predicts.view(SIZE, n)[:, 0].long()
    none, root = torch.full((SIZE, 1), -1), torch.arange(SIZE)[:, None]
    coins, final = torch.rand(SIZE, 1, generator=generator), torch.rand(SIZE, generator=generator)
    step = verify(
        first[:, None], root, none, none, target[first][:, None], coins, final, max_accept=1
    )
    second = torch.where(count > 0, predicts[accepted[:, 1].clamp(min=0)], step[0])
    assert predicts.dtype == torch.int32
    return first * VOCAB + second


def fits(verify: Verify, target: Tensor, draft: str, seed: int) -> tuple[Fit, Fit]:
    """Chi-square of the first token and of the first two."""
    parents, nodes = DRAFTS[draft]
    both = two_tokens(verify, target, parents, torch.tensor([nodes]).repeat(SIZE, 1), seed)
    joint = target[ROOT][:, None] * target
    return chi_square(both // VOCAB, target[ROOT]), chi_square(both, joint.view(-1))


@pytest.mark.parametrize("options", PROCESSED.values(), ids=PROCESSED)
@pytest.mark.parametrize("draft", DRAFTS)
def test_tokens_are_the_targets(draft: str, options: dict[str, float]) -> None:
    for fit in fits(verify_tree_sampling, transitions(**options), draft, seed=17):
        assert fit.p > 0.001, fit


def test_drafts_that_are_drawn_from_another_model() -> None:
    target = transitions(temperature=1.0)
    generator = torch.Generator().manual_seed(5)
    draft = torch.randn(VOCAB, VOCAB, generator=generator).softmax(-1)
    parents, nodes = [-1, 0, 0, 1, 1, 2], [torch.full((SIZE,), ROOT)]
    for parent in parents[1:]:
        nodes.append(torch.multinomial(draft[nodes[parent]], 1, generator=generator)[:, 0])
    both = two_tokens(verify_tree_sampling, target, parents, torch.stack(nodes, 1), seed=6)
    assert chi_square(both // VOCAB, target[ROOT]).p > 0.001
    assert chi_square(both, (target[ROOT][:, None] * target).view(-1)).p > 0.001


def _reference(wrong: Wrong | None) -> Verify:
    """The oracle, or a wrong rule, on tensors."""

    def verify(*inputs: Tensor, max_accept: int) -> list[Tensor]:
        rows: list[Any] = [tensor.tolist() for tensor in inputs]
        rule: Any = verify_sampling
        found = rule(*rows, max_accept=max_accept, wrong=wrong)
        return [torch.tensor(row, dtype=torch.int32) for row in found.values()]

    return verify


@pytest.mark.parametrize(
    ("wrong", "draft"),
    [
        ("a fresh coin for each sibling", "tree"),
        ("duplicates count twice", "equal siblings"),
        ("last token from all", "chain"),
        ("last token from all", "tree"),
    ],
)
def test_a_wrong_rule_does_not_fit(wrong: Wrong, draft: str) -> None:
    first, both = fits(_reference(wrong), transitions(temperature=1.0), draft, seed=17)
    assert first.p < 1e-6, first
    assert both.p < 1e-6, both


@pytest.mark.parametrize("threshold", ["threshold_single", "threshold_acc"])
def test_thresholds_below_one_lean_towards_the_drafts(threshold: str) -> None:
    def verify(*inputs: Tensor, max_accept: int) -> Sequence[Tensor]:
        return verify_tree_sampling(*inputs, max_accept=max_accept, **{threshold: 0.2})  # type: ignore[arg-type]

    target = transitions(temperature=1.0)
    assert fits(verify, target, "tree", seed=17)[0].p < 1e-6
