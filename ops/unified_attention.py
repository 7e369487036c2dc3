"""torchvm::unified_attention: a reader of the whole verify mask, prefix columns included."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchvm.ops.checks import check_live_mask, check_mask, int64
from torchvm.ops.contracts import MaskRead, register_mask_reader
from torchvm.ops.layout import TreeMaskMode
from torchvm.ops.library import register_op
from torchvm.ops.paged import check_attention, check_options, check_pages

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["unified_attention"]

_SCHEMA = (
    "unified_attention(Tensor query, Tensor k_cache, Tensor v_cache, Tensor page_table, "
    "Tensor seq_lens, Tensor tree_mask, float scale, int sliding_window=0, "
    "float logit_cap=0.0) -> Tensor"
)
_FULL = TreeMaskMode.FULL_MASK


def _fake(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    scale: float,  # noqa: ARG001
    sliding_window: int = 0,
    logit_cap: float = 0.0,
) -> Tensor:
    """Contiguous, of the query's shape and dtype; checks all that needs no data."""
    check_attention(query, k_cache, v_cache, page_table, seq_lens)
    check_options(sliding_window, logit_cap)
    check_mask(tree_mask, _FULL, query.shape[0], query.shape[1], device=query.device)
    return query.new_empty(query.shape)


def _cpu(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    scale: float,
    sliding_window: int = 0,
    logit_cap: float = 0.0,
) -> Tensor:
    from torchvm.ops.kernels import cpu_prefix_mask

    out = _fake(
        query, k_cache, v_cache, page_table, seq_lens, tree_mask, scale, sliding_window, logit_cap
    )
    n, lengths = query.shape[1], seq_lens.tolist()
    pages = check_pages(page_table, lengths, n, k_cache.shape[0], k_cache.shape[1])
    check_live_mask(tree_mask, _FULL, lengths, n)
    cells = cpu_prefix_mask.cells_of_mask(tree_mask, seq_lens, n)
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
    tree_mask: Tensor,
    scale: float,
    sliding_window: int = 0,
    logit_cap: float = 0.0,
) -> Tensor:
    from torchvm.ops.kernels import triton_unified

    out = _fake(
        query, k_cache, v_cache, page_table, seq_lens, tree_mask, scale, sliding_window, logit_cap
    )
    triton_unified.prefix_attention(
        query, k_cache, v_cache, page_table, seq_lens, tree_mask, None, scale, sliding_window,
        logit_cap, out,
    )  # fmt: skip
    return out


_OP = register_op(_SCHEMA, fake=_fake, kernels={"CPU": _cpu, "CUDA": _cuda})

register_mask_reader("torchvm::unified_attention", arg="tree_mask", reads=MaskRead.FULL)


def unified_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    logit_cap: float = 0.0,
) -> Tensor:
    """Attend the draft tokens of each request to what their rows of the FULL_MASK show.

    Prefix and tree are one loop over the positions 0 .. L_b + n - 1, and every cell of the mask
    is read: a prefix cell of 0 hides that position from that node. Keys and values of the n draft
    tokens already stand at positions L_b .. L_b + n - 1 of the caches, in node order. A position
    that every node of a request is kept from may hold anything, NaN included.

    Args:
        query: (B, n, num_q_heads, head_dim) float32, float16 or bfloat16.
        k_cache: (num_pages, page_size, num_kv_heads, head_dim), the query's dtype; num_q_heads is
            a multiple of num_kv_heads.
        v_cache: like `k_cache`.
        page_table: (B, max_pages) int32; entry p of row b is the page that holds positions
            p * page_size and on. Entries past position L_b + n - 1 are not looked at.
        seq_lens: (B,) int64 (int32 is converted), L of each request, draft tokens not counted.
        tree_mask: 1-D contiguous bool or uint8, FULL_MASK. Request b begins at the sum of
            n * (L_c + n) over the requests c before it, and its rows are L_b + n apart.
        scale: factor on query times key.
        sliding_window: a node attends only what lies less than this many positions before it;
            a node's position is L_b + its depth, the number of cells set in its row of the tree
            block less one. 0 is no limit.
        logit_cap: c > 0 replaces a scaled score s by c * tanh(s / c).

    Returns:
        Like `query`, contiguous. Sums run in float32. A node that attends nothing gets zeros.

    Raises:
        ValueError: for a shape, dtype or size that does not fit. What only the data shows, a
            length, a page id or a mask too small for the lengths, is looked at on the CPU alone;
            a GPU, which is not waited for, attends no position whose page id or table entry is
            out of range, and takes cells past the mask for 0.
    """
    out: Tensor = _OP(
        query, k_cache, v_cache, page_table, int64(seq_lens), tree_mask, scale, sliding_window,
        logit_cap,
    )  # fmt: skip
    return out
