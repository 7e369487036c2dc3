"""Checks of ops that attend through a page table: what their fakes know, and what data says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

__all__ = [
    "ATTENTION_DTYPES",
    "check_attention",
    "check_caches",
    "check_options",
    "check_pages",
    "must_be",
]

ATTENTION_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def must_be(holds: bool | torch.SymBool, name: str, expected: str, got: object) -> None:
    """Raise ValueError unless `holds`, which may be symbolic."""
    if holds is not True:
        torch._check_value(holds, lambda: f"{name} must be {expected}, got {got}")


def check_caches(query: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Check dtypes and shapes of the query and the caches that it attends to."""
    must_be(query.dim() == 4, "query", "4-D (B, n, num_q_heads, head_dim)", list(query.shape))
    must_be(
        query.dtype in ATTENTION_DTYPES, "query", f"one of {_names(ATTENTION_DTYPES)}", query.dtype
    )
    _, n, num_q_heads, head_dim = query.shape
    must_be(n >= 1, "query", "of at least one draft token", list(query.shape))
    must_be(
        k_cache.dim() == 4, "k_cache", "4-D (num_pages, page_size, num_kv_heads, head_dim)",
        list(k_cache.shape),
    )  # fmt: skip
    must_be(
        v_cache.shape == k_cache.shape, "v_cache", f"of k_cache's shape {list(k_cache.shape)}",
        list(v_cache.shape),
    )  # fmt: skip
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        must_be(cache.dtype == query.dtype, name, f"of query's dtype {query.dtype}", cache.dtype)
    num_kv_heads, width = k_cache.shape[2:]
    must_be(width == head_dim, "k_cache", f"of query's head_dim {head_dim}", list(k_cache.shape))
    must_be(
        num_kv_heads >= 1 and num_q_heads % num_kv_heads == 0,
        "query", f"of a multiple of k_cache's {num_kv_heads} heads", list(query.shape),
    )  # fmt: skip
    must_be(k_cache.shape[1] >= 1, "k_cache", "of page_size >= 1", list(k_cache.shape))


def check_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    lengths_name: str = "seq_lens",
) -> None:
    """Check dtypes, shapes and devices, which the fake knows too."""
    check_caches(query, k_cache, v_cache)
    batch = query.shape[0]
    for name, tensor, dtype, dims in (
        ("page_table", page_table, torch.int32, 2),
        (lengths_name, seq_lens, torch.int64, 1),
    ):
        must_be(tensor.dtype == dtype, name, f"{dtype}", tensor.dtype)
        must_be(
            tensor.dim() == dims and tensor.shape[0] == batch,
            name, f"{dims}-D with query's {batch} rows", list(tensor.shape),
        )  # fmt: skip
    for name, tensor in (
        ("k_cache", k_cache), ("v_cache", v_cache), ("page_table", page_table),
        (lengths_name, seq_lens),
    ):  # fmt: skip
        must_be(tensor.device == query.device, name, f"on {query.device}", tensor.device)


def check_options(sliding_window: int, logit_cap: float) -> None:
    """Require a window and a cap, 0 for none."""
    must_be(sliding_window >= 0, "sliding_window", ">= 0 (0 is no limit)", sliding_window)
    must_be(logit_cap >= 0, "logit_cap", ">= 0 (0 is no cap)", logit_cap)


def check_pages(
    page_table: Tensor,
    lengths: list[int],
    n: int,
    num_pages: int,
    page_size: int,
    *,
    lengths_name: str = "seq_lens",
) -> list[list[int]]:
    """Return the page ids of each request; every position to be read must lie in one of them."""
    must_be(min(lengths, default=0) >= 0, lengths_name, ">= 0", lengths)
    counts = [(length + n + page_size - 1) // page_size for length in lengths]
    most, held = max(counts, default=0), page_table.shape[1]
    must_be(
        most <= held,
        "page_table", f"of at least {most} columns for {lengths} committed and {n} draft tokens "
        f"in pages of {page_size}", held,
    )  # fmt: skip
    pages = [row[:count] for row, count in zip(page_table[:, :most].tolist(), counts, strict=True)]
    for ids in filter(None, pages):
        must_be(
            min(ids) >= 0 and max(ids) < num_pages, "page_table",
            f"of page ids in [0, {num_pages})", f"ids from {min(ids)} to {max(ids)}",
        )  # fmt: skip
    return pages


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(str(d).removeprefix("torch.") for d in dtypes)
