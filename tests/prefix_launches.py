"""Checks of the GPU launchers of readers of the prefix on any device, as in `launches`."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tests.prefix_reference import SCALE, Batch, attend, bits, draw_batch, full_mask
from torchvm.ops import packed_attention, packed_mask, unified_attention

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "ABOVE_INT32",
    "check_above_int32",
    "check_attention",
    "check_garbage",
    "check_packing",
    "check_poison",
    "check_small_results",
]

CUTS = ([5, 0, 37, 9], [70, 3], [0], [130, 1, 1])
"""Lengths of batches: none, one position, several steps of the kernel, and not a multiple."""
ABOVE_INT32 = 540_000_000
"""Committed tokens of a request whose fifth row of cells, or bits, begins past 2**31."""
OPTIONS = ((0, 0.0), (3, 0.0), (40, 2.0), (1, 0.0), (0, 2.0))


def _run(batch: Batch, *options: Any, offset: int = 1) -> tuple[Tensor, Tensor]:
    """Results of both readers as a GPU computes them, masks at an odd address."""
    device = batch.query.device
    whole = torch.cat([torch.ones(offset, dtype=torch.bool), full_mask(batch)]).to(device)
    octets, offsets = bits(batch, gap=3)
    packed = torch.tensor(octets, dtype=torch.uint8, device=device)
    indptr = torch.tensor(offsets, device=device)
    return (
        unified_attention._cuda(*batch.tensors, whole[offset:], SCALE, *options),
        packed_attention._cuda(*batch.tensors, packed, indptr, SCALE, *options),
    )


def _check_close(found: Tensor, expected: np.ndarray[Any, Any]) -> None:
    """Within float32's error of sums, or that of weights and results rounded to 16 bits."""
    bound = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[found.dtype]
    np.testing.assert_allclose(found.double().cpu().numpy(), expected, atol=bound, rtol=bound)


def check_attention(
    device: torch.device, n: int, dim: int, dtypes: tuple[torch.dtype, ...], rounds: int
) -> None:
    """Both readers equal the reference, and each other to the bit."""
    for i in range(rounds):
        window, cap = OPTIONS[i % len(OPTIONS)]
        batch = draw_batch(
            CUTS[i % len(CUTS)], n, dim=dim, page_size=(4, 1, 16, 7, 300)[i % 5],
            dtype=dtypes[i % len(dtypes)], seed=i,
        )  # fmt: skip
        expected = attend(batch, window, cap)
        cells, packed = _run(batch.to(device), window, cap, offset=i % 4)
        assert cells.is_contiguous()
        _check_close(cells, expected)
        assert torch.equal(cells, packed)


