"""Greedy verification on the CPU: one walk down each request's tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchvm.ops.kernels.jit import int32_at, int64_at, njit

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["verify_tree_greedy"]


@njit
def _match(
    token: int, candidates: Any, first_child: int, next_sibling: Any, first: int, n: int
) -> int:
    """The first node of a sibling list that holds `token`; -1 if none within n steps."""
    node = first_child
    for _ in range(n):
        if not 0 <= node < n:
            return -1
        if candidates[first + node] == token:
            return node
        node = next_sibling[first + node]
    return -1


@njit
def _verify(
    candidates_address: int,
    index_address: int,
    child_address: int,
    sibling_address: int,
    target_address: int,
    batch: int,
    n: int,
    max_accept: int,
    predicts_address: int,
    accept_index_address: int,
    accept_num_address: int,
) -> None:
    candidates = int64_at(candidates_address)
    index = int64_at(index_address)
    child = int64_at(child_address)
    sibling = int64_at(sibling_address)
    target = int64_at(target_address)
    predicts = int32_at(predicts_address)
    accept_index = int32_at(accept_index_address)
    accept_num = int32_at(accept_num_address)
    for b in range(batch):
        first = b * n
        column = b * max_accept
        for i in range(n):
            predicts[first + i] = -1
        for i in range(max_accept):
            accept_index[column + i] = -1
        accept_num[b] = 0
        last = index[first]
        if not first <= last < first + n:
            continue
        accept_index[column] = last
        accepted = 0
        node = 0
        while accepted < max_accept - 1:
            node = _match(target[last], candidates, child[first + node], sibling, first, n)
            if node < 0:
                break
            place = index[first + node]
            if not first <= place < first + n:
                break
            predicts[last] = target[last]
            accepted += 1
            accept_index[column + accepted] = place
            last = place
        predicts[last] = target[last]
        accept_num[b] = accepted


def verify_tree_greedy(
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    max_accept: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Follow the target's choices; shapes and dtypes are checked by the op.

    Args:
        candidates: int64 (B, n), as the four below.
        retrieve_index: place of each node among all B * n.
        retrieve_next_token: first child of each node.
        retrieve_next_sibling: next sibling of each node.
        target_predict: the target's token after each node.
        max_accept: W, nodes of the longest path, root included.

    Returns:
        predicts int32 (B * n,); accept_index int32 (B, W); accept_token_num int32 (B,).
    """
    inputs = [
        t.contiguous()
        for t in (
            candidates,
            retrieve_index,
            retrieve_next_token,
            retrieve_next_sibling,
            target_predict,
        )
    ]
    batch, n = candidates.shape
    predicts = torch.empty(batch * n, dtype=torch.int32)
    accept_index = torch.empty((batch, max_accept), dtype=torch.int32)
    accept_token_num = torch.empty(batch, dtype=torch.int32)
    _verify(
        *[t.data_ptr() for t in inputs], batch, n, max_accept,
        predicts.data_ptr(), accept_index.data_ptr(), accept_token_num.data_ptr(),
    )  # fmt: skip
    return predicts, accept_index, accept_token_num
