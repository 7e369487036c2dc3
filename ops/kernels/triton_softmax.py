"""Device functions of attention through a page table: where positions lie, softmax in tiles."""

# Compile-time arguments are in capitals, as everywhere in Triton, whose decorator has no types.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

NOTHING = tl.constexpr(float("-inf"))
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def pages_of(
    page_table: tl.tensor,
    position: tl.tensor,
    live: tl.tensor,
    num_pages: tl.tensor,
    page_size: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Page and slot of each position, int64, and whether there is such a page.

    Args:
        page_table: pointer to the request's int32 row.
        position: int64 block.
        live: bool block, positions that the row has a column for.
        num_pages: pages of the cache.
        page_size: positions of a page.
    """
    page = tl.load(page_table + position // page_size, mask=live, other=-1).to(tl.int64)
    live &= (page >= 0) & (page < num_pages)
    return tl.where(live, page, 0), position % page_size, live


@triton.jit
def tile_of(
    rows: tl.tensor, offset: tl.tensor, live: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """Load rows of `width` adjacent elements: (len(offset), BLOCK), zeros where nothing is.

    Args:
        rows: pointer.
        offset: int64 block, element where each row begins.
        live: bool block, rows to load.
        width: elements of a row.
        BLOCK: power of two, at least `width`.
    """
    column = tl.arange(0, BLOCK)[None, :]
    return tl.load(
        rows + offset[:, None] + column, mask=live[:, None] & (column < width), other=0.0
    )


@triton.jit
def accumulate(
    scores: tl.tensor,
    values: tl.tensor,
    total: tl.tensor,
    largest: tl.tensor,
    weight: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Take one tile of keys into a running softmax.

    Args:
        scores: float32 (M, T) in powers of two, NOTHING where a row does not see a key.
        values: (T, D).
        total: float32 (M, D), weighted sum of values so far.
        largest: float32 (M,), largest score so far.
        weight: float32 (M,), sum of weights so far.

    Returns:
        total, largest and weight with the tile in them.
    """
    following = tl.maximum(largest, tl.max(scores, axis=1))
    # A row that has seen no key: any finite number keeps its weights at zero.
    base = tl.where(following == NOTHING, 0.0, following)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(largest - base)
    weight = weight * shrink + tl.sum(weights, axis=1)
    total = tl.dot(
        weights.to(values.dtype), values, total * shrink[:, None], input_precision="ieee"
    )
    return total, following, weight


@triton.jit
def mean_of(total: tl.tensor, weight: tl.tensor) -> tl.tensor:
    """Divide the weighted sum by the weights; zeros for a row that saw nothing."""
    return total / tl.where(weight == 0, 1.0, weight)[:, None]


@triton.jit
def log_sum_of(largest: tl.tensor, weight: tl.tensor) -> tl.tensor:
    """Natural logarithm of the sum of the weights; NOTHING for a row that saw nothing."""
    power = largest + tl.log2(tl.where(weight == 0, 1.0, weight))
    return tl.where(weight == 0, NOTHING, power / LOG2_E)


def tile_shape(num_rows: int, width: int, itemsize: int, *, is_hip: bool) -> dict[str, int]:
    """Rows and keys of a tile, its warps and stages: what stays in registers at this width.

    Args:
        num_rows: rows that share their keys.
        width: elements of a value.
        itemsize: bytes of an element.
        is_hip: for an AMD GPU.
    """
    wide = width > 128
    tight = itemsize == 4 or (wide and is_hip)
    return {
        "BLOCK_M": 16 if tight or num_rows <= 16 else 32,
        "BLOCK_T": 16 if tight else 32,
        "num_warps": 8 if wide and itemsize < 4 else 4,
        "num_stages": 1 if tight else 2,
    }


def block_of(width: int) -> int:
    """Round up to what a product of tiles takes: a power of two, at least 16."""
    power: int = triton.next_power_of_2(width)
    return max(16, power)


def dense_rows(cache: Tensor) -> Tensor:
    """Return the cache itself unless its last dimension is strided."""
    return cache if cache.stride(-1) == 1 else cache.contiguous()
