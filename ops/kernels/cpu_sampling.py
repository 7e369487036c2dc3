"""Verification by sampling on the CPU: one walk and one draw for each request.

Sums that a token is drawn by are of integers, in units of 2 ** -40: they are exact in any order,
so that the CPU and every GPU draw the same token.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torchvm.ops.kernels.jit import int32_at, int64_at, load, njit
from torchvm.ops.kernels.threads import run_parts, split

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["verify_tree_sampling"]

f32 = np.float32
ZERO, ONE, UNITS = f32(0), f32(1), f32(1 << 40)
COIN_BITS = 24
INFINITY_BITS = 0x7F800000
# Probabilities that a thread of its own is worth.
PART = 1 << 16


@njit
def _probability(probs: int, token: int) -> Any:
    """The token's probability at this address; 0 where it is negative or NaN."""
    return load(probs + 4 * token, ZERO) if 0 < int32_at(probs)[token] <= INFINITY_BITS else ZERO


@njit
def _precedes(token: int, candidates: Any, sibling: Any, node: int, count: int) -> bool:
    """Whether one of the first `count` siblings from `node` on holds `token`."""
    for _ in range(count):
        if candidates[node] == token:
            return True
        node = sibling[node]
    return False


@njit
def _accept(
    candidates: Any,
    sibling: Any,
    first: int,
    n: int,
    vocab: int,
    probs: int,
    coin: Any,
    threshold_single: Any,
    threshold_acc: Any,
) -> tuple[int, int]:
    """The accepted child of a sibling list, -1 for none; how many siblings before it are not."""
    total = ZERO
    node = first
    for steps in range(n):
        if not 0 <= node < n:
            return -1, steps
        token = candidates[node]
        if 0 <= token < vocab and not _precedes(token, candidates, sibling, first, steps):
            p = _probability(probs, token)
            total += p
            if p > ZERO and (coin <= total / threshold_acc or p >= threshold_single):
                return node, steps
        node = sibling[node]
    return -1, n


@njit
def _most_probable(
    probs: int, vocab: int, candidates: Any, sibling: Any, first: int, count: int
) -> int:
    """The most probable token but the rejected siblings', or of all if those left are at 0."""
    bits = int32_at(probs)
    best, found, best_open, found_open = 0, 0, 0, -1
    for token in range(vocab):
        if best < bits[token] <= INFINITY_BITS:
            best, found = bits[token], token
        if best_open < bits[token] <= INFINITY_BITS and not _precedes(
            token, candidates, sibling, first, count
        ):
            best_open, found_open = bits[token], token
    return found if found_open < 0 else found_open


@njit
def _draw(
    probs: int, weights: Any, coin: Any, candidates: Any, sibling: Any, first: int, count: int
) -> int:
    """A token of these probabilities without those of `count` siblings, by inverse CDF."""
    vocab = weights.size
    for token in range(vocab):
        weights[token] = np.int64(min(_probability(probs, token), ONE) * UNITS)
    node = first
    for _ in range(count):
        if 0 <= candidates[node] < vocab:
            weights[candidates[node]] = 0
        node = sibling[node]
    mass = weights.sum()
    if mass == 0:
        found: int = _most_probable(probs, vocab, candidates, sibling, first, count)
        return found
    most = np.int64((1 << COIN_BITS) - 1)
    ticks = np.int64(0)
    if coin >= ONE:
        ticks = most
    elif coin > ZERO:
        ticks = np.int64(coin * f32(1 << COIN_BITS))
    low = mass & most
    # floor(mass * ticks / 2 ** 24), which is less than the mass, in 62 bits.
    left = (mass >> COIN_BITS) * ticks + (low * ticks >> COIN_BITS)
    token = 0
    while left >= weights[token]:
        left -= weights[token]
        token += 1
    return token


@njit
def _verify(
    candidates_address: int,
    index_address: int,
    child_address: int,
    sibling_address: int,
    probs_address: int,
    coins_address: int,
    final_address: int,
    predicts_address: int,
    accept_index_address: int,
    accept_num_address: int,
    n: int,
    vocab: int,
    max_accept: int,
    single: float,
    acc: float,
    begin: int,
    end: int,
) -> None:
    predicts = int32_at(predicts_address)
    accept_num = int32_at(accept_num_address)
    weights = np.empty(vocab, np.int64)
    threshold_single, threshold_acc = f32(single), f32(acc)
    for b in range(begin, end):
        first = b * n
        candidates = int64_at(candidates_address + 8 * first)
        index = int64_at(index_address + 8 * first)
        child = int64_at(child_address + 8 * first)
        sibling = int64_at(sibling_address + 8 * first)
        accept_index = int32_at(accept_index_address + 4 * b * max_accept)
        for i in range(n):
            predicts[first + i] = -1
        for i in range(max_accept):
            accept_index[i] = -1
        accept_num[b] = 0
        last = index[0]
        if not first <= last < first + n:
            continue
        accept_index[0] = last
        accepted, node, met, rejected = 0, 0, -1, 0
        probs = probs_address + 4 * first * vocab
        while accepted < max_accept - 1:
            coin = load(coins_address + 4 * (first + node), ZERO)
            met, rejected = _accept(
                candidates, sibling, child[node], n, vocab, probs, coin, threshold_single,
                threshold_acc,
            )  # fmt: skip
            if met < 0 or not first <= index[met] < first + n:
                break
            predicts[last] = candidates[met]
            accepted += 1
            last, node, met, rejected = index[met], met, -1, 0
            accept_index[accepted] = last
            probs = probs_address + 4 * (first + node) * vocab
        if met >= 0:
            predicts[last] = candidates[met]
        else:
            coin = load(final_address + 4 * b, ZERO)
            predicts[last] = _draw(
                probs, weights, coin, candidates, sibling, child[node], rejected
            )
        accept_num[b] = accepted


def verify_tree_sampling(
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_probs: Tensor,
    coins: Tensor,
    coins_for_final: Tensor,
    max_accept: int,
    threshold_single: float,
    threshold_acc: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample along the trees; shapes, dtypes and thresholds are checked by the op.

    Args:
        candidates: int64 (B, n), as the three below.
        retrieve_index: place of each node among all B * n.
        retrieve_next_token: first child of each node.
        retrieve_next_sibling: next sibling of each node.
        target_probs: float32 (B, n, V), after each node.
        coins: float32 (B, n), for the children of each node.
        coins_for_final: float32 (B,), for the last token.
        max_accept: W, nodes of the longest path, root included.
        threshold_single: least probability that is accepted by itself.
        threshold_acc: divisor of the sum that a coin is compared with.

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
            target_probs,
            coins,
            coins_for_final,
        )
    ]
    batch, n, vocab = target_probs.shape
    outputs = (
        torch.empty(batch * n, dtype=torch.int32),
        torch.empty((batch, max_accept), dtype=torch.int32),
        torch.empty(batch, dtype=torch.int32),
    )
    addresses = [t.data_ptr() for t in (*inputs, *outputs)]
    run = partial(
        _verify, *addresses, n, vocab, max_accept, float(threshold_single), float(threshold_acc)
    )
    parts = min(torch.get_num_threads(), batch, 1 + batch * vocab // PART)
    if parts > 1:
        run_parts(run, split([1] * batch, 1, parts))
    else:
        run(0, batch)
    return outputs
