"""Checks of op arguments that hold for fake tensors and for real ones on every device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchvm.ops.layout import TreeMaskMode, live_mask_numel, tree_mode

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import SymInt, Tensor

__all__ = ["check_int64", "check_mask", "check_shape", "int64", "require"]


def require(holds: bool | torch.SymBool, message: Callable[[], str]) -> None:
    """Raise ValueError with `message()` unless `holds`, which may be symbolic."""
    if holds is not True:
        torch._check_value(holds, message)


def check_int64(name: str, tensor: Tensor, dims: int) -> None:
    """Require an int64 tensor of so many dimensions."""
    require(tensor.dtype is torch.int64, lambda: f"{name} must be torch.int64, got {tensor.dtype}")
    require(tensor.dim() == dims, lambda: f"{name} must be {dims}-D, got {_shape(tensor)}")


def check_shape(name: str, tensor: Tensor, *shape: int | SymInt) -> None:
    """Require a tensor, whose number of dimensions is checked already, to have this shape."""
    for size, wanted in zip(tensor.shape, shape, strict=True):
        require(
            size == wanted,
            lambda: f"{name} must be of shape {_list(shape)}, got {_shape(tensor)}",
        )


def check_mask(
    tree_mask: Tensor,
    tree_mask_mode: int,
    batch: int | SymInt,
    num_draft_tokens: int | SymInt,
    name: str = "tree_mask",
) -> TreeMaskMode:
    """Require a mask that can hold a batch of this size with lengths of 0; return its mode."""
    mode = tree_mode(tree_mask_mode)
    dtype = tree_mask.dtype
    if mode is TreeMaskMode.QLEN_ONLY_BITPACKING:
        require(
            dtype is torch.uint8,
            lambda: f"{name} must be torch.uint8 for {mode.name}, got {dtype}",
        )
    else:
        require(
            dtype is torch.bool or dtype is torch.uint8,
            lambda: f"{name} must be torch.bool or torch.uint8, got {dtype}",
        )
    require(tree_mask.dim() == 1, lambda: f"{name} must be 1-D, got {_shape(tree_mask)}")
    require(
        tree_mask.is_contiguous(),
        lambda: f"{name} must be contiguous, got stride {tree_mask.stride()[0]}",
    )
    least = live_mask_numel(mode, batch, num_draft_tokens)
    numel = tree_mask.numel()
    require(
        numel >= least,
        lambda: f"{name} must be of at least {least} elements for {mode.name}, got {numel}",
    )
    return mode


def int64(tensor: Tensor) -> Tensor:
    """Convert int32, and leave any other dtype for the op to judge."""
    return tensor.long() if tensor.dtype is torch.int32 else tensor


def _shape(tensor: Tensor) -> str:
    return _list(tensor.shape)


def _list(shape: torch.Size | tuple[int | SymInt, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
