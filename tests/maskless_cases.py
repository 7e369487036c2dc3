"""Batches for the attention ops that read no mask; whatever must not be read is NaN."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import torch
from torch import Tensor

SCALE = 0.3


class Mla(NamedTuple):
    """Arguments of `mla_attention`, in order."""

    query_latent: Tensor
    query_rope: Tensor
    latent_cache: Tensor
    rope_cache: Tensor
    page_table: Tensor
    seq_lens: Tensor
    scale: float = SCALE


class Sparse(NamedTuple):
    """Arguments of `sparse_window_attention`, in order."""

    query: Tensor
    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    positions: Tensor
    compressed_k: Tensor
    compressed_v: Tensor
    selected: Tensor
    scale: float = SCALE
    sliding_window: int = 5


class Paged(NamedTuple):
    """Arguments of `paged_attention`, in order."""

    query: Tensor
    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    kv_lens: Tensor
    is_causal: bool
    scale: float = SCALE
    sliding_window: int = 0
    logit_cap: float = 0.0


class Linear(NamedTuple):
    """Arguments of `gated_delta_tree`, in order."""

    query: Tensor
    key: Tensor
    value: Tensor
    gate: Tensor
    beta: Tensor
    initial_state: Tensor
    retrieve_next_token: Tensor
    retrieve_next_sibling: Tensor
    scale: float = SCALE


def _paged(
    read: list[list[int]],
    page_size: int,
    *widths: tuple[int, ...],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> tuple[list[Tensor], Tensor]:
    """Caches of the widths with random entries at the positions read, and the page table.

    Pages are shuffled; entries and pages that are not read are NaN, and so are table entries of
    no such page.
    """
    columns = max((max(row) // page_size + 1 for row in read if row), default=0) + 1
    num_pages = len(read) * columns + 2
    order = torch.randperm(num_pages, generator=generator).tolist()
    caches = [torch.full((num_pages, page_size, *w), math.nan, dtype=dtype) for w in widths]
    table = torch.full((len(read), columns), -7, dtype=torch.int32)
    for b, row in enumerate(read):
        for position in row:
            column = position // page_size
            page = order[b * columns + column]
            table[b, column] = page
            for cache, width in zip(caches, widths, strict=True):
                drawn = torch.randn(width, generator=generator)
                cache[page, position % page_size] = drawn.to(dtype)
    return caches, table


def draw_mla(
    lengths: list[int],
    n: int,
    *,
    heads: int = 3,
    rank: int = 20,
    rope: int = 6,
    page_size: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Mla:
    """Requests of these lengths, n draft tokens each."""
    generator = torch.Generator().manual_seed(seed)
    read = [list(range(length + n)) for length in lengths]
    caches, table = _paged(read, page_size, (rank,), (rope,), dtype=dtype, generator=generator)
    latent, rotary = (
        torch.randn(len(lengths), n, heads, width, generator=generator).to(dtype)
        for width in (rank, rope)
    )
    seq_lens = torch.tensor(lengths, dtype=torch.int64)
    return Mla(latent, rotary, caches[0], caches[1], table, seq_lens)


def draw_sparse(
    lengths: list[int],
    n: int,
    *,
    window: int = 5,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 20,
    num_blocks: int = 9,
    num_selected: int = 4,
    page_size: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Sparse:
    """Chains that follow so many committed tokens; blocks that nobody selects are NaN."""
    generator = torch.Generator().manual_seed(seed)
    rng = random.Random(seed)  # noqa: S311
    batch = len(lengths)
    read = [list(range(max(length - window + 1, 0), length + n)) for length in lengths]
    width = (kv_heads, head_dim)
    caches, table = _paged(read, page_size, width, width, dtype=dtype, generator=generator)
    compressed = [torch.full((batch, num_blocks, *width), math.nan, dtype=dtype) for _ in "kv"]
    selected = torch.full((batch, n, num_selected), -1, dtype=torch.int32)
    for b in range(batch):
        # No node selects the first and the last block, and some nodes none at all.
        few = rng.sample(range(1, num_blocks - 1), min(num_selected, num_blocks - 2))
        for made in compressed:
            made[b, few] = torch.randn(len(few), *width, generator=generator).to(dtype)
        for i in range(n):
            for place, block in enumerate(rng.sample(few, rng.randint(0, len(few)))):
                selected[b, i, place] = block
            order = torch.tensor(rng.sample(range(num_selected), num_selected), dtype=torch.int64)
            selected[b, i] = selected[b, i, order]
    query = torch.randn(batch, n, heads, head_dim, generator=generator).to(dtype)
    positions = torch.tensor(lengths, dtype=torch.int64)[:, None] + torch.arange(n)
    return Sparse(
        query, caches[0], caches[1], table, positions, compressed[0], compressed[1], selected,
        sliding_window=window,
    )  # fmt: skip


def draw_paged(
    lengths: list[int],
    n: int,
    *,
    causal: bool = True,
    window: int = 0,
    cap: float = 0.0,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 20,
    page_size: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Paged:
    """Requests of so many positions, n queries each; what lies before every window is NaN."""
    generator = torch.Generator().manual_seed(seed)
    read = [
        list(range(max(length - n - window + 1, 0) if window else 0, length)) for length in lengths
    ]
    width = (kv_heads, head_dim)
    caches, table = _paged(read, page_size, width, width, dtype=dtype, generator=generator)
    # Pages before every window are live, whatever they hold.
    spare = min(set(range(len(caches[0]))) - set(table.flatten().tolist()))
    for row, length in zip(table, lengths, strict=True):
        live = row[: -(-length // page_size)]
        live[live < 0] = spare
    query = torch.randn(len(lengths), n, heads, head_dim, generator=generator).to(dtype)
    kv_lens = torch.tensor(lengths, dtype=torch.int64)
    return Paged(
        query, caches[0], caches[1], table, kv_lens, causal, sliding_window=window, logit_cap=cap
    )


def links_of(parents: list[int]) -> tuple[list[int], list[int]]:
    """First child and next sibling of each node, -1 where none; a parent of -1 has no children."""
    n = len(parents)
    children, siblings = [-1] * n, [-1] * n
    for node in range(1, n):
        if parents[node] < 0:
            continue
        before = [other for other in range(1, node) if parents[other] == parents[node]]
        if before:
            siblings[before[-1]] = node
        else:
            children[parents[node]] = node
    return children, siblings


def draw_linear(
    parents: list[list[int]],
    *,
    heads: int = 2,
    key_width: int = 5,
    value_width: int = 7,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Linear:
    """Trees with these parents, -1 for a node that no link reaches; keys have length one."""
    generator = torch.Generator().manual_seed(seed)
    batch, n = len(parents), len(parents[0]) if parents else 3

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, generator=generator)

    query = normal(n, heads, key_width)
    key = torch.nn.functional.normalize(normal(n, heads, key_width), dim=-1)
    value = normal(n, heads, value_width)
    links = [links_of(row) for row in parents]
    children, siblings = (
        torch.tensor([link[side] for link in links], dtype=torch.int64).view(batch, n)
        for side in (0, 1)
    )
    return Linear(
        query.to(dtype), key.to(dtype), value.to(dtype),
        -normal(n, heads).abs(), normal(n, heads).sigmoid(), normal(heads, key_width, value_width),
        children, siblings,
    )  # fmt: skip


def draw_parents(batch: int, n: int, seed: int) -> list[list[int]]:
    """Random trees, the first a chain; now and then a node hangs on nobody."""
    rng = random.Random(seed)  # noqa: S311
    return [
        [
            -1 if i == 0 or (b and rng.random() < 0.15) else rng.randrange(i) if b else i - 1
            for i in range(n)
        ]
        for b in range(batch)
    ]
