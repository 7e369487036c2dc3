"""What test_triton_interpreter.py runs under TRITON_INTERPRET=1 of the readers of the prefix."""

from __future__ import annotations

import os

import pytest
import torch

from tests import prefix_launches
from torchvm.ops.kernels import triton_launch

CPU = torch.device("cpu")
# The interpreter multiplies the bits of bfloat16 as if they were integers.
DTYPES = (torch.float32, torch.float16)
assert os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.parametrize(
    ("n", "dim", "rounds"), [(1, 16, 5), (5, 16, 10), (17, 24, 3), (8, 64, 4), (3, 300, 2)]
)
def test_attention(n: int, dim: int, rounds: int) -> None:
    prefix_launches.check_attention(CPU, n, dim, DTYPES, rounds)


def test_hidden_keys_and_values_may_be_anything() -> None:
    prefix_launches.check_poison(CPU)


def test_arguments_that_are_garbage() -> None:
    prefix_launches.check_garbage(CPU)


def test_offsets_above_int32() -> None:
    prefix_launches.check_above_int32(CPU)


def test_packing() -> None:
    prefix_launches.check_packing(CPU, 30)


@pytest.mark.parametrize("programs", [1, 5, 64])
def test_any_number_of_programs_packs(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "INTERPRETED_PROGRAMS", programs)
    triton_launch.num_programs.cache_clear()
    assert triton_launch.num_programs(CPU) == programs
    prefix_launches.check_packing(CPU, 6)
    monkeypatch.undo()
    triton_launch.num_programs.cache_clear()


def test_results_that_are_too_small() -> None:
    prefix_launches.check_small_results(CPU)
