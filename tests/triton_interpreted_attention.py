"""What test_triton_interpreter.py runs of attention, under TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from tests import attention_launches as launches
from tests.attention_reference import FULL, PACKED, QLEN, make_case, write_mask
from torchvm.ops import attention
from torchvm.ops.kernels import triton_attention, triton_launch

CPU = torch.device("cpu")
assert os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(autouse=True)
def _products_of_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter multiplies the bits of bfloat16 as integers; give it their values."""
    usual = interpreter.InterpreterBuilder.create_dot

    def values(handle: Any) -> Any:
        if handle.dtype != tl.bfloat16:
            return handle
        floats = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(floats, tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return usual(self, values(a), values(b), *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.parametrize("n", launches.SIZES)
def test_every_size(n: int) -> None:
    launches.check_size(CPU, n, (1, 2, 5) if n <= 7 else (1, 3))


def test_every_mode_with_every_option() -> None:
    launches.check_options(CPU, 3)


def test_any_block_of_cells() -> None:
    launches.check_any_block(CPU)


def test_hidden_values() -> None:
    launches.check_hidden_values(CPU)


def test_pages_out_of_range() -> None:
    launches.check_pages_out_of_range(CPU)


def test_lengths_out_of_range() -> None:
    launches.check_lengths_out_of_range(CPU)


def test_small_masks() -> None:
    launches.check_small_masks(CPU)


def test_strides() -> None:
    launches.check_strides(CPU)


def test_more_requests_than_one_scan_of_lengths() -> None:
    launches.check_many_requests(CPU, 258)


@pytest.mark.parametrize("mode", [FULL, QLEN, PACKED])
def test_what_the_op_runs_on_a_gpu_gives_what_it_gives_on_the_cpu(mode: int) -> None:
    case = make_case([20, 0, 3], 6, page_size=4)
    for causal in (False, True):
        mask = None if causal else write_mask(case, mode)
        args = (*case[:5], mask, int(mode), causal, 0.3, 7, 20.0)
        found, expected = attention._cuda(*args), attention._cpu(*args)
        torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


def test_shares_follow_the_device_and_not_the_lengths() -> None:
    tile = triton_attention.attention_tile(16, 64, 2)
    assert triton_launch.INTERPRETED_PROGRAMS == 3
    shares = [triton_attention.num_shares(tile, programs, 999, CPU) for programs in (1, 2, 3, 4)]
    assert shares == [3, 1, 1, 1]
    assert triton_attention.num_shares(tile, 1, 2 * tile.KEYS, CPU) == 2
    assert triton_attention.num_shares(tile, 1, 0, CPU) == 1


def test_a_table_that_covers_too_many_positions_is_refused() -> None:
    case = make_case([2], 1, page_size=4)
    table = torch.zeros(1, 1, dtype=torch.int32).expand(1, 2**29)
    with pytest.raises(ValueError, match="page_table must be of rows of at most"):
        launches.launch(case._replace(page_table=table), None, launches.CHAIN, CPU)


def test_an_empty_batch() -> None:
    case = make_case([2], 3)
    empty = case._replace(
        query=case.query[:0], page_table=case.page_table[:0], seq_lens=case.seq_lens[:0]
    )
    assert launches.launch(empty, None, launches.CHAIN, CPU).shape == (0, 3, 6, 16)
