"""Masks that span the prefix, on the CPU: cells and bits, and attention that reads them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import torch

from torchvm.ops.kernels.cpu_request import attend, gather
from torchvm.ops.layout import packed_bits_offsets, request_offsets

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["cells_of_bits", "cells_of_mask", "pack_mask_bits", "prefix_attention"]


def cells_of_mask(tree_mask: Tensor, seq_lens: Tensor, n: int) -> list[Tensor]:
    """Read a FULL_MASK that holds the batch: per request (n, L + n) bool."""
    offsets = request_offsets(seq_lens, n).tolist()
    return [tree_mask[begin:end].view(n, -1) != 0 for begin, end in itertools.pairwise(offsets)]


def cells_of_bits(
    packed_mask: Tensor, mask_indptr: list[int], lengths: list[int], n: int
) -> list[Tensor]:
    """Read bits that hold the batch: per request (n, L + n) bool."""
    cells = []
    for begin, length in zip(mask_indptr, lengths, strict=False):
        count = n * (length + n)
        held = packed_mask[begin : begin + (count + 7) // 8].numpy()
        bits = np.unpackbits(held, count=count, bitorder="little")
        cells.append(torch.from_numpy(bits).view(n, -1) != 0)
    return cells


def pack_mask_bits(
    tree_mask: Tensor, seq_lens: Tensor, num_draft_tokens: int, packed: Tensor, indptr: Tensor
) -> None:
    """Write bits and offsets of a batch; arguments are checked by the op.

    Args:
        tree_mask: 1-D bool or uint8 in FULL_MASK, which holds the batch.
        seq_lens: (B,) int64.
        num_draft_tokens: n, root included.
        packed: 1-D uint8, large enough; written, with 0 past the batch.
        indptr: (B + 1,) int64, written.
    """
    indptr.copy_(packed_bits_offsets(seq_lens, num_draft_tokens))
    offsets = indptr.tolist()
    requests = cells_of_mask(tree_mask, seq_lens, num_draft_tokens)
    for cells, (begin, end) in zip(requests, itertools.pairwise(offsets), strict=True):
        bits = np.packbits(cells.flatten().numpy(), bitorder="little")
        packed[begin:end] = torch.from_numpy(bits)
    packed[offsets[-1] :] = 0


def _in_window(cells: Tensor, length: int, window: int) -> Tensor:
    """Say which positions lie less than `window` before each node, by depth: (n, L + n) bool."""
    nodes = length + cells[:, length:].sum(1) - 1
    positions = torch.cat([torch.arange(length), nodes])
    return nodes[:, None] - positions < window


def prefix_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    pages: list[list[int]],
    lengths: list[int],
    requests: list[Tensor],
    scale: float,
    sliding_window: int,
    logit_cap: float,
    out: Tensor,
) -> None:
    """Attend each request to what its cells show; arguments are checked by the op.

    Args:
        query: (B, n, num_q_heads, dim).
        k_cache: (num_pages, page_size, num_kv_heads, dim).
        v_cache: like `k_cache`.
        pages: the page ids of each request.
        lengths: L of each request.
        requests: per request (n, L + n) bool, the cells of its mask.
        scale: factor on query times key.
        sliding_window: 0 is no limit.
        logit_cap: 0 is no cap.
        out: like `query`, written.
    """
    for b, (ids, length, cells) in enumerate(zip(pages, lengths, requests, strict=True)):
        visible = cells & _in_window(cells, length, sliding_window) if sliding_window else cells
        keys, values = (gather(cache, ids, cells.shape[1]) for cache in (k_cache, v_cache))
        out[b] = attend(query[b], keys, values, visible, scale=scale, logit_cap=logit_cap)
