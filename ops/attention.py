"""torchvm::tree_attention: a portable reader of the verify mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchvm.ops.checks import check_mask
from torchvm.ops.contracts import MaskRead, register_mask_reader
from torchvm.ops.layout import TreeMaskMode, live_mask_numel, tree_mode
from torchvm.ops.library import register_op
from torchvm.ops.paged import check_attention, check_options, check_pages, must_be

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["tree_attention"]

_SCHEMA = (
    "tree_attention(Tensor query, Tensor k_cache, Tensor v_cache, Tensor page_table, "
    "Tensor seq_lens, Tensor? tree_mask, int tree_mask_mode, bool is_causal_chain, float scale, "
    "int sliding_window=0, float logit_cap=0.0) -> Tensor"
)


def _fake(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor | None,
    tree_mask_mode: int,
    is_causal_chain: bool,
    scale: float,  # noqa: ARG001
    sliding_window: int = 0,
    logit_cap: float = 0.0,
) -> Tensor:
    """Contiguous, of the query's shape and dtype; checks all that needs no data."""
    check_attention(query, k_cache, v_cache, page_table, seq_lens)
    check_options(sliding_window, logit_cap)
    mode = tree_mode(tree_mask_mode)
    if not is_causal_chain:
        _check_mask(tree_mask, mode, query)
    return query.new_empty(query.shape)


def _cpu(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor | None,
    tree_mask_mode: int,
    is_causal_chain: bool,
    scale: float,
    sliding_window: int = 0,
    logit_cap: float = 0.0,
) -> Tensor:
    from torchvm.ops.kernels import cpu_attention

    check_attention(query, k_cache, v_cache, page_table, seq_lens)
    check_options(sliding_window, logit_cap)
    mode = tree_mode(tree_mask_mode)
    n = query.shape[1]
    lengths = seq_lens.tolist()
    check_pages(page_table, lengths, n, k_cache.shape[0], k_cache.shape[1])
    mask = None
    if not is_causal_chain:
        mask = _check_mask(tree_mask, mode, query)
        least = live_mask_numel(mode, query.shape[0], n, sum(lengths))
        must_be(
            mask.numel() >= least,
            "tree_mask", f"of at least {least} elements for {mode.name} with these seq_lens",
            mask.numel(),
        )  # fmt: skip
    return cpu_attention.tree_attention(
        query, k_cache, v_cache, page_table, lengths, seq_lens, mask, mode, scale,
        sliding_window, logit_cap,
    )  # fmt: skip


def _cuda(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor | None,
    tree_mask_mode: int,
    is_causal_chain: bool,
    scale: float,
    sliding_window: int = 0,
    logit_cap: float = 0.0,
) -> Tensor:
    from torchvm.ops.kernels import triton_attention

    check_attention(query, k_cache, v_cache, page_table, seq_lens)
    check_options(sliding_window, logit_cap)
    mode = tree_mode(tree_mask_mode)
    mask = None
    if not is_causal_chain:
        mask = _check_mask(tree_mask, mode, query)
    return triton_attention.tree_attention(
        query, k_cache, v_cache, page_table, seq_lens, mask, mode, scale, sliding_window, logit_cap
    )


_OP = register_op(_SCHEMA, fake=_fake, kernels={"CPU": _cpu, "CUDA": _cuda})

register_mask_reader(
    "torchvm::tree_attention",
    arg="tree_mask",
    reads=lambda is_causal_chain, **_: (
        MaskRead.NOTHING if is_causal_chain else MaskRead.TREE_BLOCK
    ),
    mode_arg="tree_mask_mode",
    modes=tuple(TreeMaskMode),
    causal_arg="is_causal_chain",
)


def tree_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor | None,
    *,
    tree_mask_mode: int,
    is_causal_chain: bool,
    scale: float,
    sliding_window: int = 0,
    logit_cap: float = 0.0,
) -> Tensor:
    """Attend the draft tokens of each request to its committed tokens and to their tree.

    Node i of request b attends every position below L_b, and node j where the mask's tree block
    says so. The prefix columns of a FULL_MASK are not read. Keys and values of the n draft tokens
    already stand at positions L_b .. L_b + n - 1 of the caches, in node order.

    Args:
        query: (B, n, num_q_heads, head_dim) float32, float16 or bfloat16.
        k_cache: (num_pages, page_size, num_kv_heads, head_dim), the query's dtype; num_q_heads is
            a multiple of num_kv_heads.
        v_cache: like `k_cache`.
        page_table: (B, max_pages) int32; entry p of row b is the page that holds positions
            p * page_size and on. Entries past position L_b + n - 1 are not looked at. A
            contiguous cache is one page per request.
        seq_lens: (B,) int64 (int32 is converted), L of each request, draft tokens not counted.
        tree_mask: 1-D bool or uint8 in the layout `tree_mask_mode`; not looked at, and may be
            None, when `is_causal_chain`.
        tree_mask_mode: a `TreeMaskMode`.
        is_causal_chain: node i attends nodes 0 .. i.
        scale: factor on query times key.
        sliding_window: a node attends only what lies less than this many positions before it;
            a node's position is L_b + its depth, the number of cells set in its row less one.
            0 is no limit.
        logit_cap: c > 0 replaces a scaled score s by c * tanh(s / c).

    Returns:
        Like `query`, contiguous. Sums run in float32 and are rounded once. A node that attends
        nothing gets zeros.

    Raises:
        ValueError: for a shape, dtype, device or size that does not fit; on the CPU also for a
            length or page id out of range. A GPU reads lengths and ids where they are, with no
            wait for them, and so passes over what they name out of range: a length is cut to what
            its row of the page table covers, the keys of a page that does not exist and cells
            past the end of the mask count as hidden.
    """
    if seq_lens.dtype == torch.int32:
        seq_lens = seq_lens.long()
    out: Tensor = _OP(
        query, k_cache, v_cache, page_table, seq_lens, tree_mask, int(tree_mask_mode),
        is_causal_chain, scale, sliding_window, logit_cap,
    )  # fmt: skip
    return out


def _check_mask(tree_mask: Tensor | None, mode: int, query: Tensor) -> Tensor:
    """Require a mask that can hold the query's batch with lengths of 0."""
    if tree_mask is None:
        raise ValueError("tree_mask must be a tensor unless is_causal_chain, got None")
    batch, n = query.shape[:2]
    check_mask(tree_mask, mode, batch, n, device=query.device)
    return tree_mask