def check_poison(device: torch.device) -> None:
    """Keys and values hidden from every node do not matter; a node that sees nothing gets 0."""
    batch = draw_batch([11, 4], 5, page_size=4, seed=9)
    for rows, length, hidden in zip(batch.cells, (11, 4), ([0, 7, 13], [2, 5]), strict=True):
        for row in rows:
            for p in hidden:
                row[p] = 0
        rows[3] = [0] * (length + 5)
    batch = batch._replace(k_cache=batch.k_cache.clone(), v_cache=batch.v_cache.clone())
    for b, hidden in enumerate(([0, 7, 13], [2, 5])):
        for p in hidden:
            page = int(batch.page_table[b, p // 4])
            batch.k_cache[page, p % 4] = batch.v_cache[page, p % 4] = torch.nan
    expected = attend(batch)
    for found in _run(batch.to(device)):
        assert torch.equal(found[:, 3].cpu(), torch.zeros(2, *found.shape[2:]))
        _check_close(found, expected)


def check_garbage(device: torch.device) -> None:
    """Lengths, page ids, offsets and buffers that are no such thing: it ends, other rows hold."""
    batch = draw_batch([9, 6, 12], 3, seed=4)
    expected = attend(batch)
    on = batch.to(device)
    mask, octets = full_mask(batch), bits(batch)
    packed = torch.tensor(octets[0], dtype=torch.uint8, device=device)
    indptr = torch.tensor(octets[1], device=device)
    for length in (2**62, -(2**63), 2**63 - 1, -1):
        lengths = on.seq_lens.clone()
        lengths[2] = length
        tensors = (*on.tensors[:4], lengths)
        cells = unified_attention._cuda(*tensors, mask.to(device), SCALE)
        from_bits = packed_attention._cuda(*tensors, packed, indptr, SCALE)
        for found in (cells, from_bits):
            _check_close(found[:2], expected[:2])
    for page in (-1, len(batch.k_cache), 2**31 - 1, -(2**31)):
        table = on.page_table.clone()
        table[1, 1] = page
        hidden = batch._replace(cells=[[list(row) for row in rows] for rows in batch.cells])
        for row in hidden.cells[1]:
            row[4:8] = [0] * 4
        tensors = (*on.tensors[:3], table, on.seq_lens)
        _check_close(unified_attention._cuda(*tensors, mask.to(device), SCALE), attend(hidden))
    for offset in (-(2**63), -1, len(octets[0]), 2**63 - 1):
        offsets = indptr.clone()
        offsets[1] = offset
        found = packed_attention._cuda(*on.tensors, packed, offsets, SCALE)
        _check_close(found[::2], expected[::2])
        assert torch.equal(found[1].cpu(), torch.zeros(found.shape[1:]))
    short = unified_attention._cuda(*on.tensors, mask[: 3 * 12 + 3 * 9].to(device), SCALE)
    _check_close(short[:2], expected[:2])
    assert torch.equal(short[2].cpu(), torch.zeros(short.shape[1:]))


def check_above_int32(device: torch.device) -> tuple[Tensor, Tensor]:
    """Offsets of cells and of bits past 2**31 are followed; returns the mask and its lengths.

    The page table ends after 16 positions, and so does what the first request sees.
    """
    n, lengths = 5, torch.tensor([ABOVE_INT32, 5], device=device)
    row = ABOVE_INT32 + n
    size, last = n * row, n * (5 + n)

    def zeros(numel: int) -> Tensor:
        # Of NumPy, the host's zeros take no memory until they are written.
        if device.type == "cpu":
            return torch.from_numpy(np.zeros(numel, np.uint8))
        return torch.zeros(numel, dtype=torch.uint8, device=device)

    mask, packed = zeros(size + last), zeros((size + 7) // 8 + (last + 7) // 8)
    mask[4 * row + 7] = 1
    mask[size:] = 1
    packed[(4 * row + 7) // 8] = 1 << (4 * row + 7) % 8
    packed[(size + 7) // 8 :] = 0xFF
    generator = torch.Generator().manual_seed(0)
    query, cache = (torch.randn(2, k, 1, 16, generator=generator).to(device) for k in (n, 16))
    table = torch.tensor([[0], [1]], dtype=torch.int32, device=device)
    tensors = (query, cache, cache, table, lengths)
    indptr = torch.tensor([0, (size + 7) // 8, len(packed)], device=device)
    weights = (query[1, :, 0] @ cache[1, :10, 0].T).softmax(-1)
    for found in (
        unified_attention._cuda(*tensors, mask, 1.0),
        packed_attention._cuda(*tensors, packed, indptr, 1.0),
    ):
        assert bool((found[0, :4] == 0).all())
        assert torch.equal(found[0, 4], cache[0, 7])
        torch.testing.assert_close(found[1, :, 0], weights @ cache[1, :10, 0])
    return mask, lengths


def check_packing(device: torch.device, launches: int) -> None:
    """Bits and offsets equal the reference; every byte is written, and zero past the batch."""
    rng = random.Random(3)  # noqa: S311
    for i in range(launches):
        n, size = rng.randint(1, 20), rng.randint(0, 5)
        lengths = [rng.choice((0, 1, rng.randint(0, 900))) for _ in range(size)]
        batch = draw_batch([0] * size, 1, seed=i)
        batch = batch._replace(
            cells=[[[rng.randrange(2) for _ in range(c + n)] for _ in range(n)] for c in lengths]
        )
        most = max(lengths, default=0) + rng.choice((0, 0, 1, 50))
        octets, offsets = bits(batch)
        mask = full_mask(batch, (torch.bool, torch.uint8)[i % 2])
        whole = torch.cat([mask[: i % 3], mask]).to(device)
        found, indptr = packed_mask._cuda(
            whole[i % 3 :], torch.tensor(lengths, dtype=torch.int64).to(device), n, most
        )
        room = size * -(-n * (most + n) // 8)
        assert indptr.tolist() == offsets
        assert found.tolist() == octets + [0] * (room - len(octets))


def check_small_results(device: torch.device) -> None:
    """Lengths above max_context_len, and no lengths: what fits is right, and it ends."""
    batch = draw_batch([9, 2, 30], 3)
    mask = full_mask(batch, torch.uint8).to(device)
    octets, offsets = bits(batch)
    for most in (0, 5, 10, 14):
        packed, indptr = packed_mask._cuda(mask, batch.seq_lens.to(device), 3, most)
        room = 3 * -(-3 * (most + 3) // 8)
        held = (octets + [0] * room)[:room]
        assert packed.tolist() == held
        assert indptr.tolist() == offsets
    for length in (2**62, -(2**63), 2**63 - 1, -1):
        lengths = torch.tensor([9, length, length], device=device)
        packed, indptr = packed_mask._cuda(mask, lengths, 3, 9)
        assert packed.numel() == 15
        assert packed[:5].tolist() == octets[:5]
        assert indptr[:2].tolist() == offsets[:2]
