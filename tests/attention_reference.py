"""Batches for tree attention, their masks, and a dense reference that shares no code with it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from torchvm.ops.layout import TreeMaskMode

FULL, QLEN, PACKED = TreeMaskMode
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16
SCALE = HEAD_DIM**-0.5


class Case(NamedTuple):
    """One batch: the op's tensors and, per request, what a reference needs."""

    query: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    trees: torch.Tensor


def random_trees(batch: int, n: int, generator: torch.Generator) -> torch.Tensor:
    """Tree blocks (B, n, n) bool of random parents, each with an unlinked last node."""
    trees = torch.zeros(batch, n, n, dtype=torch.bool)
    for b in range(batch):
        for i in range(n):
            if 0 < i < n - 1:
                parent = int(torch.randint(0, i, (1,), generator=generator))
                trees[b, i] = trees[b, parent]
            trees[b, i, i] = trees[b, i, 0] = True
    return trees


def make_case(
    lengths: list[int],
    n: int,
    *,
    dtype: torch.dtype = torch.float32,
    page_size: int | None = None,
    seed: int = 0,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    head_dim: int = HEAD_DIM,
) -> Case:
    """Random tensors; pages, when asked for, are shuffled and unused ones are NaN."""
    generator = torch.Generator().manual_seed(seed)
    batch, longest = len(lengths), max(lengths) + n

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    query = normal(batch, n, heads, head_dim) * 2
    keys = [normal(length + n, kv_heads, head_dim) for length in lengths]
    values = [normal(length + n, kv_heads, head_dim) for length in lengths]
    page_size = page_size or longest + 3
    columns = -(-longest // page_size)
    num_pages = batch * columns + 2
    caches = [torch.full((num_pages, page_size, kv_heads, head_dim), math.nan) for _ in "kv"]
    caches = [cache.to(dtype) for cache in caches]
    order = torch.randperm(num_pages, generator=generator)
    table = torch.full((batch, columns + 1), -7, dtype=torch.int32)
    for b in range(batch):
        for p in range(-(-len(keys[b]) // page_size)):
            page = int(order[b * columns + p])
            table[b, p] = page
            for cache, rows in zip(caches, (keys[b], values[b]), strict=True):
                piece = rows[p * page_size : (p + 1) * page_size]
                cache[page, : len(piece)] = piece
    trees = random_trees(batch, n, generator)
    seq_lens = torch.tensor(lengths, dtype=torch.int64)
    return Case(query, caches[0], caches[1], table, seq_lens, keys, values, trees)


def write_mask(case: Case, mode: int, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    """The batch's mask by plain loops; prefix cells and spare cells are garbage."""
    cells: list[int] = []
    n = case.trees.shape[1]
    for length, tree in zip(case.seq_lens.tolist(), case.trees.tolist(), strict=True):
        for row in tree:
            if mode == FULL:
                cells += [c % 3 == 1 for c in range(length)]
            if mode == PACKED:
                width = 8 if n <= 8 else 16 if n <= 16 else 32 if n <= 32 else -(-n // 64) * 64
                bits = sum(int(cell) << j for j, cell in enumerate(row))
                cells += bits.to_bytes(width // 8, "little")
            else:
                cells += row
    return torch.tensor([*cells, 1, 0, 1], dtype=torch.uint8 if mode == PACKED else dtype)


def dense(
    case: Case,
    *,
    dtype: torch.dtype = torch.float64,
    window: int = 0,
    cap: float = 0.0,
    trees: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention over an explicit (n, L + n) mask per request, all of it in `dtype`."""
    outs = []
    for b, length in enumerate(case.seq_lens.tolist()):
        tree = (case.trees if trees is None else trees)[b]
        n = len(tree)
        visible = torch.cat([torch.ones(n, length, dtype=torch.bool), tree], 1)
        node_positions = length + tree.sum(1) - 1
        if window:
            positions = torch.cat([torch.arange(length), node_positions])
            visible = visible & (node_positions[:, None] - positions < window)
        group = case.query.shape[2] // case.k_cache.shape[2]
        scale = case.query.shape[3] ** -0.5
        keys = case.keys[b].to(dtype).repeat_interleave(group, 1)
        values = case.values[b].to(dtype).repeat_interleave(group, 1)
        scores = torch.einsum("ihd,jhd->hij", case.query[b].to(dtype), keys) * scale
        if cap:
            scores = cap * torch.tanh(scores / cap)
        weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
        outs.append(torch.einsum("hij,jhd->ihd", weights, values))
    return torch.stack(outs)
