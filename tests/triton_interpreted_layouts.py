"""Builds of every size in every layout, interpreted; see triton_interpreted.py."""

from __future__ import annotations

import pytest
import torch

from tests import launches
from tests.trees import SIZES

CPU = torch.device("cpu")


@pytest.mark.parametrize("n", SIZES)
def test_every_change_of_layout(n: int) -> None:
    launches.check_size(CPU, n, size=2 if n <= 129 else 1)
