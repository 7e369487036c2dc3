"""torchvm::alloc_verify_mask and torchvm::mask_convert: the buffer that the tree ops write."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchvm.ops.checks import check_mask, check_sizes, check_tensor, int64
from torchvm.ops.contracts import MaskRead, register_mask_reader
from torchvm.ops.kernels import convert_mask
from torchvm.ops.layout import TreeMaskMode, mask_storage, tree_mode
from torchvm.ops.library import register_op

if TYPE_CHECKING:
    from torch import SymInt, Tensor

__all__ = ["alloc_verify_mask", "mask_convert"]

_SCHEMA = (
    "alloc_verify_mask(SymInt bs, SymInt num_draft_tokens, SymInt max_context_len, "
    "int tree_mask_mode, *, ScalarType? dtype=None, Device? device=None) -> Tensor"
)
_CONVERT_SCHEMA = (
    "mask_convert(Tensor mask, Tensor seq_lens, int from_mode, int to_mode, "
    "SymInt num_draft_tokens, SymInt max_context_len) -> Tensor"
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
    check_sizes(bs=bs, num_draft_tokens=num_draft_tokens, max_context_len=max_context_len)
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


def _convert_fake(
    mask: Tensor,
    seq_lens: Tensor,
    from_mode: int,
    to_mode: int,
    num_draft_tokens: int | SymInt,
    max_context_len: int | SymInt,
) -> Tensor:
    """Zeros of the size of a mask for (B, n, max_context_len); dtype as `mask_convert` says."""
    check_sizes(num_draft_tokens=num_draft_tokens, max_context_len=max_context_len)
    batch = seq_lens.numel()
    check_tensor("seq_lens", seq_lens, mask.device, batch)
    check_mask(mask, tree_mode(from_mode), batch, num_draft_tokens, name="mask")
    packed = TreeMaskMode.QLEN_ONLY_BITPACKING
    dtype = None if packed in (from_mode, tree_mode(to_mode)) else mask.dtype
    numel, dtype = mask_storage(to_mode, batch, num_draft_tokens, max_context_len, dtype)
    return mask.new_zeros(numel, dtype=dtype)


def _convert(
    mask: Tensor,
    seq_lens: Tensor,
    from_mode: int,
    to_mode: int,
    num_draft_tokens: int,
    max_context_len: int,
) -> Tensor:
    out = _convert_fake(mask, seq_lens, from_mode, to_mode, num_draft_tokens, max_context_len)
    return convert_mask.mask_convert(
        mask, seq_lens, tree_mode(from_mode), tree_mode(to_mode), num_draft_tokens,
        max_context_len, out,
    )  # fmt: skip


_OP = register_op(_SCHEMA, fake=_alloc, kernels={"CompositeExplicitAutograd": _alloc})
_CONVERT_OP = register_op(
    _CONVERT_SCHEMA, fake=_convert_fake, kernels={"CPU": _convert, "CUDA": _convert}
)

# Not packed masks: the dtype of the result would depend on what a pass chose.
register_mask_reader(
    "torchvm::mask_convert",
    arg="mask",
    reads=lambda from_mode, to_mode, **_: (
        MaskRead.FULL if from_mode == to_mode == TreeMaskMode.FULL_MASK else MaskRead.TREE_BLOCK
    ),
    mode_arg="from_mode",
)


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

    Example:
        >>> import torchvm
        >>> from torchvm import TreeMaskMode
        >>> torchvm.alloc_verify_mask(2, 4, 100, TreeMaskMode.FULL_MASK).shape
        torch.Size([832])
        >>> torchvm.alloc_verify_mask(2, 4, 100, TreeMaskMode.QLEN_ONLY_BITPACKING).shape
        torch.Size([8])
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


def mask_convert(
    mask: Tensor,
    seq_lens: Tensor,
    *,
    from_mode: int,
    to_mode: int,
    num_draft_tokens: int,
    max_context_len: int,
) -> Tensor:
    """Copy the mask of a batch to another layout.

    Compact layouts hold no prefix: it becomes ones on the way to FULL_MASK, and is dropped on
    the way from it. The lengths are read on the host, so that a GPU is waited for.

    Args:
        mask: 1-D contiguous bool or uint8 (uint8 when packed), in the layout `from_mode`.
        seq_lens: (B,) int64 (int32 is converted), committed length of each request.
        from_mode: the `TreeMaskMode` of `mask`.
        to_mode: the `TreeMaskMode` of the result, which may be the same.
        num_draft_tokens: n, root included.
        max_context_len: most committed tokens a request may have; sizes a FULL_MASK result.

    Returns:
        1-D tensor of `mask_storage(to_mode, B, num_draft_tokens, max_context_len)` elements that
        are 0 or 1 (bytes of bits when packed), 0 past the batch. Its dtype is uint8 when it is
        packed, bool when the source is packed, and the source's otherwise.

    Raises:
        ValueError: for a shape, dtype or mode that does not fit, a mask that is too small, or a
            length that is negative or does not fit the result.

    Example:
        >>> import torch, torchvm
        >>> from torchvm import TreeMaskMode
        >>> block = torch.tensor([1, 0, 0, 1, 1, 0, 1, 0, 1], dtype=torch.bool)
        >>> torchvm.mask_convert(
        ...     block, torch.tensor([2]), from_mode=TreeMaskMode.QLEN_ONLY,
        ...     to_mode=TreeMaskMode.QLEN_ONLY_BITPACKING, num_draft_tokens=3, max_context_len=2,
        ... ).tolist()
        [1, 3, 5]
    """
    converted: Tensor = _CONVERT_OP(
        mask, int64(seq_lens), int(from_mode), int(to_mode), num_draft_tokens, max_context_len
    )
    return converted
