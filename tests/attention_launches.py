"""Checks of the attention launcher on any device: a GPU, or the CPU under Triton's interpreter."""

from __future__ import annotations

import itertools
import math
import random
from typing import TYPE_CHECKING, Any

import torch

import torchvm.ops.attention  # noqa: F401 - registers torch.ops.torchvm.tree_attention
from tests.attention_reference import FULL, PACKED, QLEN, Case, dense, make_case, write_mask
from torchvm.ops.kernels import triton_attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_launcher: Any = triton_attention.tree_attention
CHAIN = -1
"""Beside the modes: no mask."""
KINDS = (
    (FULL, torch.bool), (FULL, torch.uint8), (QLEN, torch.bool), (QLEN, torch.uint8),
    (PACKED, torch.uint8), (CHAIN, torch.bool),
)  # fmt: skip
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WINDOWS_AND_CAPS = ((0, 0.0), (5, 0.0), (1, 2.0), (300, 0.0), (40, 30.0), (0, 2.0))
SIZES = (1, 4, 7, 33, 64)
HEADS = ((6, 2, 16), (4, 4, 24), (8, 1, 64), (3, 3, 8))
"""Query heads, kv heads, head_dim."""


def launch(
    case: Case,
    mask: Tensor | None,
    mode: int,
    device: torch.device,
    *,
    window: int = 0,
    cap: float = 0.0,
    shares: int | None = None,
) -> Tensor:
    """Run the launcher there on what a case holds, and bring the result back."""
    tensors: Any = [tensor.to(device) for tensor in case[:5]]
    scale = case.query.shape[3] ** -0.5
    out: Tensor = _launcher(
        *tensors, tree_mask=None if mask is None else mask.to(device), mode=max(mode, 0),
        scale=scale, sliding_window=window, logit_cap=cap, shares=shares,
    )  # fmt: skip
    assert out.is_contiguous()
    assert out.dtype is case.query.dtype
    return out.cpu()


