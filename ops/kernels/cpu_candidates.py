"""Selection of the best draft candidates on the CPU, without a sort."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torchvm.ops.kernels.jit import int64_at, load, njit

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["select_draft_candidates"]


@njit
def _key(bits: Any, infinity: Any, largest: Any) -> Any:
    """An integer that orders as the score with these bits does: NaN lowest, both zeros 0."""
    magnitude = bits & largest
    if magnitude > infinity:
        return -largest - 1
    return magnitude if bits >= 0 else -magnitude


@njit
def _count(keys: Any, bound: Any) -> Any:
    """How many keys are `bound` or more."""
    least = keys.dtype.type(bound)
    count = np.int32(0)
    for i in range(keys.size):
        count = np.int32(count + (keys[i] >= least))
    return count


@njit
def _threshold(keys: Any, wanted: int, largest: Any) -> Any:
    """The largest key, or a bound between two keys, that `wanted` keys or more reach."""
    low, high = -largest - 1, largest
    while True:
        # The mean of the two, rounded down, of which the sum might overflow.
        middle = (low & high) + ((low ^ high) >> 1)
        if middle == low:
            return low
        count = _count(keys, middle)
        if count == wanted:
            return middle
        if count > wanted:
            low = middle
        else:
            high = middle


@njit
def _select(
    scores: int,
    tokens_address: int,
    batch: int,
    num_selected: int,
    infinity: Any,
    largest: Any,
    keys: Any,
    selected_address: int,
    drafts_address: int,
) -> None:
    """Write the ids and tokens of the best of each request.

    The key of the last one selected is found by bisection: each step counts the keys above a
    bound, which takes no branch and runs over several keys at a time.
    """
    num_candidates = keys.size
    chosen = np.empty(num_selected + 1, np.int64)
    for b in range(batch):
        row = scores + b * num_candidates * keys.itemsize
        for i in range(num_candidates):
            keys[i] = _key(load(row + i * keys.itemsize, largest), infinity, largest)
        threshold = _threshold(keys, num_selected, largest)
        ties_left = num_selected - _count(keys, threshold + 1)
        taken = 0
        for i in range(num_candidates):
            chosen[taken] = i
            is_tie = keys[i] == threshold and ties_left > 0
            ties_left -= is_tie
            taken += is_tie or keys[i] > threshold
        tokens = int64_at(tokens_address + 8 * b * num_candidates)
        selected = int64_at(selected_address + 8 * b * num_selected)
        drafts = int64_at(drafts_address + 8 * b * num_selected)
        for i in range(num_selected):
            selected[i] = chosen[i]
            drafts[i] = tokens[chosen[i]]


def select_draft_candidates(
    scores: Tensor, tokens: Tensor, num_draft_tokens: int
) -> tuple[Tensor, Tensor]:
    """Select by (score descending, id ascending), NaN last; arguments are checked by the op.

    Args:
        scores: (B, M) floating point, contiguous, of all candidates by id.
        tokens: (B, M) int64, contiguous.
        num_draft_tokens: n, root included; at most M + 1.

    Returns:
        selected_index int64 (B, n - 1), ascending; draft_tokens int64 (B, n - 1).
    """
    batch, num_candidates = scores.shape
    size = (batch, num_draft_tokens - 1)
    selected, drafts = torch.empty(size, dtype=torch.int64), torch.empty(size, dtype=torch.int64)
    if num_draft_tokens == 1:
        return selected, drafts
    infinity: np.integer
    largest: np.integer
    if scores.dtype is torch.float64:
        infinity, largest = np.int64(0x7FF0000000000000), np.int64(0x7FFFFFFFFFFFFFFF)
    else:
        scores = scores.float()
        infinity, largest = np.int32(0x7F800000), np.int32(0x7FFFFFFF)
    _select(
        scores.data_ptr(), tokens.data_ptr(), batch, num_draft_tokens - 1, infinity, largest,
        np.empty(num_candidates, largest.dtype), selected.data_ptr(), drafts.data_ptr(),
    )  # fmt: skip
    return selected, drafts
