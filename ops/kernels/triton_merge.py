"""GPU kernel that merges what several programs found of one row's softmax attention."""

# Compile-time arguments are in capitals, as everywhere in Triton, whose decorator has no types.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from torchvm.ops.kernels.triton_launch import OPTIONS
from torchvm.ops.kernels.triton_tiles import HIDDEN

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MERGE_WARPS", "merge", "merge_kernel"]

# Shares of a row that are looked at together.
SHARES = tl.constexpr(16)
MERGE_WARPS = 2


@triton.jit(do_not_specialize=["num_rows", "num_shares"])
def merge_kernel(
    sums: tl.tensor,
    peaks: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    num_rows: tl.int64,
    num_shares: tl.int32,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Merge the shares of one row, the program's, and round once.

    Args:
        sums: float32 (num_shares, num_rows, HEAD_DIM); not read where a weight is 0.
        peaks: float32 (num_shares, num_rows), base 2, -inf for a share that saw nothing.
        weights: float32 (num_shares, num_rows).
        out: (num_rows, HEAD_DIM), written; zeros for a row that saw nothing.
        num_rows: nodes of all requests times query heads.
        num_shares: shares of each row.
        HEAD_DIM: elements of a row.
        BLOCK_D: power of two, at least HEAD_DIM.
    """
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    highest = tl.full([SHARES], HIDDEN, tl.float32)
    for start in range(0, num_shares, SHARES):
        share = start + tl.arange(0, SHARES)
        at = share.to(tl.int64) * num_rows + row
        peak = tl.load(peaks + at, mask=share < num_shares, other=HIDDEN)
        highest = tl.maximum(highest, peak)
    base = tl.max(highest, axis=0)
    base = tl.where(base == HIDDEN, 0.0, base)
    weight = tl.zeros([SHARES], tl.float32)
    total = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, num_shares, SHARES):
        share = start + tl.arange(0, SHARES)
        at = share.to(tl.int64) * num_rows + row
        peak = tl.load(peaks + at, mask=share < num_shares, other=HIDDEN)
        part = tl.load(weights + at, mask=share < num_shares, other=0.0)
        scale = tl.exp2(peak - base)
        held = (part != 0)[:, None] & (d < HEAD_DIM)[None, :]
        some = tl.load(sums + at[:, None] * HEAD_DIM + d[None, :], mask=held, other=0.0)
        weight += part * scale
        total += tl.sum(some * scale[:, None], axis=0)
    whole = tl.sum(weight, axis=0)
    total = total / tl.where(whole == 0, 1.0, whole)
    tl.store(out + row * HEAD_DIM + d, total.to(out.dtype.element_ty), mask=d < HEAD_DIM)


def merge(sums: Tensor, peaks: Tensor, weights: Tensor, out: Tensor) -> None:
    """Launch the merge, one program a row, on the current device.

    Args:
        sums: float32 (num_shares, num_rows, head_dim), values' sums under weights.
        peaks: float32 (num_shares, num_rows), the largest score of each, base 2.
        weights: float32 (num_shares, num_rows), the sum of 2 ** (score - peak).
        out: num_rows * head_dim elements, contiguous; written.
    """
    num_shares, num_rows, head_dim = sums.shape
    merge_kernel[(num_rows,)](
        sums, peaks, weights, out, num_rows, num_shares,
        HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), num_warps=MERGE_WARPS,
        **OPTIONS,
    )  # fmt: skip
