"""Verification by sampling on a GPU: equal to oracle and CPU, no host sync, captured in graphs."""

from __future__ import annotations

import random
import warnings
from typing import TYPE_CHECKING

import pytest
import torch

from tests import sampling_launches as launches
from tests.sampling_cases import draw_case, large_case
from torchvm.ops import sampling

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that this PyTorch can use"),
]

GPU = torch.device("cuda")
VERIFY = torch.ops.torchvm.verify_tree_sampling.default


def test_random_trees() -> None:
    launches.check_random(GPU, 500)


def test_large_vocabularies() -> None:
    launches.check_large(GPU, (255, 256, 257, 4096, 4097, 50_000))


@pytest.mark.parametrize("n", [64, 129, 1024])
def test_large_trees(n: int) -> None:
    launches.check_case(large_case(random.Random(1), 2, n, 40), GPU)  # noqa: S311


def test_odd_numbers() -> None:
    launches.check_odd_numbers(GPU, 300)


def test_nothing_left() -> None:
    launches.check_nothing_left(GPU)


def test_strided() -> None:
    launches.check_strided(GPU)


def test_opcheck() -> None:
    torch.library.opcheck(VERIFY, tuple(draw_case(random.Random(2), 3, 5, 6).to(GPU)))  # noqa: S311


def test_a_step_is_captured_once_and_never_waits() -> None:
    """Probabilities, links and coins change between replays."""
    rng = random.Random(3)  # noqa: S311
    case = draw_case(rng, 4, 6, 300)._replace(max_accept=4)
    on_gpu = case.to(GPU)

    def step() -> tuple[Tensor, ...]:
        return tuple(VERIFY(*on_gpu))

    step()
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # PyTorch warns that this mode is a prototype.
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for wild in (False, True, False):
        other = draw_case(rng, 4, 6, 300, wild=wild)
        for target, source in zip(on_gpu[:7], other[:7], strict=True):
            target.copy_(source)
        graph.replay()
        want = sampling._cpu(*other[:7], *case[7:])
        assert all(
            torch.equal(mine.cpu(), theirs) for mine, theirs in zip(found, want, strict=True)
        )
