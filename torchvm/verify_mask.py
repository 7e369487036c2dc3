"""VerifyMask: the single owner of the buffer that every verify step writes its tree mask into."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import msgspec
import torch

from torchvm.ops.layout import TreeMaskMode, mask_storage, tree_mode
from torchvm.ops.mask import alloc_verify_mask

__all__ = [
    "BatchMask",
    "MaskSource",
    "VerifyMask",
    "default_tree_mask_mode",
    "mask_for_batch",
    "maybe_create_verify_mask",
]


class VerifyMask(msgspec.Struct, frozen=True, eq=False):
    """A mask buffer and the capacity it was made for; another size means another struct.

    The buffer exists even when nothing reads it: builds write their tree cells in place, and a
    buffer that is always there spares the worker a device-to-host sync of `sum(seq_lens)`.
    """

    buffer: torch.Tensor
    """1-D, of `mask_storage(mode, max_bs, num_draft_tokens, max_context_len, dtype)`."""
    mode: TreeMaskMode
    max_bs: int
    num_draft_tokens: int
    max_context_len: int
    is_read: bool
    """Whether the attention back end declares that it reads the mask."""

    def fits(self, bs: int, num_draft_tokens: int) -> bool:
        """Whether the worst case of such a batch stays inside the buffer, in every mode.

        The worst case has every request at `max_context_len`. A batch above `max_bs` never
        fits: what was captured for the buffer does not know the requests beyond it.

        Args:
            bs: requests in the batch.
            num_draft_tokens: draft tokens per request, root included.
        """
        needed, _ = mask_storage(self.mode, bs, num_draft_tokens, self.max_context_len)
        return bs <= self.max_bs and needed <= self.buffer.numel()


def default_tree_mask_mode(device: torch.device | str) -> TreeMaskMode:
    """Return the layout that attention kernels of a device read: QLEN_ONLY on the CPU, else FULL.

    Args:
        device: device of the mask.
    """
    on_cpu = torch.device(device).type == "cpu"
    return TreeMaskMode.QLEN_ONLY if on_cpu else TreeMaskMode.FULL_MASK


def maybe_create_verify_mask(
    *,
    is_draft_runner: bool,
    skip_prefill: bool,
    max_bs: int,
    max_context_len: int,
    num_draft_tokens: int | None,
    device: torch.device | str,
    is_read: bool,
    dtype: torch.dtype = torch.bool,
    mode: int | None = None,
) -> VerifyMask | None:
    """Allocate the verify mask of one model runner, or return None when it never verifies.

    Args:
        is_draft_runner: the runner of the draft model; it verifies nothing.
        skip_prefill: a back end made for decoding steps alone; it verifies nothing.
        max_bs: most requests in a batch, CUDA-graph padding included.
        max_context_len: most committed tokens of a request.
        num_draft_tokens: draft tokens per request, root included; None or 0 without speculation.
        device: where the buffer lives.
        is_read: whether the attention back end reads the mask.
        dtype: torch.bool or torch.uint8; QLEN_ONLY_BITPACKING stores uint8 whatever is asked.
        mode: a `TreeMaskMode`, as a plan found it. None is `default_tree_mask_mode(device)` for a
            mask that is read and QLEN_ONLY for one that is not.

    Raises:
        ValueError: for a max_bs below 1, a negative size, an unknown mode or another dtype.

    Example:
        >>> import torchvm
        >>> owner = torchvm.maybe_create_verify_mask(
        ...     is_draft_runner=False, skip_prefill=False, max_bs=8, max_context_len=1024,
        ...     num_draft_tokens=4, device="cpu", is_read=False,
        ... )
        >>> owner.mode.name, owner.buffer.numel()
        ('QLEN_ONLY', 128)
        >>> owner.fits(8, 4), owner.fits(9, 4)
        (True, False)
    """
    if is_draft_runner or skip_prefill or not num_draft_tokens:
        return None
    if max_bs < 1:
        raise ValueError(f"max_bs must be >= 1, got {max_bs}")
    if mode is None:
        mode = default_tree_mask_mode(device) if is_read else TreeMaskMode.QLEN_ONLY
    layout = tree_mode(mode)
    packed = layout is TreeMaskMode.QLEN_ONLY_BITPACKING
    buffer = alloc_verify_mask(
        max_bs,
        num_draft_tokens,
        max_context_len,
        layout,
        dtype=torch.uint8 if packed and dtype is torch.bool else dtype,
        device=device,
    )
    return VerifyMask(buffer, layout, max_bs, num_draft_tokens, max_context_len, is_read)


class MaskSource(StrEnum):
    """Where the mask of one batch comes from."""

    owned = "OWNED"
    """The owner's buffer, which the batch fits."""
    no_owner = "NO_OWNER"
    """A fresh buffer in the caller's mode: the back end owns none."""
    too_large = "TOO_LARGE"
    """A fresh buffer in the owner's mode: the batch could run past the owner's."""
    idle = "IDLE"
    """Nothing is verified: an empty buffer."""


class BatchMask(NamedTuple):
    """The buffer that one batch is built into."""

    buffer: torch.Tensor
    mode: TreeMaskMode
    source: MaskSource


def mask_for_batch(
    owner: VerifyMask | None,
    *,
    bs: int,
    num_draft_tokens: int,
    max_context_len: int,
    device: torch.device | str,
    dtype: torch.dtype = torch.bool,
    mode: int | None = None,
) -> BatchMask:
    """Choose the buffer of one eager batch, as a worker does: nothing is ever written past one.

    Args:
        owner: the back end's mask, if it owns one.
        bs: requests of the batch; 0 is an idle one.
        num_draft_tokens: draft tokens per request, root included.
        max_context_len: most committed tokens of a request, for a fresh buffer.
        device: where a fresh buffer lives.
        dtype: of a fresh buffer without an owner.
        mode: layout of a fresh buffer without an owner; None is the device's default.

    Raises:
        ValueError: for a negative size, an unknown mode, or a dtype that the mode cannot have.
    """
    if owner is not None and bs and owner.fits(bs, num_draft_tokens):
        return BatchMask(owner.buffer, owner.mode, MaskSource.owned)
    if owner is not None:
        layout, dtype = owner.mode, owner.buffer.dtype
    else:
        layout = default_tree_mask_mode(device) if mode is None else tree_mode(mode)
        if layout is TreeMaskMode.QLEN_ONLY_BITPACKING and dtype is torch.bool:
            dtype = torch.uint8
    buffer = alloc_verify_mask(
        bs, num_draft_tokens, max_context_len, layout, dtype=dtype, device=device
    )
    if not bs:
        return BatchMask(buffer, layout, MaskSource.idle)
    source = MaskSource.no_owner if owner is None else MaskSource.too_large
    return BatchMask(buffer, layout, source)
