"""GPU kernel that samples from the target along draft trees.

Sums that a token is drawn by are of integers, in units of 2 ** -40: they are exact in any order,
so that the CPU and every GPU draw the same token.
"""

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

__all__ = ["sampling_kernel", "sampling_tile", "verify_tree_sampling"]

# Probabilities looked at at once.
MAX_BLOCK = 4096
INFINITY_BITS = tl.constexpr(0x7F800000)
COIN_BITS = tl.constexpr(24)
MOST_TICKS = tl.constexpr(2**24 - 1)
NO_TOKEN = tl.constexpr(-1)
# A key of _most_probable: whether the token is open, 31 bits of probability, 31 of the token.
LAST_TOKEN = tl.constexpr(2**31 - 1)
OPEN = tl.constexpr(2**62)
CLOSED = tl.constexpr(2**62 - 1)


@triton.jit
def bits_of(p: tl.tensor) -> tl.tensor:
    """The bits of probabilities, in their order; 0 for what is negative or NaN."""
    bits = p.to(tl.int32, bitcast=True)
    return tl.where((bits > 0) & (bits <= INFINITY_BITS), bits, 0)


@triton.jit
def weight_of(p: tl.tensor) -> tl.tensor:
    """Probabilities in units of 2 ** -40, int64."""
    units = tl.minimum(p, 1.0) * 1099511627776.0
    return tl.where(bits_of(p) > 0, units, 0.0).to(tl.int64)


