"""CPU kernel of the gated delta rule on draft trees: node after node, in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["gated_delta_tree", "parents_from_links"]


def parents_from_links(children: list[int], siblings: list[int]) -> list[int]:
    """Return the parent of each node, -1 where no link from an earlier node reaches it.

    The first link in node order that reaches a node counts, a child's before a sibling's.

    Args:
        children: first child of each node; ignored where it is no later node.
        siblings: next sibling of each node; ignored where it is no later node.
    """
    n = len(children)
    parents: list[int | None] = [None] * n
    for node, (child, sibling) in enumerate(zip(children, siblings, strict=True)):
        for later, parent in ((child, node), (sibling, parents[node])):
            if node < later < n and parents[later] is None:
                parents[later] = -1 if parent is None else parent
    return [-1 if parent is None else parent for parent in parents]


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
    """Run the rule from each node's parent; arguments are checked by the op.

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
    batch, n, num_heads, width = key.shape
    output = value.new_empty(value.shape)
    states = initial_state.new_empty(batch, n, num_heads, width, value.shape[3])
    links = zip(retrieve_next_token.tolist(), retrieve_next_sibling.tolist(), strict=True)
    for b, (children, siblings) in enumerate(links):
        for i, parent in enumerate(parents_from_links(children, siblings)):
            before = initial_state[b] if parent < 0 else states[b, parent]
            state = before * gate[b, i, :, None, None].exp()
            k = key[b, i].float()
            error = value[b, i].float() - torch.einsum("hk,hkv->hv", k, state)
            state += k[..., None] * (beta[b, i, :, None] * error)[:, None]
            states[b, i] = state
            output[b, i] = torch.einsum("hk,hkv->hv", query[b, i].float(), state) * scale
    return output, states
