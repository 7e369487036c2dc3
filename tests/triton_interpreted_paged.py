"""What test_triton_interpreter.py runs of attention without a mask, as triton_interpreted.py."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests import paged_launches as launches
from tests.maskless_cases import draw_paged

CPU = torch.device("cpu")
assert os.environ.get("TRITON_INTERPRET") == "1"


# The interpreter multiplies matrices of bfloat16 as integers: those are left to a GPU.
@pytest.mark.parametrize("seen", launches.SEEN, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention(dtype: torch.dtype, seen: dict[str, Any]) -> None:
    launches.check_paged(CPU, dtype, seen)


def test_outputs_are_written() -> None:
    launches.check_outputs_are_written(CPU)


def test_lengths_and_pages_out_of_range() -> None:
    launches.check_out_of_range(CPU)
    launches.check_a_page_that_does_not_exist(CPU)


def test_strided_inputs_and_empty_batches() -> None:
    launches.check_strided(CPU)
    launches.check_empty(CPU)


def test_widths_that_a_gpu_does_not_take_are_refused() -> None:
    with pytest.raises(ValueError, match="query must be of head_dim <= 512 on a GPU, got 514"):
        launches.run(draw_paged([1], 1, head_dim=514), CPU)
