"""Attention that reads no mask on a GPU: equal to the CPU, no host sync, captured in graphs."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import pytest
import torch

from tests import maskless_launches as launches
from tests.maskless_cases import draw_linear, draw_mla, draw_parents, draw_sparse
from torchvm.ops import linear_attention, mla_attention, sparse_attention

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that this PyTorch can use"),
]

GPU = torch.device("cuda")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kernel_equals_the_cpu(dtype: torch.dtype) -> None:
    launches.check_mla(GPU, dtype)
    launches.check_sparse(GPU, dtype)
    launches.check_linear(GPU, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_widths_of_large_models(dtype: torch.dtype) -> None:
    latent = draw_mla(
        [300, 0, 77], 4, heads=16, rank=512, rope=64, page_size=64, dtype=dtype
    )._replace(scale=576**-0.5)
    found = mla_attention._cuda(*launches.to_device(latent, GPU))
    launches.check_equal([found], [mla_attention._cpu(*latent)], dtype)
    sparse = draw_sparse(
        [300, 0], 4, window=128, heads=64, kv_heads=1, head_dim=512, num_blocks=80,
        num_selected=64, page_size=64, dtype=dtype,
    )._replace(scale=512**-0.5)  # fmt: skip
    found = sparse_attention._cuda(*launches.to_device(sparse, GPU))
    launches.check_equal([found], [sparse_attention._cpu(*sparse)], dtype)
    linear = draw_linear(
        draw_parents(4, 64, seed=1), heads=4, key_width=256, value_width=128, dtype=dtype
    )._replace(scale=256**-0.5)
    states = linear_attention._cuda(*launches.to_device(linear, GPU))
    launches.check_equal(states, linear_attention._cpu(*linear), dtype)


def test_wild_links() -> None:
    launches.check_wild_links(GPU, 300)


def test_lengths_out_of_range() -> None:
    launches.check_lengths_out_of_range(GPU)


def test_a_node_that_sees_nothing() -> None:
    launches.check_a_node_that_sees_nothing(GPU)


def test_strided_inputs_and_empty_batches() -> None:
    launches.check_strided(GPU)
    launches.check_empty(GPU)


def test_opcheck() -> None:
    for name, case in (
        ("mla_attention", draw_mla([3, 0], 3)),
        ("sparse_window_attention", draw_sparse([3, 0], 3)),
        ("gated_delta_tree", draw_linear(draw_parents(2, 5, seed=0))),
    ):
        op = getattr(torch.ops.torchvm, name).default
        torch.library.opcheck(op, tuple(launches.to_device(case, GPU)))


def test_a_step_is_captured_once_for_any_lengths_and_links_and_never_waits() -> None:
    """Lengths, positions and links change between replays; the caches hold the longest."""
    lengths, n = [40, 20, 33], 5
    latent, sparse = draw_mla(lengths, n), draw_sparse(lengths, n, window=64)
    linear = draw_linear(draw_parents(3, n, seed=0))
    on_gpu = [launches.to_device(case, GPU) for case in (latent, sparse, linear)]

    def step() -> list[Tensor]:
        return [
            torch.ops.torchvm.mla_attention(*on_gpu[0]),
            torch.ops.torchvm.sparse_window_attention(*on_gpu[1]),
            *torch.ops.torchvm.gated_delta_tree(*on_gpu[2]),
        ]

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
    for seed, shorter in enumerate(([0, 0, 0], [40, 20, 33], [3, 20, 1], [17, 0, 33])):
        latent.seq_lens.copy_(torch.tensor(shorter))
        sparse.positions.copy_(torch.tensor(shorter)[:, None] + torch.arange(n))
        links = draw_linear(draw_parents(3, n, seed=seed))[6:8]
        for mine, other in zip(linear[6:8], links, strict=True):
            mine.copy_(other)
        for gpu, case in zip(on_gpu, (latent, sparse, linear), strict=True):
            for target, source in zip(gpu, case, strict=True):
                if isinstance(source, torch.Tensor) and source.dtype == torch.int64:
                    target.copy_(source)
        graph.replay()
        want = [
            mla_attention._cpu(*latent),
            sparse_attention._cpu(*sparse),
            *linear_attention._cpu(*linear),
        ]
        launches.check_equal(found, want, torch.float32)
