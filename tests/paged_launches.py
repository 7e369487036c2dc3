"""Checks of the GPU launcher of `paged_attention` on any device, as in `launches`."""

from __future__ import annotations

from typing import Any

import torch

from tests.maskless_cases import Paged, draw_paged
from tests.maskless_launches import check_equal, to_device
from torchvm.ops import paged_attention

SEEN: list[dict[str, Any]] = [
    {"causal": False},
    {"causal": True},
    {"causal": False, "cap": 0.5},
    {"causal": True, "window": 1},
    {"causal": True, "window": 40, "cap": 2.0},
    {"causal": True, "window": 1 << 62},
]

SIZES: list[tuple[list[int], dict[str, Any]]] = [
    ([0, 37, 1, 64, 33], {"n": 3}),
    # A tree's part: many requests of one query, in pages of one position.
    ([1, 2, 0, 3, 2, 5, 1] * 3, {"n": 1, "heads": 8, "kv_heads": 2, "page_size": 1}),
    # Rows that fill several programs, and fewer positions than queries.
    ([40, 2, 9], {"n": 9, "heads": 6, "kv_heads": 1, "head_dim": 72, "page_size": 16}),
    ([5, 40], {"n": 2, "heads": 3, "kv_heads": 3, "head_dim": 200, "page_size": 64}),
    ([17], {"n": 1, "heads": 1, "kv_heads": 1, "head_dim": 1, "page_size": 3}),
]


def run(case: Paged, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch on the device, into outputs of any content."""
    return paged_attention._cuda(*to_device(case, device))


def check_paged(device: torch.device, dtype: torch.dtype, seen: dict[str, Any]) -> None:
    """Ragged lengths, groups of heads, widths and pages, what must not be read NaN."""
    for lengths, sizes in SIZES:
        case = draw_paged(lengths, dtype=dtype, seed=len(lengths), **sizes, **seen)
        check_equal(run(case, device), paged_attention._cpu(*case), dtype)


def check_outputs_are_written(device: torch.device) -> None:
    """Every cell of both results, also of a request that sees nothing."""
    from torchvm.ops.kernels import triton_paged

    case = draw_paged([0, 9, 1], 7, head_dim=18)
    out = torch.full(case.query.shape, torch.nan, device=device)
    lse = torch.full(case.query.shape[:3], torch.nan, device=device)
    given: list[Any] = [*to_device(case, device), out, lse]
    triton_paged.paged_attention(*given)
    check_equal((out, lse), paged_attention._cpu(*case), torch.float32)
    assert torch.equal(out[0].cpu(), torch.zeros(7, 6, 18))
    assert bool((lse[0] == -torch.inf).all())


def check_out_of_range(device: torch.device) -> None:
    """Lengths and pages that are none: nothing of them is read, other requests stay."""
    for seen in SEEN:
        case = draw_paged([5, 9, 3], 2, **seen)
        want = paged_attention._cpu(*case)
        # Reading past a cache finds other numbers; what is not finite would show in a sum.
        case = case._replace(k_cache=case.k_cache.nan_to_num(), v_cache=case.v_cache.nan_to_num())
        odd = torch.tensor([2**31 - 1, -(2**31), len(case.k_cache), -1], dtype=torch.int32)
        for first, last in ((2**62, -(2**62)), (2**63 - 1, -(2**63)), (13, -1)):
            case.kv_lens[::2] = torch.tensor([first, last])
            case.page_table[0] = odd
            case.page_table[2] = 0
            out, lse = run(case, device)
            check_equal((out[1:2], lse[1:2]), [part[1:2] for part in want], torch.float32)
            # No page of the one request exists, and no length of the other.
            for b in (0, 2):
                assert torch.equal(out[b].cpu(), torch.zeros_like(case.query[b]))
                assert bool((lse[b] == -torch.inf).all())


def check_a_page_that_does_not_exist(device: torch.device) -> None:
    """The rest of its request is attended."""
    case = draw_paged([9, 11], 2, causal=False)
    without = case.page_table.clone()
    without[0, 1:] = without[0, 2:3]
    shorter = case._replace(page_table=without, kv_lens=torch.tensor([5, 11]))
    for page in (-1, len(case.k_cache), 2**31 - 1, -(2**31)):
        case.page_table[0, 1] = page
        want = paged_attention._cpu(*shorter)
        check_equal(run(case, device), want, torch.float32)
    nowhere = case._replace(page_table=case.page_table[:, :0])
    assert torch.equal(run(nowhere, device)[0].cpu(), torch.zeros_like(case.query))


def check_strided(device: torch.device) -> None:
    """Caches that are slices of one buffer, whose heads come first, or whose rows are strided."""
    case = draw_paged([5, 9], 3)
    want = paged_attention._cpu(*case)
    both = torch.stack([case.k_cache, case.v_cache], 2).to(device)
    moved = to_device(case, device)
    moved[0] = moved[0].transpose(1, 2).contiguous().transpose(1, 2)
    moved[1:3] = both.unbind(2)
    moved[3] = torch.stack([moved[3], moved[3]], -1)[..., 0]
    moved[4] = torch.stack([moved[4], moved[4]], -1)[..., 0]
    check_equal(paged_attention._cuda(*moved), want, torch.float32)
    moved[1] = moved[1].transpose(1, 2).contiguous().transpose(1, 2)
    moved[2] = moved[2].mT.contiguous().mT
    check_equal(paged_attention._cuda(*moved), want, torch.float32)


def check_empty(device: torch.device) -> None:
    """No requests, no heads or no elements of a head."""
    for case, shape in (
        (draw_paged([], 3), (0, 3, 6, 20)),
        (draw_paged([4], 3, heads=0), (1, 3, 0, 20)),
        (draw_paged([4, 0], 3, head_dim=0), (2, 3, 6, 0)),
    ):
        out, lse = run(case, device)
        assert out.shape == shape
        check_equal([out, lse], paged_attention._cpu(*case), torch.float32)
