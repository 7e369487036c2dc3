"""GPU kernel of absorbed multi-head latent attention on chains of draft tokens."""

# Compile-time arguments are in capitals, as everywhere in Triton, whose decorator has no types.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from torchvm.ops.kernels.triton_launch import OPTIONS, device_of
from torchvm.ops.kernels.triton_softmax import (
    LOG2_E,
    NOTHING,
    accumulate,
    block_of,
    dense_rows,
    mean_of,
    pages_of,
    tile_of,
    tile_shape,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MOST_LATENT", "MOST_ROPE", "mla_attention", "mla_kernel", "mla_tile"]

MOST_LATENT = 512
MOST_ROPE = 128


@triton.jit(
    do_not_specialize=[
        "scale", "num_draft_tokens", "num_heads", "num_pages", "page_size", "max_pages",
    ]
)  # fmt: skip
def mla_kernel(
    query_latent: tl.tensor,
    query_rope: tl.tensor,
    latent_cache: tl.tensor,
    rope_cache: tl.tensor,
    page_table: tl.tensor,
    seq_lens: tl.tensor,
    out: tl.tensor,
    scale: tl.float32,
    num_draft_tokens: tl.int32,
    num_heads: tl.int32,
    num_pages: tl.int32,
    page_size: tl.int32,
    max_pages: tl.int32,
    latent_width: tl.int32,
    rope_width: tl.int32,
    latent_page_stride: tl.int64,
    latent_slot_stride: tl.int64,
    rope_page_stride: tl.int64,
    rope_slot_stride: tl.int64,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> None:
    """Attend BLOCK_M rows of one request, a row being a head of a node, to its latents.

    A tile of latents is loaded once: it is part of the keys, and it is the values.

    Args:
        query_latent: (B, n, H, R), contiguous as `query_rope` and `out`.
        query_rope: (B, n, H, P).
        latent_cache: (num_pages, page_size, R), the last dimension dense.
        rope_cache: (num_pages, page_size, P), the last dimension dense.
        page_table: int32 (B, max_pages).
        seq_lens: int64 (B,).
        out: (B, n, H, R), written.
        scale: factor on query times key.
        num_draft_tokens: n.
        num_heads: H.
        num_pages: pages of the caches.
        page_size: positions of a page.
        max_pages: columns of the page table.
        latent_width: R.
        rope_width: P.
        latent_page_stride: elements from page to page.
        latent_slot_stride: elements from position to position.
        rope_page_stride: elements from page to page.
        rope_slot_stride: elements from position to position.
        BLOCK_M: rows of a program.
        BLOCK_T: positions of a tile.
        BLOCK_R: power of two, at least R.
        BLOCK_P: power of two, at least P.
    """
    num_rows = num_draft_tokens * num_heads
    num_tiles = tl.cdiv(num_rows, BLOCK_M)
    request = (tl.program_id(0) // num_tiles).to(tl.int64)
    first_row = tl.program_id(0) % num_tiles * BLOCK_M
    row = first_row + tl.arange(0, BLOCK_M)
    live_row = row < num_rows
    place = request * num_rows + row
    latent = tile_of(query_latent, place * latent_width, live_row, latent_width, BLOCK_R)
    rope = tile_of(query_rope, place * rope_width, live_row, rope_width, BLOCK_P)
    own = tl.load(seq_lens + request) + row // num_heads
    last_node = (tl.minimum(first_row + BLOCK_M, num_rows) - 1) // num_heads
    held = max_pages.to(tl.int64) * page_size
    end = tl.minimum(tl.load(seq_lens + request) + last_node + 1, held)
    total = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    largest = tl.full([BLOCK_M], NOTHING, tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, end, BLOCK_T):
        position = start + tl.arange(0, BLOCK_T).to(tl.int64)
        page, slot, live = pages_of(
            page_table + request * max_pages, position, position < end, num_pages, page_size
        )
        offset = page * latent_page_stride + slot * latent_slot_stride
        latents = tile_of(latent_cache, offset, live, latent_width, BLOCK_R)
        offset = page * rope_page_stride + slot * rope_slot_stride
        keys = tile_of(rope_cache, offset, live, rope_width, BLOCK_P)
        scores = tl.dot(latent, tl.trans(latents), input_precision="ieee")
        scores = tl.dot(rope, tl.trans(keys), scores, input_precision="ieee")
        visible = live[None, :] & (position[None, :] <= own[:, None])
        scores = tl.where(visible, scores * (scale * LOG2_E), NOTHING)
        total, largest, weight = accumulate(scores, latents, total, largest, weight)
    column = tl.arange(0, BLOCK_R)[None, :]
    tl.store(
        out + place[:, None] * latent_width + column,
        mean_of(total, weight).to(out.dtype.element_ty),
        mask=live_row[:, None] & (column < latent_width),
    )


def mla_tile(
    num_rows: int, latent_width: int, rope_width: int, itemsize: int, *, is_hip: bool
) -> dict[str, int]:
    """Compile-time sizes of a launch, its warps and stages.

    Args:
        num_rows: n * H, rows of a request.
        latent_width: R.
        rope_width: P.
        itemsize: bytes of an element of the caches.
        is_hip: for an AMD GPU.
    """
    shape = tile_shape(num_rows, latent_width, itemsize, is_hip=is_hip)
    return {"BLOCK_R": block_of(latent_width), "BLOCK_P": block_of(rope_width)} | shape


def mla_attention(
    query_latent: Tensor,
    query_rope: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> Tensor:
    """Launch the kernel, a program for every BLOCK_M rows; arguments are checked by the op.

    Args:
        query_latent: (B, n, H, R).
        query_rope: (B, n, H, P).
        latent_cache: (num_pages, page_size, R).
        rope_cache: (num_pages, page_size, P).
        page_table: (B, max_pages) int32.
        seq_lens: (B,) int64.
        scale: factor on query times key.

    Returns:
        Like `query_latent`, contiguous.
    """
    batch, n, num_heads, latent_width = query_latent.shape
    rope_width = query_rope.shape[3]
    out = query_latent.new_empty(query_latent.shape)
    if out.numel() == 0:
        return out
    latent_cache, rope_cache = dense_rows(latent_cache), dense_rows(rope_cache)
    tile = mla_tile(
        n * num_heads, latent_width, rope_width, query_latent.element_size(),
        is_hip=torch.version.hip is not None,
    )  # fmt: skip
    num_programs = batch * triton.cdiv(n * num_heads, tile["BLOCK_M"])
    with device_of(query_latent):
        mla_kernel[(num_programs,)](
            query_latent.contiguous(), query_rope.contiguous(), latent_cache, rope_cache,
            page_table.contiguous(), seq_lens.contiguous(), out, scale, n, num_heads,
            *latent_cache.shape[:2], page_table.shape[1], latent_width, rope_width,
            *latent_cache.stride()[:2], *rope_cache.stride()[:2],
            **tile, **OPTIONS,
        )  # fmt: skip
    return out
