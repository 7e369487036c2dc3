"""Masks that span the prefix and attention over them, in plain loops and float64."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    Floats = NDArray[np.float64]

__all__ = ["Batch", "attend", "bits", "draw_batch", "full_mask"]

HEADS, KV_HEADS = 6, 2
SCALE = 0.3


class Batch(NamedTuple):
    """A batch for the ops, and per request what a reference needs of it."""

    query: Tensor
    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    seq_lens: Tensor
    cells: list[list[list[int]]]
    """Per request n rows of L + n cells, 0 or 1."""
    keys: list[Floats]
    """Per request (L + n, KV_HEADS, dim)."""
    values: list[Floats]

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What every reader takes before its mask."""
        return self.query, self.k_cache, self.v_cache, self.page_table, self.seq_lens

    @property
    def n(self) -> int:
        """Draft tokens."""
        return self.query.shape[1]

    def to(self, device: torch.device) -> Batch:
        """The batch, its tensors on another device."""
        return self._replace(
            query=self.query.to(device), k_cache=self.k_cache.to(device),
            v_cache=self.v_cache.to(device), page_table=self.page_table.to(device),
            seq_lens=self.seq_lens.to(device),
        )  # fmt: skip


def _draw_cells(rng: random.Random, length: int, n: int) -> list[list[int]]:
    """Rows of a random tree, whose prefix is cleared at random and every fifth tree is any."""
    rows: list[list[int]] = []
    for i in range(n):
        tree = list(rows[rng.randrange(i)][length:]) if i else [0] * n
        tree[0] = tree[i] = 1
        rows.append([int(rng.random() < 0.7) for _ in range(length)] + tree)
    if rng.random() < 0.2:
        return [[int(rng.random() < 0.5) for _ in row] for row in rows]
    return rows


def draw_batch(
    lengths: list[int],
    n: int,
    *,
    dim: int = 16,
    page_size: int = 4,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Batch:
    """Random tensors; pages are shuffled, and all that no request holds is NaN or no page."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)  # noqa: S311

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    query = normal(len(lengths), n, HEADS, dim) * 2
    counts = [-(-(length + n) // page_size) for length in lengths]
    free = list(range(sum(counts) + 2))
    rng.shuffle(free)
    k_cache, v_cache = (
        torch.full((len(free), page_size, KV_HEADS, dim), torch.nan, dtype=dtype) for _ in "kv"
    )
    table = torch.full((len(lengths), max(counts, default=0) + 1), -7, dtype=torch.int32)
    cells: list[list[list[int]]] = []
    keys: list[Floats] = []
    values: list[Floats] = []
    for b, length in enumerate(lengths):
        pages = [free.pop() for _ in range(counts[b])]
        table[b, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        for cache, sides in ((k_cache, keys), (v_cache, values)):
            side = normal(length + n, KV_HEADS, dim)
            for p in range(length + n):
                cache[pages[p // page_size], p % page_size] = side[p]
            sides.append(side.double().numpy())
        cells.append(_draw_cells(rng, length, n))
    seq_lens = torch.tensor(lengths, dtype=torch.int64)
    return Batch(query, k_cache, v_cache, table, seq_lens, cells, keys, values)


def full_mask(batch: Batch, dtype: torch.dtype = torch.bool, spare: int = 5) -> Tensor:
    """The FULL_MASK of a batch; `spare` cells past it are garbage, as set cells are in uint8."""
    flat = [cell for rows in batch.cells for row in rows for cell in row]
    if dtype is torch.uint8:
        flat = [cell * (1 + i * 37 % 255) for i, cell in enumerate(flat)]
    return torch.tensor([*flat, *([1, 0] * spare)[:spare]], dtype=dtype)


def bits(batch: Batch, gap: int = 0) -> tuple[list[int], list[int]]:
    """Bytes of each request's cells, little-endian, and offsets; `gap` bytes of garbage before."""
    octets: list[int] = []
    offsets = []
    for rows in batch.cells:
        octets += [0xA5] * gap
        offsets.append(len(octets))
        flat = [cell for row in rows for cell in row]
        for at in range(0, len(flat), 8):
            octets.append(sum(cell << i for i, cell in enumerate(flat[at : at + 8])))
    return octets, [*offsets, len(octets)]


def _sees(rows: list[list[int]], length: int, i: int, p: int, window: int) -> bool:
    """Whether node i sees position p, a node's position being L + its depth."""
    if not rows[i][p]:
        return False
    own = length + sum(rows[i][length:]) - 1
    at = p if p < length else length + sum(rows[p - length][length:]) - 1
    return window == 0 or own - at < window


def attend(batch: Batch, window: int = 0, cap: float = 0.0) -> Floats:
    """Attention of every node to what its row shows: (B, n, HEADS, dim)."""
    query = batch.query.double().cpu().numpy()
    out = np.zeros(query.shape)
    for b, length in enumerate(batch.seq_lens.tolist()):
        rows = batch.cells[b]
        for i in range(batch.n):
            seen = [p for p in range(length + batch.n) if _sees(rows, length, i, p, window)]
            for h in range(HEADS) if seen else ():
                g = h * KV_HEADS // HEADS
                scores = batch.keys[b][seen, g] @ query[b, i, h] * SCALE
                if cap:
                    scores = cap * np.tanh(scores / cap)
                weights = np.exp(scores - scores.max())
                out[b, i, h] = weights @ batch.values[b][seen, g] / weights.sum()
    return out
