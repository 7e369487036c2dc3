"""torchvm::packed_attention: a reader of the bits that pack_mask_bits makes of a verify mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchvm.ops.checks import check_tensor, int64
from torchvm.ops.layout import packed_bits_numel
from torchvm.ops.library import register_op
from torchvm.ops.paged import check_attention, check_options, check_pages, must_be

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["packed_attention"]

_SCHEMA = (
    "packed_attention(Tensor query, Tensor k_cache, Tensor v_cache, Tensor page_table, "
    "Tensor seq_lens, Tensor packed_mask, Tensor mask_indptr, float scale, "
    "int sliding_window=0, float logit_cap=0.0) -> Tensor"
)


def _fake(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    packed_mask: Tensor,
    mask_indptr: Tensor,
    scale: float,  # noqa: ARG001
    sliding_window: int = 0,
    logit_cap: float = 0.0,
) -> Tensor:
    """Contiguous, of the query's shape and dtype; checks all that needs no data."""
    check_attention(query, k_cache, v_cache, page_table, seq_lens)
    check_options(sliding_window, logit_cap)
    device = query.device
    check_tensor("packed_mask", packed_mask, device, packed_mask.numel(), dtype=torch.uint8)
    check_tensor("mask_indptr", mask_indptr, device, query.shape[0] + 1)
    return query.new_empty(query.shape)


def _check_bits(packed_mask: Tensor, indptr: list[int], lengths: list[int], n: int) -> None:
    """Require bits of every cell of a batch of these lengths."""
    held = packed_mask.numel()
    for b, length in enumerate(lengths):
        first, size = indptr[b], int(packed_bits_numel(1, n, length))
        must_be(
            0 <= first <= held - size, "mask_indptr",
            f"of offsets that leave request {b} its {size} bytes of packed_mask's {held}", first,
        )  # fmt: skip


def _cpu(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    packed_mask: Tensor,
    mask_indptr: Tensor,
    scale: float,
    sliding_window: int = 0,
    logit_cap: float = 0.0,
) -> Tensor:
    from torchvm.ops.kernels import cpu_prefix_mask

    out = _fake(
        query, k_cache, v_cache, page_table, seq_lens, packed_mask, mask_indptr, scale,
        sliding_window, logit_cap,
    )  # fmt: skip
    n, lengths, indptr = query.shape[1], seq_lens.tolist(), mask_indptr.tolist()
    pages = check_pages(page_table, lengths, n, k_cache.shape[0], k_cache.shape[1])
    _check_bits(packed_mask, indptr, lengths, n)
    cells = cpu_prefix_mask.cells_of_bits(packed_mask, indptr, lengths, n)
    cpu_prefix_mask.prefix_attention(
        query, k_cache, v_cache, pages, lengths, cells, scale, sliding_window, logit_cap, out
    )
    return out


def _cuda(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    packed_mask: Tensor,
    mask_indptr: Tensor,
    scale: float,
    sliding_window: int = 0,
    logit_cap: float = 0.0,
) -> Tensor:
    from torchvm.ops.kernels import triton_unified

    out = _fake(
        query, k_cache, v_cache, page_table, seq_lens, packed_mask, mask_indptr, scale,
        sliding_window, logit_cap,
    )  # fmt: skip
    triton_unified.prefix_attention(
        query, k_cache, v_cache, page_table, seq_lens, packed_mask, mask_indptr, scale,
        sliding_window, logit_cap, out,
    )  # fmt: skip
    return out


_OP = register_op(_SCHEMA, fake=_fake, kernels={"CPU": _cpu, "CUDA": _cuda})


def packed_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    packed_mask: Tensor,
    mask_indptr: Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    logit_cap: float = 0.0,
) -> Tensor:
    """Attend the draft tokens of each request to what their bits of the packed mask show.

    Like `unified_attention`, with the mask that `pack_mask_bits` makes: node i of request b sees
    position p where bit i * (L_b + n) + p, counted from byte mask_indptr[b], is set.

    Args:
        query: (B, n, num_q_heads, head_dim) float32, float16 or bfloat16.
        k_cache: (num_pages, page_size, num_kv_heads, head_dim), the query's dtype; num_q_heads is
            a multiple of num_kv_heads. The draft tokens stand at positions L_b .. L_b + n - 1.
        v_cache: like `k_cache`.
        page_table: (B, max_pages) int32; entry p of row b is the page that holds positions
            p * page_size and on. Entries past position L_b + n - 1 are not looked at.
        seq_lens: (B,) int64 (int32 is converted), L of each request, draft tokens not counted.
        packed_mask: 1-D uint8, little-endian bits.
        mask_indptr: (B + 1,) int64 (int32 is converted), bytes; the last entry is not looked at.
        scale: factor on query times key.
        sliding_window: a node attends only what lies less than this many positions before it;
            a node's position is L_b + its depth, the number of bits set in its row of the tree
            block less one. 0 is no limit.
        logit_cap: c > 0 replaces a scaled score s by c * tanh(s / c).

    Returns:
        Like `query`, contiguous. Sums run in float32. A node that attends nothing gets zeros.

    Raises:
        ValueError: for a shape, dtype or size that does not fit. What only the data shows, a
            length, a page id or an offset, is looked at on the CPU alone; a GPU, which is not
            waited for, attends no position whose page id or table entry is out of range, and
            takes bits outside the buffer for 0.
    """
    out: Tensor = _OP(
        query, k_cache, v_cache, page_table, int64(seq_lens), packed_mask, int64(mask_indptr),
        scale, sliding_window, logit_cap,
    )  # fmt: skip
    return out
