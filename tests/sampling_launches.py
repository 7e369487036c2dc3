"""Checks of the sampling kernel's launcher: on a GPU, or under Triton's interpreter."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

from tests.buffers import check_outputs
from tests.sampling_cases import Case, draw_case, large_case, poisoned_outputs
from torchvm.ops import sampling

if TYPE_CHECKING:
    from collections.abc import Iterable

ODD = (0.0, 1.0, 2.0, -1.0, float("inf"), float("-inf"), float("nan"), 2.0**-149, 2.0**-45)


def check_case(case: Case, device: torch.device, *, exact: bool = True) -> None:
    """Compare a launch with the CPU, and with the oracle unless probabilities are odd."""
    with poisoned_outputs():
        found = [t.cpu() for t in sampling._cuda(*case.to(device))]
    for mine, other in zip(found, sampling._cpu(*case), strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)
    if exact:
        check_outputs(found, case.expected())


def check_random(device: torch.device, launches: int) -> None:
    """Trees, well formed and not."""
    rng = random.Random(11)  # noqa: S311
    for i in range(launches):
        n, vocab = rng.randint(1, 12), rng.randint(1, 9)
        check_case(draw_case(rng, rng.randint(0, 3), n, vocab, wild=i % 2 == 1), device)


def check_large(device: torch.device, vocabs: Iterable[int]) -> None:
    """Vocabularies of one tile and of many, the last of which is not full."""
    rng = random.Random(12)  # noqa: S311
    for vocab in vocabs:
        check_case(large_case(rng, 3, 5, vocab), device)


def check_odd_numbers(device: torch.device, launches: int) -> None:
    """Probabilities and coins that are none: the same token as on the CPU, and one there is."""
    rng = random.Random(13)  # noqa: S311
    for _ in range(launches):
        case = draw_case(rng, 4, 4, 5)
        for tensor in (case.target_probs, case.coins, case.coins_for_final):
            odd = torch.tensor([rng.choice(ODD) for _ in range(tensor.numel())])
            tensor.copy_(odd.view(tensor.shape))
        check_case(case, device, exact=False)


def check_nothing_left(device: torch.device) -> None:
    """Every positive probability is a rejected child's, or too small to be drawn by."""
    rng = random.Random(14)  # noqa: S311
    case = draw_case(rng, 6, 3, 5)
    rows = torch.tensor(
        [
            [0.5, 0.25, 0.0, 0.0, 0.0],
            [0.25, 0.5, 0.0, 0.0, 0.0],
            [0.5, 0.25, 0.0, 2.0**-45, 2.0**-44],
            [0.5, 0.25, 2.0**-44, 2.0**-44, 0.0],
            [0.0] * 5,
            [2.0**-149] * 5,
        ]
    )
    case = case._replace(
        candidates=torch.tensor([[0, 0, 1]] * 6), target_probs=rows[:, None].repeat(1, 3, 1),
        retrieve_next_token=torch.tensor([[1, -1, -1]] * 6),
        retrieve_next_sibling=torch.tensor([[-1, 2, -1]] * 6),
        coins=torch.full((6, 3), 0.875), max_accept=3, threshold_single=1.0, threshold_acc=1.0,
    )  # fmt: skip
    check_case(case, device)
    found = sampling._cuda(*case.to(device))[0].view(6, 3)
    assert found[:, 0].tolist() == [0, 1, 4, 2, 0, 2]


def check_strided(device: torch.device) -> None:
    """Inputs that are no contiguous tensors."""
    rng = random.Random(15)  # noqa: S311
    case = draw_case(rng, 3, 5, 6)
    strided = [t.mT.contiguous().mT if t.dim() > 1 else t for t in case[:7]]
    assert not strided[0].is_contiguous()
    check_case(Case._make([*strided, *case[7:]]), device)
