"""The tree ops as engines written in Python do them: one request after another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchvm.ops.tree import DraftTree
from torchvm.ops.verify import Verification

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["build", "select", "verify"]


def build(
    parent_list: Tensor,
    selected_index: Tensor,
    seq_lens: Tensor,
    mask: Tensor,
    *,
    topk: int,
    num_draft_tokens: int,
    full: bool,
) -> DraftTree:
    """Lay out well-formed trees, rows as tensors and links as lists.

    A row is its parent's row with one more cell. For the arguments see `build_tree`.

    Args:
        parent_list: (B, topk * (depth - 1) + 1) int64.
        selected_index: (B, n - 1) int64.
        seq_lens: (B,) int64.
        mask: 1-D bool, written.
        topk: children of a beam.
        num_draft_tokens: n.
        full: FULL_MASK, prefix columns included, or QLEN_ONLY.
    """
    n, batch = num_draft_tokens, seq_lens.shape[0]
    positions, tokens, siblings = [], [], []
    offset = 0
    for b, length in enumerate(seq_lens.tolist()):
        parents = _parents(parent_list[b].tolist(), selected_index[b].tolist(), topk)
        block = torch.eye(n, dtype=torch.int64)
        block[:, 0] = 1
        token, sibling = [-1] * n, [-1] * n
        for node in range(1, n):
            if parents[node] > 0:
                block[node].add_(block[parents[node]])
        for node in range(n - 1, 0, -1):
            sibling[node], token[parents[node]] = token[parents[node]], node
        rows = block.clamp_(max=1)
        positions.append(rows.sum(1) - 1 + length)
        tokens.append(token)
        siblings.append(sibling)
        prefix = length if full else 0
        request = mask[offset : offset + n * (prefix + n)].view(n, prefix + n)
        request[:, :prefix] = True
        request[:, prefix:] = rows
        offset += request.numel()
    index = torch.arange(batch * n).view(batch, n)
    return DraftTree(torch.cat(positions), index, torch.tensor(tokens), torch.tensor(siblings))


def _parents(beams: list[int], selected: list[int], topk: int) -> list[int]:
    """The parent of each node."""
    node_of: dict[int, int] = {}
    parents = [-1]
    for node, candidate in enumerate(selected, 1):
        beam = candidate // topk
        parents.append(node_of.get(beams[beam], -1) if beam else 0)
        node_of[candidate] = node
    return parents


def select(scores: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Select the best of joined candidates, by score and then by number.

    Args:
        scores: (B, M).
        tokens: (B, M) int64.
        count: how many.

    Returns:
        Their numbers in ascending order and their tokens, (B, count) int64 each.
    """
    ids = []
    for row in scores.tolist():
        best = sorted(range(len(row)), key=lambda i: -row[i])
        ids.append(sorted(best[:count]))
    selected = torch.tensor(ids, dtype=torch.int64).view(len(ids), count)
    return selected, tokens.gather(1, selected)


def verify(
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    *,
    max_accept: int,
) -> Verification:
    """Walk down well-formed trees along what the target chose; see `verify_tree_greedy`."""
    batch, n = candidates.shape
    predicts = [-1] * (batch * n)
    paths, counts = [], []
    target = target_predict.flatten().tolist()
    for b in range(batch):
        token, sibling = retrieve_next_token[b].tolist(), retrieve_next_sibling[b].tolist()
        drafts, places = candidates[b].tolist(), retrieve_index[b].tolist()
        path, node = [places[0]], 0
        while len(path) < max_accept:
            child = token[node]
            while child >= 0 and drafts[child] != target[path[-1]]:
                child = sibling[child]
            if child < 0:
                break
            path.append(places[child])
            node = child
        for place in path:
            predicts[place] = target[place]
        paths.append(path + [-1] * (max_accept - len(path)))
        counts.append(len(path) - 1)
    return Verification(
        *(torch.tensor(part, dtype=torch.int32) for part in (predicts, paths, counts))
    )
