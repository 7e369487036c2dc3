"""CPU kernel of attention to a window and to selected blocks: node after node, in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchvm.ops.kernels.cpu_request import attend, gather

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["sparse_window_attention"]


def sparse_window_attention(
    query: Tensor,
    caches: tuple[Tensor, Tensor],
    compressed: tuple[Tensor, Tensor],
    page_table: Tensor,
    positions: list[list[int]],
    selected: list[list[list[int]]],
    scale: float,
    sliding_window: int,
) -> Tensor:
    """Attend each node; arguments are checked by the op.

    Args:
        query: (B, n, num_q_heads, head_dim).
        caches: keys and values, (num_pages, page_size, num_kv_heads, head_dim) each.
        compressed: keys and values of blocks, (B, max_blocks, num_kv_heads, head_dim) each.
        page_table: (B, max_pages) int32.
        positions: position of each node of each request.
        selected: block indices of each node of each request, -1 for none.
        scale: factor on query times key.
        sliding_window: positions that a node sees, its own included.

    Returns:
        Like `query`, contiguous.
    """
    out = query.new_empty(query.shape)
    page_size = caches[0].shape[1]
    for b, nodes in enumerate(positions):
        for i, position in enumerate(nodes):
            first = max(position - sliding_window + 1, 0)
            pages = page_table[b, first // page_size : position // page_size + 1].tolist()
            end = position + 1 - first // page_size * page_size
            blocks = [block for block in selected[b][i] if block >= 0]
            keys, values = (
                torch.cat([gather(cache, pages, end)[first % page_size :], made[b, blocks]])
                for cache, made in zip(caches, compressed, strict=True)
            )
            visible = torch.ones(1, keys.shape[0], dtype=torch.bool)
            out[b, i] = attend(query[b, i : i + 1], keys, values, visible, scale=scale)[0]
    return out
