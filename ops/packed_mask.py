"""torchvm::pack_mask_bits: a FULL_MASK, prefix columns included, as one bit a cell."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from torchvm.ops.checks import (
    check_live_mask,
    check_mask,
    check_sizes,
    check_tensor,
    int64,
    require,
)
from torchvm.ops.contracts import MaskRead, register_mask_reader
from torchvm.ops.layout import TreeMaskMode, packed_bits_numel
from torchvm.ops.library import register_op

if TYPE_CHECKING:
    from torch import SymInt, Tensor

__all__ = ["PackedMask", "pack_mask_bits"]

_SCHEMA = (
    "pack_mask_bits(Tensor tree_mask, Tensor seq_lens, SymInt num_draft_tokens, "
    "SymInt max_context_len) -> (Tensor packed_mask, Tensor mask_indptr)"
)
_FULL = TreeMaskMode.FULL_MASK


class PackedMask(NamedTuple):
    """A FULL_MASK as bits, each request starting on a byte."""

    packed_mask: Tensor
    """(B * ceil(n * (max_context_len + n) / 8),) uint8; 0 past the batch."""
    mask_indptr: Tensor
    """(B + 1,) int64, the byte where each request begins and the last one ends."""


def _check(
    tree_mask: Tensor,
    seq_lens: Tensor,
    num_draft_tokens: int | SymInt,
    max_context_len: int | SymInt,
) -> None:
    """Check all that needs no data."""
    check_sizes(num_draft_tokens=num_draft_tokens, max_context_len=max_context_len)
    device, batch = tree_mask.device, seq_lens.numel()
    check_tensor("seq_lens", seq_lens, device, batch)
    check_mask(tree_mask, _FULL, batch, num_draft_tokens)


def _fake(
    tree_mask: Tensor,
    seq_lens: Tensor,
    num_draft_tokens: int | SymInt,
    max_context_len: int | SymInt,
) -> tuple[Tensor, Tensor]:
    """Bytes for B requests of `max_context_len`, and B + 1 int64 offsets."""
    _check(tree_mask, seq_lens, num_draft_tokens, max_context_len)
    batch = seq_lens.shape[0]
    size = packed_bits_numel(batch, num_draft_tokens, max_context_len)
    return tree_mask.new_empty(size, dtype=torch.uint8), seq_lens.new_empty(batch + 1)


def _cpu(
    tree_mask: Tensor, seq_lens: Tensor, num_draft_tokens: int, max_context_len: int
) -> tuple[Tensor, Tensor]:
    from torchvm.ops.kernels import cpu_prefix_mask

    packed, indptr = _fake(tree_mask, seq_lens, num_draft_tokens, max_context_len)
    lengths = seq_lens.tolist()
    check_live_mask(tree_mask, _FULL, lengths, num_draft_tokens)
    longest = max(lengths, default=0)
    require(
        longest <= max_context_len,
        lambda: (
            f"max_context_len must be >= all seq_lens, of which one is {longest}, "
            f"got {max_context_len}"
        ),
    )
    cpu_prefix_mask.pack_mask_bits(tree_mask, seq_lens, num_draft_tokens, packed, indptr)
    return packed, indptr


def _cuda(
    tree_mask: Tensor, seq_lens: Tensor, num_draft_tokens: int, max_context_len: int
) -> tuple[Tensor, Tensor]:
    from torchvm.ops.kernels import triton_packing

    packed, indptr = _fake(tree_mask, seq_lens, num_draft_tokens, max_context_len)
    triton_packing.pack_mask_bits(tree_mask, seq_lens, num_draft_tokens, packed, indptr)
    return packed, indptr


_OP = register_op(_SCHEMA, fake=_fake, kernels={"CPU": _cpu, "CUDA": _cuda})

register_mask_reader("torchvm::pack_mask_bits", arg="tree_mask", reads=MaskRead.FULL)


def pack_mask_bits(
    tree_mask: Tensor, seq_lens: Tensor, *, num_draft_tokens: int, max_context_len: int
) -> PackedMask:
    """Pack a FULL_MASK to one bit a cell, prefix columns included.

    The n * (L_b + n) cells of request b, row after row, become one little-endian string of bits:
    cell c is bit c % 8 of byte mask_indptr[b] + c // 8. The bits that fill up the last byte of a
    request are 0. A cell that is not 0 is a 1. Offsets are computed where the mask is, and a GPU
    is not waited for.

    Args:
        tree_mask: 1-D contiguous bool or uint8, FULL_MASK. Request b begins at the sum of
            n * (L_c + n) over the requests c before it.
        seq_lens: (B,) int64 (int32 is converted), committed length L of each request.
        num_draft_tokens: n, root included.
        max_context_len: most committed tokens a request may have; sizes the result.

    Returns:
        packed_mask uint8 of `B * ceil(n * (max_context_len + n) / 8)` bytes, 0 past the batch;
        mask_indptr (B + 1,) int64, the byte where each request begins and the last one ends.

    Raises:
        ValueError: for a shape, dtype or size that does not fit. That a length is negative or
            above `max_context_len`, or the mask too small for the lengths, is looked at on the
            CPU alone; a GPU drops what does not fit the result and takes cells past the mask
            for 0.

    Example:
        >>> import torch, torchvm
        >>> mask = torch.ones(4, dtype=torch.bool)  # one row of three prefix columns and itself
        >>> packed = torchvm.pack_mask_bits(
        ...     mask, torch.tensor([3]), num_draft_tokens=1, max_context_len=3
        ... )
        >>> packed.packed_mask.tolist(), packed.mask_indptr.tolist()
        ([15], [0, 1])
    """
    return PackedMask(*_OP(tree_mask, int64(seq_lens), num_draft_tokens, max_context_len))
