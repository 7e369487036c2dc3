"""GPU kernel of the gated delta rule on draft trees."""

# Compile-time arguments are in capitals, as everywhere in Triton, whose decorator has no types.
# ruff: noqa: N803
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from torchvm.ops.kernels.triton_launch import OPTIONS, device_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MOST_KEY_DIM", "gated_delta_tree", "linear_kernel", "linear_tile"]

MOST_KEY_DIM = 256


@triton.jit
def parent_of(
    node: tl.tensor,
    column: tl.tensor,
    child: tl.tensor,
    sibling: tl.tensor,
    parents: tl.tensor,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Parent of `node` by the first link that reaches it from an earlier node, -1 if none does.

    Args:
        node: the node.
        column: int32 [BLOCK_N], node indices.
        child: int64 [BLOCK_N], first child of each node.
        sibling: int64 [BLOCK_N], next sibling of each node.
        parents: int32 [BLOCK_N], parents of the earlier nodes, -1 for none.
        BLOCK_N: power of two, at least n.
    """
    # A node's two links side by side, so that one minimum finds the first and which it is.
    by_sibling = tl.where((column < node) & (sibling == node), 2 * column + 1, 2 * BLOCK_N)
    link = tl.where((column < node) & (child == node), 2 * column, by_sibling)
    first = tl.min(link, axis=0)
    origin = first // 2
    shared = tl.max(tl.where(column == origin, parents, -1), axis=0)
    return tl.where(first % 2 == 1, shared, tl.where(origin < BLOCK_N, origin, -1))


@triton.jit(do_not_specialize=["scale", "num_draft_tokens", "num_heads"])
def linear_kernel(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    gate: tl.tensor,
    beta: tl.tensor,
    initial_state: tl.tensor,
    retrieve_next_token: tl.tensor,
    retrieve_next_sibling: tl.tensor,
    output: tl.tensor,
    states: tl.tensor,
    scale: tl.float32,
    num_draft_tokens: tl.int32,
    num_heads: tl.int32,
    key_width: tl.int32,
    value_width: tl.int32,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """Run the rule over the nodes of one request, for one head and BLOCK_V columns of its state.

    Args:
        query: (B, n, H, Dk), contiguous as all tensors.
        key: (B, n, H, Dk).
        value: (B, n, H, Dv).
        gate: float32 (B, n, H), log of the decay.
        beta: float32 (B, n, H), strength of the write.
        initial_state: float32 (B, H, Dk, Dv).
        retrieve_next_token: int64 (B, n), first child of each node.
        retrieve_next_sibling: int64 (B, n), next sibling of each node.
        output: (B, n, H, Dv), written.
        states: float32 (B, n, H, Dk, Dv), written, and read where a node's parent is not the
            node before it.
        scale: factor on the output.
        num_draft_tokens: n.
        num_heads: H.
        key_width: Dk.
        value_width: Dv.
        BLOCK_N: power of two, at least n.
        BLOCK_K: power of two, at least Dk.
        BLOCK_V: columns of the program.
    """
    num_tiles = tl.cdiv(value_width, BLOCK_V)
    first = tl.program_id(0) % num_tiles * BLOCK_V
    head = tl.program_id(0) // num_tiles % num_heads
    request = (tl.program_id(0) // num_tiles // num_heads).to(tl.int64)
    column = tl.arange(0, BLOCK_N)
    at = request * num_draft_tokens + column
    child = tl.load(retrieve_next_token + at, mask=column < num_draft_tokens, other=-1)
    sibling = tl.load(retrieve_next_sibling + at, mask=column < num_draft_tokens, other=-1)
    parents = tl.full([BLOCK_N], -1, tl.int32)
    k = tl.arange(0, BLOCK_K)
    v = first + tl.arange(0, BLOCK_V)
    cell = k[:, None] * value_width + v[None, :]
    inside = (k < key_width)[:, None] & (v < value_width)[None, :]
    size = key_width.to(tl.int64) * value_width
    initial_state += (request * num_heads + head) * size
    state = tl.load(initial_state + cell, mask=inside, other=0.0)
    for node in range(num_draft_tokens):
        parent = parent_of(node, column, child, sibling, parents, BLOCK_N)
        parents = tl.where(column == node, parent, parents)
        if parent != node - 1:
            if parent < 0:
                state = tl.load(initial_state + cell, mask=inside, other=0.0)
            else:
                # Threads may load what others of the program have stored.
                tl.debug_barrier()
                origin = (request * num_draft_tokens + parent) * num_heads + head
                state = tl.load(states + origin * size + cell, mask=inside, other=0.0)
        row = (request * num_draft_tokens + node) * num_heads + head
        live_k, live_v = k < key_width, v < value_width
        q_row = tl.load(query + row * key_width + k, mask=live_k, other=0.0).to(tl.float32)
        k_row = tl.load(key + row * key_width + k, mask=live_k, other=0.0).to(tl.float32)
        v_row = tl.load(value + row * value_width + v, mask=live_v, other=0.0).to(tl.float32)
        state = state * tl.exp(tl.load(gate + row))
        error = v_row - tl.sum(k_row[:, None] * state, axis=0)
        state += k_row[:, None] * (tl.load(beta + row) * error)[None, :]
        tl.store(states + row * size + cell, state, mask=inside)
        read = tl.sum(q_row[:, None] * state, axis=0) * scale
        tl.store(output + row * value_width + v, read.to(output.dtype.element_ty), mask=live_v)


def linear_tile(n: int, key_width: int, value_width: int) -> dict[str, int]:
    """Compile-time sizes of a launch, and its warps.

    Args:
        n: draft tokens, root included.
        key_width: Dk.
        value_width: Dv.
    """
    return {
        "BLOCK_N": triton.next_power_of_2(n),
        "BLOCK_K": triton.next_power_of_2(key_width),
        "BLOCK_V": min(32, triton.next_power_of_2(value_width)),
        "num_warps": 4,
    }


def gated_delta_tree(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel, a program a request, head and BLOCK_V columns; the op has checked.

    Args:
        query: (B, n, H, Dk), as `key`.
        key: the keys.
        value: (B, n, H, Dv).
        gate: (B, n, H) float32, log of the decay.
        beta: (B, n, H) float32, strength of the write.
        initial_state: (B, H, Dk, Dv) float32.
        retrieve_next_token: (B, n) int64, first child of each node.
        retrieve_next_sibling: (B, n) int64, next sibling of each node.
        scale: factor on the output.

    Returns:
        output (B, n, H, Dv) in value's dtype, states (B, n, H, Dk, Dv) float32.
    """
    batch, n, num_heads, key_width = key.shape
    value_width = value.shape[3]
    output = value.new_empty(value.shape)
    states = initial_state.new_empty(*key.shape, value_width)
    if output.numel() == 0:
        return output, states
    inputs = (
        query, key, value, gate, beta, initial_state, retrieve_next_token, retrieve_next_sibling,
    )  # fmt: skip
    tile = linear_tile(n, key_width, value_width)
    num_programs = batch * num_heads * triton.cdiv(value_width, tile["BLOCK_V"])
    with device_of(query):
        linear_kernel[(num_programs,)](
            *(tensor.contiguous() for tensor in inputs), output, states, scale, n, num_heads,
            key_width, value_width, **tile, **OPTIONS,
        )  # fmt: skip
    return output, states
