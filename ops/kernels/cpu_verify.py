"""Greedy verification on the CPU."""

from __future__ import annotations

import numpy as np
import torch
from numba import carray

from torchvm.ops.kernels.jit import jit, pointer

__all__ = ["verify_tree_greedy"]


@jit
def _verify(
    candidates_at,
    index_at,
    token_at,
    sibling_at,
    target_at,
    bs,
    n,
    width,
    predicts_at,
    accept_index_at,
    accept_num_at,
):
    candidates = carray(pointer(candidates_at), bs * n, np.int64)
    index = carray(pointer(index_at), bs * n, np.int64)
    token = carray(pointer(token_at), bs * n, np.int64)
    sibling = carray(pointer(sibling_at), bs * n, np.int64)
    target = carray(pointer(target_at), bs * n, np.int64)
    predicts = carray(pointer(predicts_at), bs * n, np.int32)
    accept_index = carray(pointer(accept_index_at), bs * width, np.int32)
    accept_num = carray(pointer(accept_num_at), bs, np.int32)
    for i in range(bs * n):
        predicts[i] = -1
    for i in range(bs * width):
        accept_index[i] = -1
    for b in range(bs):
        row = b * n
        accept_num[b] = 0
        last = index[row]
        if last < 0 or last >= bs * n:
            continue
        accept_index[b * width] = np.int32(last)
        current = 0
        for accepted in range(1, width):
            child = token[row + current]
            steps = 0
            while 0 <= child < n and steps < n and candidates[row + child] != target[last]:
                child = sibling[row + child]
                steps += 1
            if child < 0 or child >= n or steps >= n:
                break
            following = index[row + child]
            if following < 0 or following >= bs * n:
                break
            predicts[last] = np.int32(target[last])
            accept_num[b] = accepted
            accept_index[b * width + accepted] = np.int32(following)
            last = following
            current = child
        predicts[last] = np.int32(target[last])


def verify_tree_greedy(
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    max_accept: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch over five (B, n) contiguous int64 tensors."""
    bs, n = candidates.shape
    predicts = torch.empty(bs * n, dtype=torch.int32)
    accept_index = torch.empty((bs, max_accept), dtype=torch.int32)
    accept_num = torch.empty(bs, dtype=torch.int32)
    _verify(
        candidates.data_ptr(),
        retrieve_index.data_ptr(),
        retrieve_next_token.data_ptr(),
        retrieve_next_sibling.data_ptr(),
        target_predict.data_ptr(),
        bs,
        n,
        max_accept,
        predicts.data_ptr(),
        accept_index.data_ptr(),
        accept_num.data_ptr(),
    )
    return predicts, accept_index, accept_num
