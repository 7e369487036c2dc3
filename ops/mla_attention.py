"""torchvm::mla_attention: absorbed multi-head latent attention of chains, which reads no mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchvm.ops.checks import check_tensor, int64
from torchvm.ops.library import register_op
from torchvm.ops.paged import ATTENTION_DTYPES, check_pages, must_be

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["mla_attention"]

_SCHEMA = (
    "mla_attention(Tensor query_latent, Tensor query_rope, Tensor latent_cache, "
    "Tensor rope_cache, Tensor page_table, Tensor seq_lens, float scale) -> Tensor"
)


def _check(
    query_latent: Tensor,
    query_rope: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
) -> None:
    """Check dtypes, shapes and devices; lengths and page ids are data."""
    device, dtype = query_latent.device, query_latent.dtype
    names = ("query_latent", "query_rope", "latent_cache", "rope_cache", "page_table")
    tensors = (query_latent, query_rope, latent_cache, rope_cache, page_table)
    for name, tensor, dims in zip(names, tensors, (4, 4, 3, 3, 2), strict=True):
        must_be(tensor.dim() == dims, name, f"{dims}-D", list(tensor.shape))
    must_be(dtype in ATTENTION_DTYPES, "query_latent", "float32, float16 or bfloat16", dtype)
    batch, n, num_heads, rank = query_latent.shape
    must_be(n >= 1, "query_latent", "of at least one draft token", list(query_latent.shape))
    num_pages, page_size = latent_cache.shape[:2]
    must_be(page_size >= 1, "latent_cache", "of page_size >= 1", list(latent_cache.shape))
    width, columns = query_rope.shape[3], page_table.shape[1]
    check_tensor("query_rope", query_rope, device, batch, n, num_heads, width, dtype=dtype)
    check_tensor("latent_cache", latent_cache, device, num_pages, page_size, rank, dtype=dtype)
    check_tensor("rope_cache", rope_cache, device, num_pages, page_size, width, dtype=dtype)
    check_tensor("page_table", page_table, device, batch, columns, dtype=torch.int32)
    check_tensor("seq_lens", seq_lens, device, batch)


def _fake(
    query_latent: Tensor,
    query_rope: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    scale: float,  # noqa: ARG001
) -> Tensor:
    """Contiguous, of query_latent's shape and dtype."""
    _check(query_latent, query_rope, latent_cache, rope_cache, page_table, seq_lens)
    return query_latent.new_empty(query_latent.shape)


def _cpu(
    query_latent: Tensor,
    query_rope: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> Tensor:
    from torchvm.ops.kernels import cpu_mla

    _check(query_latent, query_rope, latent_cache, rope_cache, page_table, seq_lens)
    lengths, n = seq_lens.tolist(), query_latent.shape[1]
    pages = check_pages(page_table, lengths, n, latent_cache.shape[0], latent_cache.shape[1])
    return cpu_mla.mla_attention(
        query_latent, query_rope, latent_cache, rope_cache, pages, lengths, scale
    )


def _cuda(
    query_latent: Tensor,
    query_rope: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> Tensor:
    from torchvm.ops.kernels import triton_mla

    _check(query_latent, query_rope, latent_cache, rope_cache, page_table, seq_lens)
    for name, query, most in (
        ("query_latent", query_latent, triton_mla.MOST_LATENT),
        ("query_rope", query_rope, triton_mla.MOST_ROPE),
    ):
        must_be(query.shape[3] <= most, name, f"at most {most} wide on a GPU", query.shape[3])
    return triton_mla.mla_attention(
        query_latent, query_rope, latent_cache, rope_cache, page_table, seq_lens, scale
    )


_OP = register_op(_SCHEMA, fake=_fake, kernels={"CPU": _cpu, "CUDA": _cuda})


def mla_attention(
    query_latent: Tensor,
    query_rope: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Attend chains of draft tokens to a latent cache that all heads share.

    This is multi-head latent attention (DeepSeek-V2, Liu et al. 2024, arXiv:2405.04434) with the
    up-projections of keys and values absorbed into query and output: with position t's latent
    c_t and rotary key r_t, head h of node i scores it
    `scale * (query_latent[i, h] . c_t + query_rope[i, h] . r_t)` and takes the softmax-weighted
    sum of the c_t. Node i of request b sees positions t <= L_b + i, so only chains can be
    verified; there is no mask to read. Entries of the n draft tokens already stand at positions
    L_b .. L_b + n - 1 of the caches.

    Args:
        query_latent: (B, n, num_heads, R) float32, float16 or bfloat16; on a GPU R <= 512.
        query_rope: (B, n, num_heads, P), the same dtype; on a GPU P <= 128.
        latent_cache: (num_pages, page_size, R), the same dtype.
        rope_cache: (num_pages, page_size, P), the same dtype. On a GPU both caches may be slices
            of one buffer; one whose last dimension is strided is copied.
        page_table: (B, max_pages) int32; entry p of row b is the page that holds positions
            p * page_size and on. Entries past position L_b + n - 1 are not looked at.
        seq_lens: (B,) int64 (int32 is converted), L of each request, draft tokens not counted.
        scale: factor on query times key.

    Returns:
        (B, n, num_heads, R) like `query_latent`, contiguous. Sums run in float32 and are rounded
        once; on a GPU the weights are rounded to the caches' dtype before they meet the latents.

    Raises:
        ValueError: for a shape, dtype or device that does not fit, and on the CPU for a negative
            length, too few pages or a page id out of range. A GPU attends to no such position.
    """
    out: Tensor = _OP(
        query_latent, query_rope, latent_cache, rope_cache, page_table, int64(seq_lens), scale
    )
    return out
