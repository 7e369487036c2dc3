"""Checks of the GPU launchers of ops that read no mask: on a GPU, or under the interpreter."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch

from tests.maskless_cases import draw_linear, draw_mla, draw_parents, draw_sparse
from torchvm.ops import linear_attention, mla_attention, sparse_attention

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor


def to_device(case: Iterable[Any], device: torch.device) -> list[Any]:
    """Move a case's tensors."""
    return [part.to(device) if isinstance(part, torch.Tensor) else part for part in case]


def check_equal(found: Sequence[Tensor], want: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Compare with the CPU: weights and results are rounded to the dtype, sums are float32's."""
    most = 4 * torch.finfo(dtype).eps if dtype != torch.float32 else 2e-5
    for mine, other in zip(found, want, strict=True):
        assert mine.dtype == other.dtype
        assert mine.is_contiguous()
        torch.testing.assert_close(mine.cpu(), other, rtol=most, atol=most)


def check_mla(device: torch.device, dtype: torch.dtype) -> None:
    """Ragged lengths, page sizes, rows that do and do not fill tiles, widths that are no power."""
    for lengths, n, heads, rank, rope, page_size in (
        ([0, 37, 1], 3, 3, 20, 6, 4),
        ([5, 64, 0, 33], 1, 1, 16, 16, 16),
        ([40, 2], 5, 8, 72, 24, 1),
        ([3], 9, 2, 200, 8, 64),
        ([18], 2, 20, 300, 0, 8),
    ):
        case = draw_mla(
            lengths, n, heads=heads, rank=rank, rope=rope, page_size=page_size, dtype=dtype,
            seed=n,
        )  # fmt: skip
        found = mla_attention._cuda(*to_device(case, device))
        check_equal([found], [mla_attention._cpu(*case)], dtype)


def check_sparse(device: torch.device, dtype: torch.dtype) -> None:
    """Windows shorter and longer than the context, tiles of blocks, groups of query heads."""
    for lengths, n, window, heads, kv_heads, head_dim, blocks, selected, page_size in (
        ([0, 37, 1], 3, 5, 6, 2, 20, 9, 4, 4),
        ([70, 3], 2, 40, 3, 3, 16, 50, 40, 16),
        ([9, 64], 1, 1, 20, 1, 72, 3, 1, 1),
        ([33], 4, 1000, 40, 1, 200, 5, 0, 64),
    ):
        case = draw_sparse(
            lengths, n, window=window, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            num_blocks=blocks, num_selected=selected, page_size=page_size, dtype=dtype, seed=n,
        )  # fmt: skip
        found = sparse_attention._cuda(*to_device(case, device))
        check_equal([found], [sparse_attention._cpu(*case)], dtype)


def check_linear(device: torch.device, dtype: torch.dtype) -> None:
    """Chains, trees and nodes that hang on nobody, of one tile of values and of more."""
    for batch, n, heads, key_width, value_width in (
        (2, 1, 2, 5, 7), (2, 9, 1, 16, 40), (1, 17, 1, 20, 32), (3, 5, 2, 1, 1),
    ):  # fmt: skip
        parents = draw_parents(batch, n, seed=n)
        case = draw_linear(
            parents, heads=heads, key_width=key_width, value_width=value_width, dtype=dtype,
            seed=n,
        )  # fmt: skip
        found = linear_attention._cuda(*to_device(case, device))
        check_equal(found, linear_attention._cpu(*case), dtype)


def check_wild_links(device: torch.device, launches: int) -> None:
    """Links to anywhere: parents are the CPU's, and everything ends."""
    rng = random.Random(9)  # noqa: S311
    for i in range(launches):
        batch, n = rng.randint(1, 3), rng.randint(1, 20)
        case = draw_linear([[-1] * n] * batch, heads=1, value_width=3, seed=i)
        odd = (-1, n, 2**62, -(2**63), *range(n))
        for links in (case.retrieve_next_token, case.retrieve_next_sibling):
            links.copy_(torch.tensor([[rng.choice(odd) for _ in range(n)] for _ in range(batch)]))
        found = linear_attention._cuda(*to_device(case, device))
        check_equal(found, linear_attention._cpu(*case), torch.float32)


def check_lengths_out_of_range(device: torch.device) -> None:
    """Lengths, positions, pages and blocks that are none: other requests stay as they are."""
    wild = (2**62, -(2**62), 2**63 - 1)
    latent, sparse = draw_mla([5, 9, 3], 2), draw_sparse([5, 9, 3], 2)
    want = mla_attention._cpu(*latent)[1], sparse_attention._cpu(*sparse)[1]
    # Reading past a cache finds other numbers; what is not finite would show in a sum.
    sparse = sparse._replace(
        k_cache=sparse.k_cache.nan_to_num(), v_cache=sparse.v_cache.nan_to_num()
    )
    latent = latent._replace(
        latent_cache=latent.latent_cache.nan_to_num(), rope_cache=latent.rope_cache.nan_to_num()
    )
    for first, last in zip(wild, reversed(wild), strict=True):
        latent.seq_lens[::2] = torch.tensor([first, last])
        sparse.positions[::2] = torch.tensor([[first, 4], [5, last]])
        for case in (latent, sparse):
            case.page_table[::2] = torch.tensor([2**31 - 1, -(2**31), 0] * 2)[
                : case.page_table.shape[1]
            ]
        sparse.selected[::2] = torch.tensor([2**31 - 1, -2, 9, -(2**31)])
        found = (
            mla_attention._cuda(*to_device(latent, device)).cpu(),
            sparse_attention._cuda(*to_device(sparse, device)).cpu(),
        )
        for mine, other in zip(found, want, strict=True):
            torch.testing.assert_close(mine[1], other, rtol=2e-5, atol=2e-5)
            assert mine.isfinite().all()


def check_a_node_that_sees_nothing(device: torch.device) -> None:
    """Zeros, also where a page of the window does not exist."""
    case = draw_sparse([5], 2, num_selected=2)
    case.selected.fill_(-1)
    case.page_table.fill_(-1)
    out = sparse_attention._cuda(*to_device(case, device))
    assert torch.equal(out.cpu(), torch.zeros_like(case.query))


def check_strided(device: torch.device) -> None:
    """Caches that are slices of one buffer, and one whose last dimension is strided."""
    latent, sparse = draw_mla([5, 9], 3), draw_sparse([5, 9], 3)
    both = torch.cat([latent.latent_cache, latent.rope_cache], -1).to(device)
    moved = to_device(latent, device)
    moved[2:4] = both[..., :20], both[..., 20:]
    check_equal([mla_attention._cuda(*moved)], [mla_attention._cpu(*latent)], torch.float32)
    moved = to_device(sparse, device)
    moved[1] = moved[1].transpose(1, 2).contiguous().transpose(1, 2)
    moved[2] = moved[2].mT.contiguous().mT
    moved[5] = moved[5].transpose(0, 1).contiguous().transpose(0, 1)
    check_equal([sparse_attention._cuda(*moved)], [sparse_attention._cpu(*sparse)], torch.float32)


def check_empty(device: torch.device) -> None:
    """A batch of no requests launches nothing."""
    out = mla_attention._cuda(*to_device(draw_mla([], 3), device))
    assert out.shape == (0, 3, 3, 20)
    out = sparse_attention._cuda(*to_device(draw_sparse([], 3), device))
    assert out.shape == (0, 3, 6, 20)
    output, states = linear_attention._cuda(*to_device(draw_linear([]), device))
    assert (output.shape, states.shape) == ((0, 3, 2, 7), (0, 3, 2, 5, 7))
