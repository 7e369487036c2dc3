"""torchvm::alloc_verify_mask: the buffer that the tree ops write."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchvm.ops.layout import TreeMaskMode, mask_storage, tree_mode
from torchvm.ops.library import register_op

if TYPE_CHECKING:
    from torch import SymInt, Tensor

__all__ = ["alloc_verify_mask"]

_SCHEMA = (
    "alloc_verify_mask(SymInt bs, SymInt num_draft_tokens, SymInt max_context_len, "
    "int tree_mask_mode, *, ScalarType? dtype=None, Device? device=None) -> Tensor"
)


def _alloc(
    bs: int | SymInt,
    num_draft_tokens: int | SymInt,
    max_context_len: int | SymInt,
    tree_mask_mode: int,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Fake and kernel alike: zeros of the size that the layout's formula gives."""
    sizes = {
        "bs": bs,
        "num_draft_tokens": num_draft_tokens,
        "max_context_len": max_context_len,
    }
    for name, size in sizes.items():
        least = 1 if name == "num_draft_tokens" else 0
        torch._check_value(
            size >= least,
            lambda name=name, size=size, least=least: f"{name} must be >= {least}, got {size}",
        )
    if isinstance(num_draft_tokens, torch.SymInt) and (
        tree_mode(tree_mask_mode) is TreeMaskMode.QLEN_ONLY_BITPACKING
        and torch.fx.experimental.symbolic_shapes.free_unbacked_symbols(num_draft_tokens)
    ):
        raise ValueError(
            "num_draft_tokens must not be data-dependent for QLEN_ONLY_BITPACKING, "
            f"whose row size depends on it, got {num_draft_tokens}"
        )
    numel, dtype = mask_storage(tree_mask_mode, bs, num_draft_tokens, max_context_len, dtype)
    return torch.zeros(numel, dtype=dtype, device=device or "cpu")


_OP = register_op(_SCHEMA, fake=_alloc, kernels={"CompositeExplicitAutograd": _alloc})


def alloc_verify_mask(
    bs: int,
    num_draft_tokens: int,
    max_context_len: int,
    tree_mask_mode: int,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Allocate a zeroed verify mask that holds any batch of this capacity.

    Inside `torch.compile` the passes may give it a smaller layout than the one asked for, when
    nothing in the graph can tell the difference.

    Args:
        bs: most requests a batch may have.
        num_draft_tokens: n, draft tokens per request, root included.
        max_context_len: most committed tokens a request may have; counts in FULL_MASK alone.
        tree_mask_mode: a `TreeMaskMode`.
        dtype: torch.bool (the default) or torch.uint8; QLEN_ONLY_BITPACKING is always uint8.
        device: where the buffer lives; None is the CPU.

    Returns:
        1-D tensor of `mask_storage(tree_mask_mode, bs, num_draft_tokens, max_context_len, dtype)`.

    Raises:
        ValueError: for a negative size, an unknown mode, or a dtype that the mode cannot have.
    """
    mask: Tensor = _OP(
        bs,
        num_draft_tokens,
        max_context_len,
        tree_mask_mode,
        dtype=dtype,
        device=None if device is None else torch.device(device),
    )
    return mask
