"""GPU kernel that packs a FULL_MASK to bits, request by request."""

# Compile-time arguments are in capitals, as everywhere in Triton, whose decorator has no types.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from torchvm.ops.kernels.triton_launch import OPTIONS, device_of, num_programs
from torchvm.ops.kernels.triton_rows import LENGTH_BLOCK, length_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PACK_BLOCK", "pack_kernel", "pack_mask_bits"]

PACK_BLOCK = 512
"""Bytes that a program writes at once."""


@triton.jit
def begins(
    seq_lens: tl.tensor, requests: tl.tensor, n: tl.tensor, numel: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """First cell and first byte of a request: sums over the `requests` before it, int64."""
    wide = tl.cast(n, tl.int64)
    cells = tl.cast(0, tl.int64)
    octets = tl.cast(0, tl.int64)
    for start in range(0, requests, LENGTH_BLOCK):
        request = start + tl.arange(0, LENGTH_BLOCK)
        live = request < requests
        size = tl.where(live, wide * (length_of(seq_lens, request, live, numel) + wide), 0)
        cells += tl.sum(size, axis=0)
        octets += tl.sum((size + 7) // 8, axis=0)
    return cells, octets


@triton.jit(do_not_specialize=["tree_mask", "seq_lens", "batch", "n", "numel", "room"])
def pack_kernel(
    tree_mask: tl.tensor,
    seq_lens: tl.tensor,
    packed_mask: tl.tensor,
    mask_indptr: tl.tensor,
    batch: tl.int32,
    n: tl.int32,
    numel: tl.int64,
    room: tl.int64,
    BLOCK: tl.constexpr,
) -> None:
    """Write one request's bytes, or the zeros past the batch, some programs to each.

    Args:
        tree_mask: uint8 pointer, FULL_MASK.
        seq_lens: int64 (B,).
        packed_mask: uint8 pointer, written; nothing past its end.
        mask_indptr: int64 (B + 1,), written.
        batch: B; the programs of request B write the zeros.
        n: draft tokens.
        numel: bytes of the mask; cells past it are 0.
        room: bytes of `packed_mask`.
        BLOCK: bytes written at once, a power of two.
    """
    request = tl.program_id(0)
    cell, begin = begins(seq_lens, request, n, numel)
    length = length_of(seq_lens, request.to(tl.int64), request < batch, numel)
    cells = tl.where(request < batch, n * (length + n), 0)
    stop = tl.where(request < batch, begin + (cells + 7) // 8, room)
    if tl.program_id(1) == 0:
        tl.store(mask_indptr + request, begin)
    bit = tl.arange(0, 8)
    first = tl.program_id(1).to(tl.int64) * BLOCK
    for start in range(begin + first, tl.minimum(stop, room), tl.num_programs(1) * BLOCK):
        octet = start + tl.arange(0, BLOCK)
        index = ((octet - begin) * 8)[:, None] + bit[None, :]
        at = cell + index
        held = tl.load(tree_mask + at, mask=(index < cells) & (at < numel), other=0)
        bits = tl.sum((held != 0).to(tl.int32) << bit[None, :], axis=1)
        tl.store(packed_mask + octet, bits.to(tl.uint8), mask=octet < tl.minimum(stop, room))


def pack_mask_bits(
    tree_mask: Tensor, seq_lens: Tensor, num_draft_tokens: int, packed: Tensor, indptr: Tensor
) -> None:
    """Launch the kernel; arguments are checked by the op.

    Args:
        tree_mask: 1-D contiguous bool or uint8, FULL_MASK.
        seq_lens: (B,) int64.
        num_draft_tokens: n, root included.
        packed: 1-D uint8, written whole.
        indptr: (B + 1,) int64, written.
    """
    batch = seq_lens.shape[0]
    most = triton.cdiv(packed.numel(), max(batch, 1) * PACK_BLOCK)
    programs = triton.cdiv(num_programs(tree_mask.device), batch + 1)
    with device_of(tree_mask):
        pack_kernel[batch + 1, max(1, min(most, programs))](
            tree_mask.view(torch.uint8), seq_lens.contiguous(), packed, indptr, batch,
            num_draft_tokens, tree_mask.numel(), packed.numel(), BLOCK=PACK_BLOCK, num_warps=4,
            **OPTIONS,
        )  # fmt: skip
