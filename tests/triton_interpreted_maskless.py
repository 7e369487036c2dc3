"""What test_triton_interpreter.py runs of the ops that read no mask, as triton_interpreted.py."""

from __future__ import annotations

import os

import pytest
import torch

from tests import maskless_launches as launches
from tests.maskless_cases import draw_linear, draw_mla, draw_sparse
from torchvm.ops import linear_attention, mla_attention, sparse_attention

CPU = torch.device("cpu")
assert os.environ.get("TRITON_INTERPRET") == "1"


# The interpreter multiplies matrices of bfloat16 as integers: those are left to a GPU.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention(dtype: torch.dtype) -> None:
    launches.check_mla(CPU, dtype)
    launches.check_sparse(CPU, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_gated_delta_rule(dtype: torch.dtype) -> None:
    launches.check_linear(CPU, dtype)


def test_wild_links() -> None:
    launches.check_wild_links(CPU, 16)


def test_lengths_out_of_range() -> None:
    launches.check_lengths_out_of_range(CPU)


def test_a_node_that_sees_nothing() -> None:
    launches.check_a_node_that_sees_nothing(CPU)


def test_strided_inputs_and_empty_batches() -> None:
    launches.check_strided(CPU)
    launches.check_empty(CPU)


def test_widths_that_a_gpu_does_not_take_are_refused() -> None:
    with pytest.raises(ValueError, match="query_latent must be at most 512 wide on a GPU, got 51"):
        mla_attention._cuda(*draw_mla([1], 1, heads=1, rank=513))
    with pytest.raises(ValueError, match="query_rope must be at most 128 wide on a GPU, got 130"):
        mla_attention._cuda(*draw_mla([1], 1, heads=1, rope=130))
    with pytest.raises(ValueError, match="query must be of head_dim <= 512 on a GPU, got 514"):
        sparse_attention._cuda(*draw_sparse([1], 1, head_dim=514))
    with pytest.raises(ValueError, match="key must be at most 256 wide on a GPU, got 257"):
        linear_attention._cuda(*draw_linear([[-1]], key_width=257))
