"""Checks of op arguments that hold for fake tensors and for real ones on every device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchvm.ops.layout import TreeMaskMode, live_mask_numel, tree_mode

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import SymInt, Tensor

__all__ = ["check_live_mask", "check_mask", "check_sizes", "check_tensor", "int64", "require"]


def require(holds: bool | torch.SymBool, message: Callable[[], str]) -> None:
    """Raise ValueError with `message()` unless `holds`, which may be symbolic."""
    if holds is not True:
        torch._check_value(holds, message)


def check_tensor(
    name: str,
    tensor: Tensor,
    device: torch.device,
    *shape: int | SymInt,
    dtype: torch.dtype = torch.int64,
) -> None:
    """Require a tensor of this device, shape and dtype; cheap when sizes are plain numbers."""
    if (
        type(tensor) is torch.Tensor
        and tensor.dtype is dtype
        and tensor.shape == shape
        and tensor.device == device
    ):
        return
    require(tensor.dtype is dtype, lambda: f"{name} must be {dtype}, got {tensor.dtype}")
    sizes = tuple(tensor.shape)
    require(len(sizes) == len(shape), lambda: f"{name} must be {len(shape)}-D, got {_list(sizes)}")
    for size, wanted in zip(sizes, shape, strict=True):
        require(
            size == wanted, lambda: f"{name} must be of shape {_list(shape)}, got {_list(sizes)}"
        )
    require(tensor.device == device, lambda: f"{name} must be on {device}, got {tensor.device}")


def check_mask(
    tree_mask: Tensor,
    tree_mask_mode: int,
    batch: int | SymInt,
    num_draft_tokens: int | SymInt,
    *,
    device: torch.device | None = None,
    name: str = "tree_mask",
) -> None:
    """Require a mask that can hold a batch of this size, as far as that needs no lengths."""
    mode, dtype = tree_mode(tree_mask_mode), tree_mask.dtype
    least, numel = live_mask_numel(mode, batch, num_draft_tokens), tree_mask.numel()
    packed = mode is TreeMaskMode.QLEN_ONLY_BITPACKING
    holds = dtype is torch.uint8 or (dtype is torch.bool and not packed)
    if (
        type(tree_mask) is torch.Tensor
        and holds
        and tree_mask.dim() == 1
        and tree_mask.is_contiguous()
        and numel >= least
        and device in (None, tree_mask.device)
    ):
        return
    kinds = "torch.uint8" if packed else "torch.bool or torch.uint8"
    require(holds, lambda: f"{name} must be {kinds} for {mode.name}, got {dtype}")
    require(tree_mask.dim() == 1, lambda: f"{name} must be 1-D, got {_list(tree_mask.shape)}")
    require(
        tree_mask.is_contiguous(),
        lambda: f"{name} must be contiguous, got a stride of {tree_mask.stride()[0]}",
    )
    require(
        numel >= least,
        lambda: f"{name} must be of at least {least} elements for {mode.name}, got {numel}",
    )
    require(
        device in (None, tree_mask.device),
        lambda: f"{name} must be on {device}, got {tree_mask.device}",
    )


def check_live_mask(tree_mask: Tensor, mode: TreeMaskMode, lengths: list[int], n: int) -> None:
    """Require lengths that can be, and a mask that holds a batch of them."""
    require(min(lengths, default=0) >= 0, lambda: f"seq_lens must be >= 0, got {lengths}")
    least, numel = live_mask_numel(mode, len(lengths), n, sum(lengths)), tree_mask.numel()
    require(
        numel >= least,
        lambda: (
            f"tree_mask must be of at least {least} elements for {mode.name} with these "
            f"seq_lens, got {numel}"
        ),
    )


def check_sizes(**sizes: int | SymInt) -> None:
    """Require sizes that a mask can have: one draft token at least, and no negative number."""
    for name, size in sizes.items():
        least = 1 if name == "num_draft_tokens" else 0
        torch._check_value(
            size >= least,
            lambda name=name, size=size, least=least: f"{name} must be >= {least}, got {size}",
        )


def int64(tensor: Tensor) -> Tensor:
    """Convert int32, and leave any other dtype for the op to judge."""
    return tensor.long() if tensor.dtype is torch.int32 else tensor


def _list(sizes: tuple[int | SymInt, ...]) -> str:
    return f"[{', '.join(map(str, sizes))}]"
