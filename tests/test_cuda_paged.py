"""Attention without a mask on a GPU: equal to the CPU, no host sync, captured in graphs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from tests import paged_launches as launches
from tests.attention_reference import make_case, write_mask
from tests.maskless_cases import draw_paged
from tests.maskless_launches import check_equal, to_device
from torchvm.ops import paged_attention, tree_pages
from torchvm.ops.layout import TreeMaskMode

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that this PyTorch can use"),
]

GPU = torch.device("cuda")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("seen", launches.SEEN, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_cpu(dtype: torch.dtype, seen: dict[str, Any]) -> None:
    launches.check_paged(GPU, dtype, seen)


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("dtype", DTYPES)
def test_widths_of_large_models(dtype: torch.dtype, head_dim: int) -> None:
    case = draw_paged(
        [300, 0, 77], 4, heads=16, kv_heads=2, head_dim=head_dim, page_size=64, dtype=dtype
    )._replace(scale=head_dim**-0.5)
    check_equal(launches.run(case, GPU), paged_attention._cpu(*case), dtype)


def test_outputs_are_written() -> None:
    launches.check_outputs_are_written(GPU)


def test_lengths_and_pages_out_of_range() -> None:
    launches.check_out_of_range(GPU)
    launches.check_a_page_that_does_not_exist(GPU)


def test_strided_inputs_and_empty_batches() -> None:
    launches.check_strided(GPU)
    launches.check_empty(GPU)


@pytest.mark.parametrize("mode", list(TreeMaskMode))
def test_pages_of_trees_equal_the_cpu_and_never_wait(mode: TreeMaskMode) -> None:
    case = make_case([5, 0, 37], 9, page_size=4)
    arguments = (write_mask(case, mode), case.seq_lens, case.page_table, 9, 4, int(mode))
    moved = to_device(arguments, GPU)
    tree_pages._cuda(*moved)
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # PyTorch warns that this mode is a prototype.
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        found = tree_pages._cuda(*moved)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    for mine, other in zip(found, tree_pages._cpu(*arguments), strict=True):
        assert torch.equal(mine.cpu(), other)


def test_is_captured_once_for_any_lengths() -> None:
    case = draw_paged([40, 20, 33], 5, window=64)
    moved = to_device(case, GPU)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        paged_attention._cuda(*moved)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = paged_attention._cuda(*moved)
    for lengths in ([0, 0, 0], [40, 20, 33], [3, 20, 1], [17, 0, 33]):
        case.kv_lens.copy_(torch.tensor(lengths))
        moved[4].copy_(case.kv_lens)
        graph.replay()
        check_equal(found, paged_attention._cpu(*case), torch.float32)
