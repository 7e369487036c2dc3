"""Plain attention of one request on the CPU, in float32: for readers whose speed is a GPU's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["attend", "gather", "log_sums"]


def gather(cache: Tensor, pages: list[int], num_positions: int) -> Tensor:
    """Return positions [0, num_positions) of a request: (num_positions, heads, dim) float32.

    Args:
        cache: (num_pages, page_size, heads, dim).
        pages: the request's page ids, enough of them.
        num_positions: how many.
    """
    return cache[pages].flatten(0, 1)[:num_positions].float()


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    *,
    scale: float,
    logit_cap: float = 0.0,
) -> Tensor:
    """Softmax attention of one request's nodes.

    Args:
        query: (n, num_q_heads, dim).
        keys: (T, num_kv_heads, dim) float32.
        values: (T, num_kv_heads, value_dim) float32.
        visible: (n, T) bool.
        scale: factor on query times key.
        logit_cap: c > 0 replaces a scaled score s by c * tanh(s / c).

    Returns:
        (n, num_q_heads, value_dim) float32; zeros for a node that attends nothing.
    """
    scores = _scores(query, keys, visible, scale, logit_cap)
    weights = scores.softmax(-1).masked_fill(~visible, 0.0)
    # A hidden value may be anything, NaN included, which 0 * NaN would let through.
    seen = visible.any(0)
    values = values[seen].repeat_interleave(query.shape[1] // values.shape[1], 1)
    return torch.einsum("hnt,thd->nhd", weights[..., seen], values)


def log_sums(
    query: Tensor, keys: Tensor, visible: Tensor, *, scale: float, logit_cap: float = 0.0
) -> Tensor:
    """Logarithm of the sum of exp(score) over what a node sees; arguments as in `attend`.

    Returns:
        (n, num_q_heads) float32; -inf for a node that attends nothing.
    """
    return _scores(query, keys, visible, scale, logit_cap).logsumexp(-1).T


def _scores(
    query: Tensor, keys: Tensor, visible: Tensor, scale: float, logit_cap: float
) -> Tensor:
    """(num_q_heads, n, T), -inf where hidden."""
    keys = keys.repeat_interleave(query.shape[1] // keys.shape[1], 1)
    scores = torch.einsum("nhd,thd->hnt", query.float(), keys) * scale
    if logit_cap > 0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    return scores.masked_fill(~visible, -torch.inf)
