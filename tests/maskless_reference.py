"""The attention ops that read no mask, in plain loops and float64; shares no code with them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def softmax_sum(scores: list[float], values: list[Tensor]) -> Tensor:
    """Softmax of the scores times the values."""
    largest = max(scores)
    weights = [math.exp(score - largest) for score in scores]
    pairs = zip(weights, values, strict=True)
    total = sum(weight * value for weight, value in pairs) / sum(weights)
    assert isinstance(total, torch.Tensor)
    return total


def entry(cache: Tensor, row: list[int], position: int) -> Tensor:
    """What a cache holds of a position, by the page table's row of its request, in float64."""
    size = cache.shape[1]
    return cache[row[position // size], position % size].double()


def mla_attention(
    query_latent: Tensor,
    query_rope: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    scale: float,
) -> Tensor:
    """Every head of every node against every position that it sees."""
    out = torch.full(query_latent.shape, math.nan, dtype=torch.float64)
    batch, n, heads, _ = query_latent.shape
    for b in range(batch):
        row = page_table[b].tolist()
        for i in range(n):
            seen = range(int(seq_lens[b]) + i + 1)
            latents = [entry(latent_cache, row, t) for t in seen]
            ropes = [entry(rope_cache, row, t) for t in seen]
            for h in range(heads):
                latent, rope = query_latent[b, i, h].double(), query_rope[b, i, h].double()
                scores = [
                    scale * float(latent @ c + rope @ r)
                    for c, r in zip(latents, ropes, strict=True)
                ]
                out[b, i, h] = softmax_sum(scores, latents)
    return out


def sparse_window_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    positions: Tensor,
    compressed_k: Tensor,
    compressed_v: Tensor,
    selected: Tensor,
    scale: float,
    sliding_window: int,
) -> Tensor:
    """Every head of every node against its window and its selected blocks."""
    out = torch.full(query.shape, math.nan, dtype=torch.float64)
    batch, n, heads, _ = query.shape
    group = heads // k_cache.shape[2]
    for b in range(batch):
        row = page_table[b].tolist()
        for i in range(n):
            own = int(positions[b, i])
            window = [p for p in range(own + 1) if own - sliding_window < p]
            blocks = [c for c in selected[b, i].tolist() if c != -1]
            for h in range(heads):
                keys, values = (
                    [entry(cache, row, p)[h // group] for p in window]
                    + [made[b, c, h // group].double() for c in blocks]
                    for cache, made in ((k_cache, compressed_k), (v_cache, compressed_v))
                )
                scores = [scale * float(query[b, i, h].double() @ key) for key in keys]
                out[b, i, h] = softmax_sum(scores, values)
    return out


def gated_delta_tree(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    parents: list[list[int]],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Each node's whole path from the initial state, in the paper's form.

    S = S_before (alpha (I - beta k k^T)) + beta v k^T with the state transposed, (Dv, Dk).
    """
    batch, n, heads, width = key.shape
    output = torch.full(value.shape, math.nan, dtype=torch.float64)
    states = torch.full((batch, n, heads, width, value.shape[3]), math.nan, dtype=torch.float64)
    identity = torch.eye(width, dtype=torch.float64)
    for b in range(batch):
        for i in range(n):
            path = [i]
            while parents[b][path[-1]] >= 0:
                path.append(parents[b][path[-1]])
            for h in range(heads):
                state = initial_state[b, h].double().T
                for t in reversed(path):
                    k, v = key[b, t, h].double(), value[b, t, h].double()
                    alpha, write = math.exp(float(gate[b, t, h])), float(beta[b, t, h])
                    kept = alpha * (identity - write * torch.outer(k, k))
                    state = state @ kept + write * torch.outer(v, k)
                states[b, i, h] = state.T
                output[b, i, h] = scale * (state @ query[b, i, h].double())
    return output, states


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    is_causal: bool,
    scale: float,
    sliding_window: int = 0,
    logit_cap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Every head of every query against what it sees, and the logarithm of the sum."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    lse = torch.full(query.shape[:3], -math.inf, dtype=torch.float64)
    batch, n, heads, _ = query.shape
    group = heads // k_cache.shape[2]
    for b in range(batch):
        row, length = page_table[b].tolist(), int(kv_lens[b])
        for i in range(n):
            own = length - n + i
            seen = list(range(length))
            if is_causal:
                seen = [p for p in seen if p <= own < p + (sliding_window or math.inf)]
            for h in range(heads) if seen else ():
                keys, values = (
                    [entry(cache, row, p)[h // group] for p in seen]
                    for cache in (k_cache, v_cache)
                )
                scores = [scale * float(query[b, i, h].double() @ key) for key in keys]
                if logit_cap:
                    scores = [logit_cap * math.tanh(score / logit_cap) for score in scores]
                out[b, i, h] = softmax_sum(scores, values)
                lse[b, i, h] = math.log(sum(math.exp(score) for score in scores))
    return out, lse
