"""Checks of op arguments, for kernels and fakes alike: data is never looked at."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchvm.ops.layout import live_mask_numel, mask_dtype

if TYPE_CHECKING:
    from torch import SymInt, Tensor

__all__ = ["check", "check_mask", "check_tensor"]


def check(condition: bool | torch.SymBool, name: str, expected: str, got: object) -> None:
    """Raise ValueError "name must be expected, got ..." unless the condition holds."""
    if condition is not True:
        torch._check_value(condition, lambda: f"{name} must be {expected}, got {got}")


def check_tensor(
    name: str, tensor: Tensor, shape: tuple[int | SymInt, ...], device: torch.device
) -> None:
    """Require an int64 tensor of a shape on a device.

    Raises:
        TypeError: for another dtype.
        ValueError: for another shape or device.
    """
    if tensor.dtype != torch.int64:
        raise TypeError(f"{name} must be torch.int64, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device} as tree_mask is, got {tensor.device}")
    got = tensor.shape
    if len(got) != len(shape):
        raise ValueError(f"{name} must have shape {shape}, got {tuple(got)}")
    for have, want in zip(got, shape, strict=True):
        check(have == want, name, f"of shape {shape}", tuple(got))


def check_mask(mask: Tensor, mode: int, bs: int | SymInt, num_draft_tokens: int | SymInt) -> None:
    """Require a 1-D contiguous mask that holds the batch's tree cells in this mode.

    Raises:
        TypeError: for a dtype that the mode cannot have.
        ValueError: for another shape or fewer elements than any lengths need.
    """
    try:
        mask_dtype(mode, mask.dtype)
    except ValueError as error:
        raise TypeError(f"tree_mask {error}") from None
    if mask.dim() != 1:
        raise ValueError(f"tree_mask must be 1-D, got shape {tuple(mask.shape)}")
    numel = mask.numel()
    check(mask.stride(0) == 1 or numel <= 1, "tree_mask", "contiguous", f"stride {mask.stride(0)}")
    least = live_mask_numel(mode, bs, num_draft_tokens)
    check(numel >= least, "tree_mask", f"at least {least} elements", numel)
