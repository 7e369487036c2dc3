"""What test_triton_interpreter.py runs of verification by sampling, as triton_interpreted.py."""

from __future__ import annotations

import os

import torch

from tests import sampling_launches as launches

CPU = torch.device("cpu")
assert os.environ.get("TRITON_INTERPRET") == "1"


def test_random_trees() -> None:
    launches.check_random(CPU, 80)


def test_large_vocabularies() -> None:
    launches.check_large(CPU, (300, 4096, 4097, 9000))


def test_odd_numbers() -> None:
    launches.check_odd_numbers(CPU, 20)


def test_nothing_left() -> None:
    launches.check_nothing_left(CPU)


def test_strided() -> None:
    launches.check_strided(CPU)
