"""Attention without a mask on the CPU, with the logarithm of its sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchvm.ops.kernels.cpu_request import attend, gather, log_sums

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["paged_attention"]


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    pages: list[list[int]],
    lengths: list[int],
    is_causal: bool,
    scale: float,
    sliding_window: int,
    logit_cap: float,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor]:
    """Attend request by request; arguments are checked by the op.

    Args:
        query: (B, n, num_q_heads, head_dim).
        k_cache: (num_pages, page_size, num_kv_heads, head_dim).
        v_cache: like `k_cache`.
        pages: page ids of each request.
        lengths: kv_lens.
        is_causal: query i sees positions up to length - n + i.
        scale: factor on query times key.
        sliding_window: 0 is no limit.
        logit_cap: 0 is no cap.
        out: like `query`, written.
        lse: (B, n, num_q_heads) float32, written.

    Returns:
        `out` and `lse`.
    """
    n = query.shape[1]
    for b, (ids, length) in enumerate(zip(pages, lengths, strict=True)):
        keys, values = gather(k_cache, ids, length), gather(v_cache, ids, length)
        visible = _visible(n, length, is_causal, sliding_window)
        options = {"scale": scale, "logit_cap": logit_cap}
        out[b] = attend(query[b], keys, values, visible, **options)
        lse[b] = log_sums(query[b], keys, visible, **options)
    return out, lse


def _visible(n: int, length: int, is_causal: bool, sliding_window: int) -> Tensor:
    if not is_causal:
        return torch.ones(n, length, dtype=torch.bool)
    behind = torch.arange(length - n, length).unsqueeze(1) - torch.arange(length)
    visible = behind >= 0
    return visible & (behind < sliding_window) if sliding_window else visible
