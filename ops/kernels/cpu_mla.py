"""CPU kernel of absorbed multi-head latent attention: one request after another, in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchvm.ops.kernels.cpu_request import attend, gather

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["mla_attention"]


def mla_attention(
    query_latent: Tensor,
    query_rope: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    pages: list[list[int]],
    lengths: list[int],
    scale: float,
) -> Tensor:
    """Attend chains of draft tokens to latents; arguments are checked by the op.

    Args:
        query_latent: (B, n, num_heads, R).
        query_rope: (B, n, num_heads, P).
        latent_cache: (num_pages, page_size, R).
        rope_cache: (num_pages, page_size, P).
        pages: the page ids of each request's L + n positions.
        lengths: L of each request.
        scale: factor on query times key.

    Returns:
        Like `query_latent`, contiguous.
    """
    out = query_latent.new_empty(query_latent.shape)
    n, num_heads = query_latent.shape[1:3]
    for b, length in enumerate(lengths):
        total = length + n
        latents = gather(latent_cache.unsqueeze(2), pages[b], total)
        keys = torch.cat([latents, gather(rope_cache.unsqueeze(2), pages[b], total)], -1)
        # All heads share the keys: a head of a node is a row of its own, and no key is repeated.
        query = torch.cat([query_latent[b], query_rope[b]], -1).flatten(0, 1).unsqueeze(1)
        visible = torch.arange(total) <= torch.arange(length, total)[:, None]
        rows = visible.repeat_interleave(num_heads, 0)
        out[b] = attend(query, keys, latents, rows, scale=scale).view(out[b].shape)
    return out
