"""Layouts of a verify mask and the size formulas that everything else calls.

The module imports torch where a dtype or a tensor is asked for: sizes alone are had without it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import SymInt, Tensor

__all__ = [
    "TreeMaskMode",
    "live_mask_numel",
    "mask_dtype",
    "mask_dtypes",
    "mask_storage",
    "mask_storage_numel",
    "packed_bits_numel",
    "packed_bits_offsets",
    "packed_row_bytes",
    "request_offsets",
    "tree_mask_numel",
    "tree_mode",
    "tree_row_numel",
]


class TreeMaskMode(IntEnum):
    """How the cells of a verify mask are laid out; n is the number of draft tokens.

    A cell (i, j) of a request is 1 when node i may attend column j.
    """

    FULL_MASK = 0
    """Ragged and flat: per request n rows of L prefix columns followed by n tree columns."""
    QLEN_ONLY = 1
    """Only the n x n tree block of each request, one byte a cell."""
    QLEN_ONLY_BITPACKING = 2
    """Only the tree block, each row one little-endian bit string stored as uint8."""


_FULL, _, _PACKED = TreeMaskMode
_MODES = dict(enumerate(TreeMaskMode))


def tree_mode(tree_mask_mode: int) -> TreeMaskMode:
    """Return `tree_mask_mode` as a `TreeMaskMode`, or raise ValueError naming what came."""
    if isinstance(tree_mask_mode, int) and not isinstance(tree_mask_mode, bool):
        mode = _MODES.get(tree_mask_mode)
        if mode is not None:
            return mode
    known = ", ".join(f"{m.name} ({m.value})" for m in TreeMaskMode)
    raise ValueError(f"tree_mask_mode must be one of {known}, got {tree_mask_mode!r}")


def tree_mask_numel(
    mode: int,
    bs: int | SymInt,
    num_draft_tokens: int | SymInt,
    max_context_len: int | SymInt,
) -> int | SymInt:
    """Count the cells of a mask of capacity (bs, num_draft_tokens, max_context_len).

    FULL_MASK holds `bs * n * (max_context_len + n)` cells and QLEN_ONLY `bs * n * n`.

    Raises:
        NotImplementedError: for QLEN_ONLY_BITPACKING, whose cells are bits: `mask_storage` gives
            the bytes of its buffer.
    """
    mode = tree_mode(mode)
    if mode is _PACKED:
        raise NotImplementedError(
            "tree_mask_numel counts cells and a QLEN_ONLY_BITPACKING cell is a bit: "
            "use mask_storage for the size of its buffer"
        )
    context = max_context_len if mode is _FULL else 0
    return bs * num_draft_tokens * (context + num_draft_tokens)


def packed_row_bytes(num_draft_tokens: int | SymInt) -> int | SymInt:
    """Bytes of one packed row: 1, 2 and 4 up to n = 8, 16 and 32, then whole 64-bit words.

    A symbolic n is guarded on at 8, 16 and 32.
    """
    for limit, row_bytes in ((8, 1), (16, 2), (32, 4)):
        if num_draft_tokens <= limit:
            return row_bytes
    return 8 * ((num_draft_tokens + 63) // 64)


def tree_row_numel(mode: int, num_draft_tokens: int | SymInt) -> int | SymInt:
    """Elements that the tree cells of one node's row take in a buffer: n, fewer when packed."""
    if tree_mode(mode) is _PACKED:
        return packed_row_bytes(num_draft_tokens)
    return num_draft_tokens


def mask_dtypes(mode: int) -> tuple[torch.dtype, ...]:
    """Return the dtypes that can hold a mode, all one byte wide: uint8, and bool unless packed."""
    import torch

    return (torch.uint8,) if tree_mode(mode) is _PACKED else (torch.bool, torch.uint8)


def mask_dtype(mode: int, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a mask buffer: bool unless asked otherwise, always uint8 when packed.

    Raises:
        ValueError: when `dtype` cannot hold the mode.
    """
    dtypes = mask_dtypes(mode)
    if dtype is None:
        return dtypes[0]
    if dtype not in dtypes:
        known = " or ".join(map(str, dtypes))
        raise ValueError(f"dtype must be {known} for {tree_mode(mode).name}, got {dtype}")
    return dtype


def mask_storage_numel(
    mode: int,
    bs: int | SymInt,
    num_draft_tokens: int | SymInt,
    max_context_len: int | SymInt,
) -> int | SymInt:
    """Count the elements of the 1-D buffer of a mask of that capacity, one byte each."""
    if tree_mode(mode) is _PACKED:
        return bs * num_draft_tokens * packed_row_bytes(num_draft_tokens)
    return tree_mask_numel(mode, bs, num_draft_tokens, max_context_len)


def mask_storage(
    mode: int,
    bs: int | SymInt,
    num_draft_tokens: int | SymInt,
    max_context_len: int | SymInt,
    dtype: torch.dtype | None = None,
) -> tuple[int | SymInt, torch.dtype]:
    """Return (numel, dtype) of the 1-D buffer of a mask of that capacity, in every mode."""
    numel = mask_storage_numel(mode, bs, num_draft_tokens, max_context_len)
    return numel, mask_dtype(mode, dtype)


def live_mask_numel(
    mode: int,
    bs: int | SymInt,
    num_draft_tokens: int | SymInt,
    sum_seq_lens: int | SymInt = 0,
) -> int | SymInt:
    """Count the elements that a batch with `sum_seq_lens` committed tokens in all occupies.

    FULL_MASK: `n * sum(seq_lens) + bs * n * n`. With `sum_seq_lens` left at 0 it is the smallest
    buffer that a batch of any lengths needs.
    """
    mode = tree_mode(mode)
    block = bs * num_draft_tokens * tree_row_numel(mode, num_draft_tokens)
    return num_draft_tokens * sum_seq_lens + block if mode is _FULL else block


def request_offsets(seq_lens: Tensor, num_draft_tokens: int) -> Tensor:
    """Where each request's rows begin in a FULL_MASK buffer.

    Args:
        seq_lens: (B,) int64, committed length L of each request.
        num_draft_tokens: n, root included.

    Returns:
        (B + 1,) int64: entry b is `sum over c < b of n * (L_c + n)`; the last is the live size.
    """
    import torch

    offsets = seq_lens.new_zeros(seq_lens.shape[0] + 1)
    torch.cumsum((seq_lens + num_draft_tokens) * num_draft_tokens, 0, out=offsets[1:])
    return offsets


def packed_bits_numel(
    bs: int | SymInt, num_draft_tokens: int | SymInt, max_context_len: int | SymInt
) -> int | SymInt:
    """Bytes of a FULL_MASK as bits, each request starting on a byte: `bs * ceil(n * (X + n) / 8)`.

    X is `max_context_len`, the most committed tokens a request may have.
    """
    cells = num_draft_tokens * (max_context_len + num_draft_tokens)
    return bs * ((cells + 7) // 8)


def packed_bits_offsets(seq_lens: Tensor, num_draft_tokens: int) -> Tensor:
    """Where each request begins in a FULL_MASK packed to bits.

    Args:
        seq_lens: (B,) int64, committed length L of each request.
        num_draft_tokens: n, root included.

    Returns:
        (B + 1,) int64 bytes: entry b is `sum over c < b of ceil(n * (L_c + n) / 8)`.
    """
    import torch

    cells = (seq_lens + num_draft_tokens) * num_draft_tokens
    offsets = seq_lens.new_zeros(seq_lens.shape[0] + 1)
    torch.cumsum((cells + 7) // 8, 0, out=offsets[1:])
    return offsets
