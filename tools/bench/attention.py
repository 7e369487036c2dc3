"""tree_attention on one CPU thread, beside torch's attention with the mask spelled out."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchvm.ops.attention import tree_attention
from torchvm.ops.layout import TreeMaskMode, mask_storage
from torchvm.ops.tree import build_tree_from_parents
from torchvm.tools.bench.mask import walked
from torchvm.tools.bench.measure import Case, Contender

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

__all__ = ["TITLE", "Sizes", "attention_case", "cases", "close"]

TITLE = "attention: one layer that verifies drafts; sizes are requests x n x context"
NOTES = (
    "SDPA: scaled_dot_product_attention with a bool mask (requests, 1, n, context + n)",
    "SDPA, mask given: the mask was there; SDPA: it is spread out of the tree in every call",
    f"float32; results agree to {(TOLERANCE := 1e-5):g}, SDPA in float64 being the reference",
)


class Sizes(NamedTuple):
    """What is timed."""

    batches: tuple[tuple[int, int, int], ...] = ((1, 8, 512), (8, 8, 1024), (8, 64, 1024))
    """(requests, n, context)."""
    num_q_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64


SIZES = Sizes()
QUICK = Sizes(((1, 4, 24), (2, 9, 24)), 2, 1, 16)


def close(actual: Tensor, expected: Tensor) -> bool:
    """Whether results agree up to rounding."""
    return torch.allclose(actual.double(), expected, rtol=TOLERANCE, atol=TOLERANCE)


def cases(sizes: Sizes = SIZES) -> Iterator[Case]:
    """Every size."""
    for batch in sizes.batches:
        yield attention_case(sizes, *batch)


def attention_case(sizes: Sizes, batch: int, n: int, context: int) -> Case:
    """Random queries, keys and values, of which the drafts' lie behind the context."""
    generator = torch.Generator().manual_seed(0)

    def draw(length: int, heads: int) -> Tensor:
        return torch.randn(batch, length, heads, sizes.head_dim, generator=generator)

    query = draw(n, sizes.num_q_heads)
    keys, values = (draw(context + n, sizes.num_kv_heads) for _ in range(2))
    pages = torch.arange(batch, dtype=torch.int32).view(batch, 1)
    seq_lens = torch.full((batch,), context, dtype=torch.int64)
    parents = torch.tensor([[(i - 1) // 2 for i in range(n)]] * batch)
    scale = sizes.head_dim**-0.5
    masks = {}
    for mode in TreeMaskMode:
        numel, dtype = mask_storage(mode, batch, n, context)
        masks[mode] = torch.zeros(int(numel), dtype=dtype)
        build_tree_from_parents(
            parents, seq_lens, masks[mode], num_draft_tokens=n, tree_mask_mode=mode
        )

    def ours(mode: TreeMaskMode) -> Tensor:
        return tree_attention(
            query, keys, values, pages, seq_lens, masks[mode], tree_mask_mode=mode,
            is_causal_chain=False, scale=scale,
        )  # fmt: skip

    def spread() -> Tensor:
        block = masks[TreeMaskMode.QLEN_ONLY].view(batch, 1, n, n)
        return torch.cat([block.new_ones(batch, 1, n, context), block], dim=3)

    def sdpa(mask: Tensor, q: Tensor = query, k: Tensor = keys, v: Tensor = values) -> Tensor:
        attended = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
            attn_mask=mask, scale=scale, enable_gqa=True,
        )  # fmt: skip
        return attended.transpose(1, 2)

    given = walked(parents.tolist(), context)[-1].unsqueeze(1)
    runs: dict[str, Callable[[], Any]] = {
        "tree_attention, packed": partial(ours, TreeMaskMode.QLEN_ONLY_BITPACKING),
        "tree_attention, FULL_MASK": partial(ours, TreeMaskMode.FULL_MASK),
        "SDPA": lambda: sdpa(spread()),
        "SDPA, mask given": partial(sdpa, given),
    }
    return Case(
        "attention", f"{batch} x {n} x {context:,}",
        tuple(Contender(name, run, run) for name, run in runs.items()),
        lambda: sdpa(given, query.double(), keys.double(), values.double()),
        "SDPA in float64", close,
    )  # fmt: skip
