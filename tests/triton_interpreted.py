"""What test_triton_interpreter.py runs in a process of its own, under TRITON_INTERPRET=1."""

from __future__ import annotations

import os

import pytest
import torch

from tests import launches
from tests.trees import SIZES
from torchvm.ops.kernels import triton_launch

CPU = torch.device("cpu")
assert os.environ.get("TRITON_INTERPRET") == "1"


def test_random_trees() -> None:
    launches.check_random_trees(CPU, 2000)


@pytest.mark.parametrize("n", SIZES)
def test_every_change_of_layout(n: int) -> None:
    launches.check_size(CPU, n, size=2 if n <= 129 else 1)


def test_malformed_trees() -> None:
    launches.check_malformed_trees(CPU, 80)


def test_parent_rows() -> None:
    launches.check_parent_rows(CPU, 50)


def test_small_buffers() -> None:
    launches.check_small_buffers(CPU, 60)


def test_lengths_out_of_range() -> None:
    launches.check_lengths_out_of_range(CPU)


def test_rows_out_of_order() -> None:
    launches.check_rows_out_of_order(CPU, 30)


def test_verifications() -> None:
    launches.check_verifications(CPU, 200)


def test_selections() -> None:
    launches.check_selections(CPU, 120)


@pytest.mark.parametrize("programs", [1, 5, 64])
def test_any_number_of_programs_does_the_work(
    programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_launch, "INTERPRETED_PROGRAMS", programs)
    triton_launch.num_programs.cache_clear()
    assert triton_launch.num_programs(CPU) == programs
    launches.check_size(CPU, 33, size=3)
    monkeypatch.undo()
    triton_launch.num_programs.cache_clear()