def poison_before(case: Case, window: int) -> None:
    """Make NaN of the keys and values that lie before every node's window."""
    size = case.k_cache.shape[1]
    for b, length in enumerate(case.seq_lens.tolist()):
        for position in range(length - window + 1 if window else 0):
            page = case.page_table[b, position // size]
            case.k_cache[page, position % size] = case.v_cache[page, position % size] = math.nan


def check_case(
    case: Case,
    mode: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    window: int = 0,
    cap: float = 0.0,
    shares: int | None = None,
) -> None:
    """Require an error no larger than that of dense attention in the same dtype, or the CPU's."""
    n, kind = case.query.shape[1], case.query.dtype
    chain = torch.ones(n, n, dtype=torch.bool).tril().expand(len(case.query), n, n)
    trees = chain if mode == CHAIN else case.trees
    exact = dense(case, window=window, cap=cap, trees=trees)
    mask = None if mode == CHAIN else write_mask(case, mode, dtype)
    on_cpu = torch.ops.torchvm.tree_attention(
        *case[:5], mask, max(mode, 0), mode == CHAIN, case.query.shape[3] ** -0.5, window, cap
    )
    others = (dense(case, dtype=kind, window=window, cap=cap, trees=trees), on_cpu)
    # Triton's interpreter cuts bfloat16 off where a GPU rounds it.
    factor = 4 if device.type == "cpu" and kind is torch.bfloat16 else 2
    bound = factor * max(float((other.double() - exact).abs().max()) for other in others)
    poison_before(case, window)
    out = launch(case, mask, mode, device, window=window, cap=cap, shares=shares)
    error = float((out.double() - exact).abs().max())
    assert error <= bound, (error, bound)


def check_size(device: torch.device, n: int, shares: Sequence[int | None]) -> None:
    """One number of nodes; modes, dtypes, options, heads and page sizes take turns."""
    first = 7 * SIZES.index(n)
    for i, count in enumerate(shares, first):
        mode, dtype = KINDS[i % 6]
        kind, (window, cap) = DTYPES[i % 3], WINDOWS_AND_CAPS[i % 5]
        heads, kv_heads, head_dim = HEADS[i % 4]
        page_size = (None, 1, 3, 16, 5)[i % 5]
        # An interpreted launch takes as long as it has rows.
        lengths = [0, 70] if n > 7 and device.type == "cpu" else [0, 37, 1, 70]
        case = make_case(
            lengths, n, dtype=kind, page_size=page_size, seed=n,
            heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        )  # fmt: skip
        check_case(case, mode, dtype, device, window=window, cap=cap, shares=count)


def check_options(device: torch.device, n: int) -> None:
    """Every mode under every window and cap, its keys in one share and in two."""
    for i, ((mode, dtype), (window, cap)) in enumerate(itertools.product(KINDS, WINDOWS_AND_CAPS)):
        kind = DTYPES[(i + i // len(WINDOWS_AND_CAPS)) % len(DTYPES)]
        case = make_case([5, 0, 21], n, dtype=kind, page_size=4, seed=i, heads=2, kv_heads=1)
        for shares in (1, 2):
            check_case(case, mode, dtype, device, window=window, cap=cap, shares=shares)


def check_any_block(device: torch.device) -> None:
    """Cells above the diagonal, which no tree has, and rows that see nothing at all."""
    for n, mode, window, shares in ((9, PACKED, 9, 1), (70, QLEN, 0, 3), (70, FULL, 9, 1)):
        case = make_case([0, 3], n, seed=n, heads=1, kv_heads=1)
        cells = torch.rand(2, n, n, generator=torch.Generator().manual_seed(n)) < 0.3
        cells[:, 2] = False
        case = case._replace(trees=cells)
        want = dense(case, window=window)
        assert bool(want[0, 2].isnan().all())
        out = launch(case, write_mask(case, mode), mode, device, window=window, shares=shares)
        torch.testing.assert_close(out.double(), want.nan_to_num(), atol=1e-5, rtol=0)


def check_hidden_values(device: torch.device) -> None:
    """NaN at a position that every node hides does not show; one that is seen does."""
    for shares in (1, 2):
        case = make_case([6, 6], 5)
        case.trees[:, :, 2] = False
        want = dense(case)
        mask = write_mask(case, QLEN)
        for cache in (case.k_cache, case.v_cache):
            cache[case.page_table[0, 0], 6 + 2] = math.nan
        out = launch(case, mask, QLEN, device, shares=shares)
        torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=0)
        case.v_cache[case.page_table[0, 0], 3, 0, 5] = math.nan
        case.k_cache[case.page_table[1, 0], 3, 1] = math.nan
        out = launch(case, mask, QLEN, device, shares=shares)
        assert bool(out[0, :, :3, 5].isnan().all())
        assert bool(out[1, :, 3:].isnan().all())
        assert int(out.isnan().sum()) == 5 * 3 * (1 + case.query.shape[3])


def check_pages_out_of_range(device: torch.device) -> None:
    """The keys of a page that is not there are hidden."""
    case = make_case([8, 8, 8], 3, page_size=4, heads=2, kv_heads=1)
    without = case._replace(
        seq_lens=torch.tensor([8, 4, 8]),
        keys=[torch.cat([k[: 8 - 4 * (b == 1)], k[8:]]) for b, k in enumerate(case.keys)],
        values=[torch.cat([v[: 8 - 4 * (b == 1)], v[8:]]) for b, v in enumerate(case.values)],
    )
    for page in (-1, len(case.k_cache), 2**31 - 1, -(2**31)):
        table = case.page_table.clone()
        table[1, 1] = page
        out = launch(case._replace(page_table=table), write_mask(case, QLEN), QLEN, device)
        torch.testing.assert_close(out.double(), dense(without), atol=1e-5, rtol=0)


def check_lengths_out_of_range(device: torch.device) -> None:
    """A length that is none ends the launch like any other, and touches no other request."""
    case = make_case([8, 0, 8], 3, page_size=4, heads=2, kv_heads=1)
    for mode, window, shares in ((QLEN, 0, 1), (FULL, 3, 1), (QLEN, 3, 3), (FULL, 0, 3)):
        mask = write_mask(case, mode)
        usual = launch(case, mask, mode, device, window=window, shares=shares)
        for length in (2**62, 2**63 - 1, -5, -(2**63), 1000):
            odd = case._replace(seq_lens=torch.tensor([8, length, 8]))
            out = launch(odd, mask, mode, device, window=window, shares=shares)
            untouched = [0] if mode == FULL and length > 0 else [0, 2]
            if length < 0:
                untouched.append(1)
            assert torch.equal(out[untouched], usual[untouched])


def check_small_masks(device: torch.device) -> None:
    """A mask that ends inside its last request: what is past the end is not set."""
    n = 5
    for window, shares in ((0, 1), (4, 1), (0, 2)):
        case = make_case([4, 9], n)
        whole = write_mask(case, FULL, torch.uint8)
        live = sum(n * (length + n) for length in (4, 9))
        whole[live:] = 255
        whole[live - n :] = 255
        case.trees[1, -1] = False
        mask = whole.to(device)[: live - n]
        tensors: Any = [tensor.to(device) for tensor in case[:5]]
        scale = case.query.shape[3] ** -0.5
        out = _launcher(
            *tensors, tree_mask=mask, mode=FULL, scale=scale, sliding_window=window,
            logit_cap=0.0, shares=shares,
        ).cpu()  # fmt: skip
        want = dense(case, window=window)
        torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=0)


def check_strides(device: torch.device) -> None:
    """Views with any strides: the last dimension's too, and those of table and lengths."""
    case = make_case([3, 0, 11], 4, page_size=2)
    mask = write_mask(case, PACKED)
    expected = launch(case, mask, PACKED, device)
    views: Any = (
        [t.transpose(1, 2).contiguous().transpose(1, 2) for t in case[:3]],
        [t.transpose(1, 3).contiguous().transpose(1, 3) for t in case[:3]],
        [torch.cat([t, t], -1)[..., : t.shape[-1]] for t in case[:3]],
    )
    for turned in views:
        other = case._replace(
            query=turned[0], k_cache=turned[1], v_cache=turned[2],
            page_table=torch.stack([case.page_table, case.page_table], -1)[..., 0],
            seq_lens=torch.stack([case.seq_lens, case.seq_lens], -1)[..., 0],
        )  # fmt: skip
        out = launch(other, mask, PACKED, device)
        assert torch.equal(out, expected)


def check_many_requests(device: torch.device, size: int) -> None:
    """More requests than one scan of the lengths before a request takes."""
    rng = random.Random(3)  # noqa: S311
    lengths = [rng.choice((0, 1, 5)) for _ in range(size)]
    case = make_case(lengths, 2, page_size=8, heads=1, kv_heads=1)
    check_case(case, FULL, torch.bool, device)
