"""GPU kernel that follows the target's choices through draft trees."""

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

__all__ = ["verify_kernel", "verify_tree_greedy"]


@triton.jit(
    do_not_specialize=[
        "candidates", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling",
        "target_predict", "num_draft_tokens", "max_accept",
    ]
)  # fmt: skip
def verify_kernel(
    candidates: tl.tensor,
    retrieve_index: tl.tensor,
    retrieve_next_token: tl.tensor,
    retrieve_next_sibling: tl.tensor,
    target_predict: tl.tensor,
    predicts: tl.tensor,
    accept_index: tl.tensor,
    accept_token_num: tl.tensor,
    num_draft_tokens: tl.int32,
    max_accept: tl.int32,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
) -> None:
    """Follow the target's choices from the root of one request's tree, the program's.

    The outputs of the request are kept in registers and stored once: -1 where nothing was
    accepted, so that no other launch has to clear them.

    Args:
        candidates: int64 (B, n), as all inputs.
        retrieve_index: where each node stands among the B * n.
        retrieve_next_token: first child of each node, or outside [0, n).
        retrieve_next_sibling: next sibling of each node, or outside [0, n).
        target_predict: the target's token after each node.
        predicts: int32 (B * n,), written.
        accept_index: int32 (B, max_accept), written.
        accept_token_num: int32 (B,), written.
        num_draft_tokens: n.
        max_accept: W, nodes of the longest path, root included.
        BLOCK_N: power of two, at least n.
        BLOCK_W: power of two, at least W.
    """
    n = num_draft_tokens
    row = tl.program_id(0).to(tl.int64) * n
    candidates += row
    retrieve_index += row
    retrieve_next_token += row
    retrieve_next_sibling += row
    target_predict += row
    node = tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_W)
    predicted = tl.full([BLOCK_N], -1, tl.int32)
    accepted = tl.full([BLOCK_W], -1, tl.int32)
    num_accepted = tl.cast(0, tl.int32)
    current = tl.cast(0, tl.int64)
    # Where the last accepted node stands within the request's own n.
    last = tl.load(retrieve_index) - row
    going = (last >= 0) & (last < n)
    accepted = tl.where(going & (column == 0), (row + last).to(tl.int32), accepted)
    while going:
        token = tl.load(target_predict + last)
        predicted = tl.where(node == last, token.to(tl.int32), predicted)
        child = tl.load(retrieve_next_token + current)
        searching = (child >= 0) & (child < n) & (num_accepted + 1 < max_accept)
        found = searching & (n == 0)
        hops = tl.cast(0, tl.int32)
        while searching:
            found = tl.load(candidates + child) == token
            following = tl.load(retrieve_next_sibling + child)
            hops += 1
            searching = (following >= 0) & (following < n) & (hops < n) & (found == 0)
            child = tl.where(searching, following, child)
        place = tl.load(retrieve_index + child, mask=found, other=-1) - row
        going = found & (place >= 0) & (place < n)
        if going:
            num_accepted += 1
            accepted = tl.where(column == num_accepted, (row + place).to(tl.int32), accepted)
            last = place
            current = child
    request = tl.program_id(0).to(tl.int64)
    tl.store(predicts + row + node, predicted, mask=node < n)
    tl.store(accept_index + request * max_accept + column, accepted, mask=column < max_accept)
    tl.store(accept_token_num + request, num_accepted)


def verify_tree_greedy(
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    max_accept: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the verification kernel, one program a request; arguments are checked by the op.

    Args:
        candidates: int64 (B, n), as the next four.
        retrieve_index: where each node stands among the B * n.
        retrieve_next_token: first child of each node, or -1.
        retrieve_next_sibling: next sibling of each node, or -1.
        target_predict: the target's token after each node.
        max_accept: columns of accept_index, root included.

    Returns:
        predicts int32 (B * n,); accept_index int32 (B, max_accept); accept_token_num int32 (B,).
    """
    batch, n = candidates.shape
    predicts = candidates.new_empty(batch * n, dtype=torch.int32)
    accept_index = candidates.new_empty(batch, max_accept, dtype=torch.int32)
    accept_token_num = candidates.new_empty(batch, dtype=torch.int32)
    outputs = (predicts, accept_index, accept_token_num)
    if batch == 0:
        return outputs
    inputs = (
        candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_predict,
    )  # fmt: skip
    with device_of(candidates):
        verify_kernel[(batch,)](
            *(tensor.contiguous() for tensor in inputs), *outputs, n, max_accept,
            BLOCK_N=triton.next_power_of_2(n), BLOCK_W=triton.next_power_of_2(max_accept),
            num_warps=1, **OPTIONS,
        )  # fmt: skip
    return outputs