@triton.jit
def most_probable(
    probs: tl.tensor,
    vocab_size: tl.tensor,
    slot: tl.tensor,
    rejected: tl.tensor,
    hops: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The most probable token but the rejected ones, or of all if those left are at 0."""
    best = tl.cast(0, tl.int64)
    for start in range(0, vocab_size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        bits = bits_of(tl.load(probs + at, mask=at < vocab_size, other=0.0)).to(tl.int64)
        key = tl.where(bits > 0, (bits << 31) | (LAST_TOKEN - at) | OPEN, 0)
        for i in range(hops):
            closed = tl.max(tl.where(slot == i, rejected, NO_TOKEN), axis=0)
            key = tl.where(at == closed, key & CLOSED, key)
        best = tl.maximum(best, tl.max(key, axis=0))
    return tl.where(best > 0, LAST_TOKEN - (best & LAST_TOKEN), 0)


@triton.jit
def draw(
    probs: tl.tensor,
    vocab_size: tl.tensor,
    coin: tl.tensor,
    slot: tl.tensor,
    rejected: tl.tensor,
    hops: tl.tensor,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
) -> tl.tensor:
    """A token of these probabilities without the rejected ones, by inverse CDF.

    The probabilities are read once, for the weight of each tile; then only the tile in which the
    token is.

    Args:
        probs: pointer to the row's V probabilities.
        vocab_size: V.
        coin: float32 in [0, 1).
        slot: int32 [BLOCK_N], which sibling a rejected token is.
        rejected: int64 [BLOCK_N], the rejected tokens, NO_TOKEN where there is none.
        hops: how many siblings there are at most.
        BLOCK: power of two, tokens of a tile.
        TILES: power of two, at least the number of tiles.
    """
    tile = tl.arange(0, TILES)
    weights = tl.zeros([TILES], tl.int64)
    for start in range(0, vocab_size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        p = tl.load(probs + at, mask=at < vocab_size, other=0.0)
        weights = tl.where(tile == start // BLOCK, tl.sum(weight_of(p), axis=0), weights)
    for i in range(hops):
        closed = tl.max(tl.where(slot == i, rejected, NO_TOKEN), axis=0)
        p = tl.load(probs + closed, mask=closed >= 0, other=0.0)
        weights -= tl.where(tile == closed // BLOCK, weight_of(p), 0)
    mass = tl.sum(weights, axis=0)
    token = tl.cast(0, tl.int64)
    if mass > 0:
        within = tl.minimum(tl.where(coin > 0, coin, 0.0), 1.0)
        ticks = tl.minimum((within * 16777216.0).to(tl.int64), MOST_TICKS)
        # floor(mass * ticks / 2 ** 24), which is less than the mass, in 62 bits.
        low = mass & MOST_TICKS
        goal = (mass >> COIN_BITS) * ticks + ((low * ticks) >> COIN_BITS)
        passed = tl.cumsum(weights, axis=0) <= goal
        goal -= tl.sum(tl.where(passed, weights, 0), axis=0)
        first = tl.sum(passed.to(tl.int32), axis=0) * BLOCK
        at = first + tl.arange(0, BLOCK)
        weight = weight_of(tl.load(probs + at, mask=at < vocab_size, other=0.0))
        for i in range(hops):
            closed = tl.max(tl.where(slot == i, rejected, NO_TOKEN), axis=0)
            weight = tl.where(at == closed, 0, weight)
        before = tl.cumsum(weight, axis=0) <= goal
        token = (first + tl.sum(before.to(tl.int32), axis=0)).to(tl.int64)
    else:
        token = most_probable(probs, vocab_size, slot, rejected, hops, BLOCK).to(tl.int64)
    return token


@triton.jit(
    do_not_specialize=[
        "candidates", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling",
        "coins", "coins_for_final", "num_draft_tokens", "max_accept", "threshold_single",
        "threshold_acc",
    ]
)  # fmt: skip
def sampling_kernel(
    candidates: tl.tensor,
    retrieve_index: tl.tensor,
    retrieve_next_token: tl.tensor,
    retrieve_next_sibling: tl.tensor,
    target_probs: tl.tensor,
    coins: tl.tensor,
    coins_for_final: tl.tensor,
    predicts: tl.tensor,
    accept_index: tl.tensor,
    accept_token_num: tl.tensor,
    num_draft_tokens: tl.int32,
    vocab_size: tl.int32,
    max_accept: tl.int32,
    threshold_single: tl.float32,
    threshold_acc: tl.float32,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """Walk down one request's tree, the program's, and draw its last token.

    The outputs of the request are kept in registers and stored once: -1 where nothing was
    accepted, so that no other launch has to clear them.

    Args:
        candidates: int64 (B, n), as the next three.
        retrieve_index: where each node stands among the B * n.
        retrieve_next_token: first child of each node, or outside [0, n).
        retrieve_next_sibling: next sibling of each node, or outside [0, n).
        target_probs: float32 (B, n, V), the target's distribution after each node.
        coins: float32 (B, n), for the children of each node.
        coins_for_final: float32 (B,), for the last token.
        predicts: int32 (B * n,), written.
        accept_index: int32 (B, max_accept), written.
        accept_token_num: int32 (B,), written.
        num_draft_tokens: n.
        vocab_size: V.
        max_accept: W, nodes of the longest path, root included.
        threshold_single: least probability that is accepted by itself.
        threshold_acc: divisor of the sum that a coin is compared with.
        BLOCK_N: power of two, at least n.
        BLOCK_W: power of two, at least W.
        BLOCK: power of two, probabilities looked at at once.
        TILES: power of two, at least V / BLOCK.
    """
    n = num_draft_tokens
    request = tl.program_id(0).to(tl.int64)
    row = request * n
    candidates += row
    retrieve_index += row
    retrieve_next_token += row
    retrieve_next_sibling += row
    coins += row
    probs = target_probs + row * vocab_size
    slot = tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_W)
    predicted = tl.full([BLOCK_N], -1, tl.int32)
    accepted = tl.full([BLOCK_W], -1, tl.int32)
    num_accepted = tl.cast(0, tl.int32)
    # Where the last accepted node stands within the request's own n.
    last = tl.load(retrieve_index) - row
    going = (last >= 0) & (last < n)
    rooted = going
    accepted = tl.where(going & (column == 0), (row + last).to(tl.int32), accepted)
    current = tl.cast(0, tl.int64)
    token = tl.cast(0, tl.int64)
    found = going & (n == 0)
    hops = tl.cast(0, tl.int32)
    rejected = tl.full([BLOCK_N], NO_TOKEN, tl.int64)
    while going:
        coin = tl.load(coins + current)
        total = tl.cast(0.0, tl.float32)
        rejected = tl.full([BLOCK_N], NO_TOKEN, tl.int64)
        hops = tl.cast(0, tl.int32)
        child = tl.load(retrieve_next_token + current)
        searching = (child >= 0) & (child < n) & (num_accepted + 1 < max_accept)
        found = searching & (n == 0)
        while searching:
            token = tl.load(candidates + child)
            fresh = (token >= 0) & (token < vocab_size)
            fresh &= tl.max((rejected == token).to(tl.int32), axis=0) == 0
            p = tl.load(probs + token, mask=fresh, other=0.0)
            possible = bits_of(p) > 0
            total += tl.where(possible, p, 0.0)
            found = (coin <= tl.div_rn(total, threshold_acc)) | (p >= threshold_single)
            found &= possible
            rejected = tl.where((slot == hops) & fresh & (found == 0), token, rejected)
            following = tl.load(retrieve_next_sibling + child)
            hops += 1
            searching = (following >= 0) & (following < n) & (hops < n) & (found == 0)
            child = tl.where(searching, following, child)
        place = tl.load(retrieve_index + child, mask=found, other=-1) - row
        going = found & (place >= 0) & (place < n)
        if going:
            predicted = tl.where(slot == last, token.to(tl.int32), predicted)
            num_accepted += 1
            accepted = tl.where(column == num_accepted, (row + place).to(tl.int32), accepted)
            last = place
            current = child
            probs = target_probs + (row + current) * vocab_size
    if rooted:
        if found == 0:
            coin = tl.load(coins_for_final + request)
            token = draw(probs, vocab_size, coin, slot, rejected, hops, BLOCK, TILES)
        predicted = tl.where(slot == last, token.to(tl.int32), predicted)
    tl.store(predicts + row + slot, predicted, mask=slot < n)
    tl.store(accept_index + request * max_accept + column, accepted, mask=column < max_accept)
    tl.store(accept_token_num + request, num_accepted)


def sampling_tile(num_draft_tokens: int, max_accept: int, vocab_size: int) -> dict[str, int]:
    """Compile-time arguments of a launch, and its warps."""
    block = min(triton.next_power_of_2(vocab_size), MAX_BLOCK)
    return {
        "BLOCK_N": triton.next_power_of_2(num_draft_tokens),
        "BLOCK_W": triton.next_power_of_2(max_accept),
        "BLOCK": block,
        "TILES": triton.next_power_of_2(triton.cdiv(vocab_size, block)),
        "num_warps": 1 if block <= 256 else 8,
    }


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
    """Launch the kernel, one program a request; arguments are checked by the op.

    Args:
        candidates: int64 (B, n), as the next three.
        retrieve_index: where each node stands among the B * n.
        retrieve_next_token: first child of each node, or -1.
        retrieve_next_sibling: next sibling of each node, or -1.
        target_probs: float32 (B, n, V), after each node.
        coins: float32 (B, n), for the children of each node.
        coins_for_final: float32 (B,), for the last token.
        max_accept: columns of accept_index, root included.
        threshold_single: least probability that is accepted by itself.
        threshold_acc: divisor of the sum that a coin is compared with.

    Returns:
        predicts int32 (B * n,); accept_index int32 (B, max_accept); accept_token_num int32 (B,).
    """
    batch, n, vocab_size = target_probs.shape
    predicts = candidates.new_empty(batch * n, dtype=torch.int32)
    accept_index = candidates.new_empty(batch, max_accept, dtype=torch.int32)
    accept_token_num = candidates.new_empty(batch, dtype=torch.int32)
    outputs = (predicts, accept_index, accept_token_num)
    if batch == 0:
        return outputs
    inputs = (
        candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_probs,
        coins, coins_for_final,
    )  # fmt: skip
    with device_of(candidates):
        sampling_kernel[(batch,)](
            *(tensor.contiguous() for tensor in inputs), *outputs, n, vocab_size, max_accept,
            threshold_single, threshold_acc, **sampling_tile(n, max_accept, vocab_size),
            **OPTIONS,
        )  # fmt: skip
    return outputs
