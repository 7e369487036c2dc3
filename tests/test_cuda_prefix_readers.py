"""The readers of the prefix on a GPU: equal to the reference, no host sync, captured in graphs."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests import prefix_launches
from tests.prefix_reference import SCALE, Batch, bits, draw_batch, full_mask
from torchvm.ops.packed_attention import packed_attention
from torchvm.ops.packed_mask import pack_mask_bits
from torchvm.ops.unified_attention import unified_attention

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that this PyTorch can use"),
]

GPU = torch.device("cuda")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("n", [1, 5, 17, 65])
@pytest.mark.parametrize("dim", [16, 24, 64, 128, 256, 300])
def test_attention(n: int, dim: int) -> None:
    prefix_launches.check_attention(GPU, n, dim, DTYPES, 15)


def test_hidden_keys_and_values_may_be_anything() -> None:
    prefix_launches.check_poison(GPU)


def test_arguments_that_are_garbage() -> None:
    prefix_launches.check_garbage(GPU)


def test_packing() -> None:
    prefix_launches.check_packing(GPU, 200)


def test_packing_of_more_requests_than_one_scan_of_lengths() -> None:
    batch = draw_batch([i % 7 for i in range(600)], 3)
    octets, offsets = bits(batch)
    packed, indptr = pack_mask_bits(
        full_mask(batch).to(GPU), batch.seq_lens.to(GPU), num_draft_tokens=3, max_context_len=6
    )
    assert indptr.tolist() == offsets
    assert packed.tolist() == octets + [0] * (len(packed) - len(octets))


def test_results_that_are_too_small() -> None:
    prefix_launches.check_small_results(GPU)


def test_mask_above_int32() -> None:
    size = prefix_launches.ABOVE_INT32 * 5
    if torch.cuda.mem_get_info()[0] < 3 * size:
        pytest.skip(f"needs {3 * size:,} free bytes of GPU memory")
    mask, lengths = prefix_launches.check_above_int32(GPU)
    packed, indptr = pack_mask_bits(
        mask, lengths, num_draft_tokens=5, max_context_len=prefix_launches.ABOVE_INT32
    )
    *_, begin, end = indptr.tolist()
    assert packed[begin:end].tolist() == [0xFF] * 6 + [0x03]
    assert packed[(4 * (prefix_launches.ABOVE_INT32 + 5) + 7) // 8].item() == 1 << 3
    assert packed[end:].sum() == 0


def _step(batch: Batch, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
    packed = pack_mask_bits(mask, batch.seq_lens, num_draft_tokens=batch.n, max_context_len=90)
    ops = torch.ops.torchvm
    return (
        ops.unified_attention(*batch.tensors, mask, SCALE, 30, 2.0),
        ops.packed_attention(*batch.tensors, *packed, SCALE, 30, 2.0),
        *packed,
    )


def test_a_step_is_captured_once_for_any_lengths() -> None:
    longest = draw_batch([90] * 3, 6)
    static = longest.to(GPU)
    mask = full_mask(longest).to(GPU)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _step(static, mask)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = _step(static, mask)
    for lengths in ([0] * 3, [90, 1, 40], [7] * 3):
        # The pages of the longest batch hold every shorter one.
        batch = longest._replace(seq_lens=torch.tensor(lengths))
        cells = torch.rand(len(mask)) < 0.6
        static.seq_lens.copy_(batch.seq_lens)
        mask.copy_(cells)
        graph.replay()
        want = _step(batch, cells)
        for mine, other in zip(found, want, strict=True):
            torch.testing.assert_close(mine.cpu(), other, atol=1e-5, rtol=0)


def test_no_op_waits_for_the_gpu() -> None:
    batch = draw_batch([9, 0, 40], 6)
    on, mask = batch.to(GPU), full_mask(batch).to(GPU)
    _step(on, mask)
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # PyTorch warns that this mode is a prototype.
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        _step(on, mask)
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_ops_take_strided_inputs_and_empty_batches() -> None:
    for lengths in ([3, 0, 7], []):
        batch = draw_batch(lengths, 5)
        mask = full_mask(batch)
        query, k_cache, v_cache, table, seq_lens = (
            torch.stack([tensor.to(GPU)] * 2, -1)[..., 0] for tensor in batch.tensors
        )
        strided = (query, k_cache, v_cache, table, seq_lens)
        found = unified_attention(*strided, mask.to(GPU), scale=SCALE)
        expected = unified_attention(*batch.tensors, mask, scale=SCALE)
        torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=0)
        octets, offsets = bits(batch)
        packed = torch.tensor(octets, dtype=torch.uint8, device=GPU).repeat_interleave(2)[::2]
        indptr = torch.tensor(offsets, device=GPU).repeat_interleave(2)[::2]
        found = packed_attention(*strided, packed, indptr, scale=SCALE)
        torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=0)


def test_opcheck() -> None:
    batch = draw_batch([3, 0], 4)
    on, mask = batch.to(GPU), full_mask(batch).to(GPU)
    ops = torch.ops.torchvm
    torch.library.opcheck(ops.unified_attention.default, (*on.tensors, mask, SCALE, 2, 1.5))
    torch.library.opcheck(ops.pack_mask_bits.default, (mask, on.seq_lens, 4, 5))
    packed = ops.pack_mask_bits(mask, on.seq_lens, 4, 5)
    torch.library.opcheck(ops.packed_attention.default, (*on.tensors, *packed, SCALE, 2, 1.5))
