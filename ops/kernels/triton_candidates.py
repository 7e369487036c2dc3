"""GPU kernel that picks the best draft candidates, ties by id, without a sort."""

# Compile-time arguments are in capitals, as everywhere in Triton, whose decorator has no types.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from torchvm.ops.kernels.triton_launch import OPTIONS, device_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["candidates_block", "candidates_kernel", "select_draft_candidates"]

# Scores looked at at once; more are read again for each bit of the threshold.
MAX_BLOCK = 2048


@triton.jit
def sign_bit(scores: tl.tensor) -> tl.tensor:
    """The sign bit of the scores' type: uint64 for float64, uint32 for the others."""
    if scores.dtype.element_ty == tl.float64:
        bit = tl.cast(0x8000000000000000, tl.uint64)
    elif scores.dtype.element_ty == tl.float32:
        bit = tl.cast(0x80000000, tl.uint32)
    else:
        bit = tl.cast(0x8000, tl.uint32)
    return bit


@triton.jit
def score_keys(scores: tl.tensor, at: tl.tensor, live: tl.tensor) -> tl.tensor:
    """Unsigned integers in the order of the scores: NaN is 0, and both zeros the sign bit.

    Made of the scores' bits: a comparison of floats might take a denormal for zero.
    """
    score = tl.load(scores + at, mask=live, other=0.0)
    if scores.dtype.element_ty == tl.float64:
        bits = score.to(tl.uint64, bitcast=True)
        infinity = 0x7FF0000000000000
    elif scores.dtype.element_ty == tl.float32:
        bits = score.to(tl.uint32, bitcast=True)
        infinity = 0x7F800000
    else:
        bits = score.to(tl.uint16, bitcast=True).to(tl.uint32)
        infinity = 0x7C00 if scores.dtype.element_ty == tl.float16 else 0x7F80
    sign = sign_bit(scores)
    magnitude = bits & (sign - 1)
    key = tl.where(bits < sign, sign + magnitude, sign - magnitude)
    return tl.where(magnitude > infinity, 0, key)


@triton.jit
def count_above(
    scores: tl.tensor, num_candidates: tl.tensor, bound: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """How many keys are `bound` or more, int32."""
    count = tl.cast(0, tl.int32)
    for start in range(0, num_candidates, BLOCK):
        at = start + tl.arange(0, BLOCK)
        live = at < num_candidates
        above = live & (score_keys(scores, at, live) >= bound)
        count += tl.sum(above.to(tl.int32), axis=0)
    return count


@triton.jit(do_not_specialize=["scores", "tokens", "num_candidates", "num_selected"])
def candidates_kernel(
    scores: tl.tensor,
    tokens: tl.tensor,
    selected_index: tl.tensor,
    draft_tokens: tl.tensor,
    num_candidates: tl.int32,
    num_selected: tl.int32,
    BLOCK: tl.constexpr,
) -> None:
    """Select the best candidates of one request, the program's: score descending, id ascending.

    The key of the last one selected is found bit by bit, by counting the keys at or above it;
    what is above it is taken, and as many of those equal to it, in ascending order, as are left.

    Args:
        scores: (B, M) float pointer.
        tokens: (B, M) integer pointer.
        selected_index: int64 (B, num_selected), written in ascending order.
        draft_tokens: (B, num_selected), the tokens of those, written.
        num_candidates: M.
        num_selected: at most M.
        BLOCK: power of two, candidates looked at at once.
    """
    request = tl.program_id(0).to(tl.int64)
    scores += request * num_candidates
    tokens += request * num_candidates
    first = request * num_selected
    bit = sign_bit(scores)
    threshold = bit ^ bit
    while bit != 0:
        probe = threshold | bit
        if count_above(scores, num_candidates, probe, BLOCK) >= num_selected:
            threshold = probe
        bit = bit >> 1
    above = count_above(scores, num_candidates, threshold + 1, BLOCK)
    ties_left = num_selected - above
    taken = tl.cast(0, tl.int32)
    tied = tl.cast(0, tl.int32)
    for start in range(0, num_candidates, BLOCK):
        at = start + tl.arange(0, BLOCK)
        live = at < num_candidates
        key = score_keys(scores, at, live)
        equal = live & (key == threshold)
        order = tied + tl.cumsum(equal.to(tl.int32), axis=0)
        take = live & ((key > threshold) | (equal & (order <= ties_left)))
        slot = first + taken + tl.cumsum(take.to(tl.int32), axis=0) - 1
        tl.store(selected_index + slot, at.to(tl.int64), mask=take)
        tl.store(draft_tokens + slot, tl.load(tokens + at, mask=take, other=0), mask=take)
        tied += tl.sum(equal.to(tl.int32), axis=0)
        taken += tl.sum(take.to(tl.int32), axis=0)


def candidates_block(num_candidates: int) -> tuple[int, int]:
    """Candidates that a program looks at at once, and its warps."""
    block = min(triton.next_power_of_2(num_candidates), MAX_BLOCK)
    return block, 4 if block <= 1024 else 8


def select_draft_candidates(
    scores: Tensor, tokens: Tensor, num_draft_tokens: int
) -> tuple[Tensor, Tensor]:
    """Launch the selection kernel, one program a request; arguments are checked by the caller.

    Args:
        scores: (B, M) floating point, of all candidates by flat id.
        tokens: (B, M) integer.
        num_draft_tokens: n, root included; at most M + 1.

    Returns:
        selected_index int64 (B, n - 1), ascending; draft_tokens (B, n - 1), dtype of `tokens`.
    """
    batch, num_candidates = scores.shape
    num_selected = num_draft_tokens - 1
    selected_index = scores.new_empty(batch, num_selected, dtype=torch.int64)
    draft_tokens = tokens.new_empty(batch, num_selected)
    if batch == 0 or num_selected == 0:
        return selected_index, draft_tokens
    block, num_warps = candidates_block(num_candidates)
    with device_of(scores):
        candidates_kernel[(batch,)](
            scores.contiguous(), tokens.contiguous(), selected_index, draft_tokens,
            num_candidates, num_selected, BLOCK=block, num_warps=num_warps, **OPTIONS,
        )  # fmt: skip
    return selected_index, draft_tokens
