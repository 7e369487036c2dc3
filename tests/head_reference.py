"""Small models and their draft heads without caches or ops, in float64: what a head predicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor


def norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()


def rotate(heads: Tensor) -> Tensor:
    """(T, heads, dim) at positions 0, 1, ...: pairs as complex numbers."""
    half = heads.shape[-1] // 2
    angles = torch.arange(len(heads)).double()[:, None] / 10000.0 ** (torch.arange(half) / half)
    turned = torch.complex(heads[..., :half], heads[..., half:]) * torch.exp(1j * angles)[:, None]
    return torch.cat([turned.real, turned.imag], -1)


def layer_of(weights: dict[str, Tensor], x: Tensor, head_dim: int) -> Tensor:
    """One layer over the whole of (T, hidden)."""
    normed = norm(x)
    query, key, value = (
        (normed @ weights[f"attention.{name}.weight"].T).unflatten(-1, (-1, head_dim))
        for name in ("query", "key", "value")
    )
    query, key = rotate(query), rotate(key)
    heads = []
    for head in range(query.shape[1]):
        side = head // (query.shape[1] // key.shape[1])
        scores = query[:, head] @ key[:, side].T * head_dim**-0.5
        later = torch.ones_like(scores).triu(1).bool()
        heads.append(scores.masked_fill(later, -torch.inf).softmax(1) @ value[:, side])
    x = x + torch.cat(heads, 1) @ weights["attention.out.weight"].T
    inner = norm(x) @ weights["up.weight"].T
    return x + (inner * inner.sigmoid()) @ weights["down.weight"].T


class Reference:
    """A small model and a head of it."""

    def __init__(self, model: Any, head: Any) -> None:
        self.head_dim = model.config.head_dim
        self.embedding = model.embedding.weight.detach().double()
        self.lm_head = model.head.weight.detach().double()
        self.layers = [_weights(layer) for layer in model.layers]
        self.fuses = [fuse.weight.detach().double() for fuse in head.fuse]
        self.levels = [_weights(layer) for layer in head.layers]

    def states(self, tokens: list[int]) -> Tensor:
        """The target's, (T, hidden)."""
        x = self.embedding[tokens]
        for weights in self.layers:
            x = layer_of(weights, x, self.head_dim)
        return norm(x)

    def level(self, index: int, hidden: Tensor, tokens: list[int]) -> Tensor:
        fused = torch.cat([self.embedding[tokens], hidden], -1) @ self.fuses[index].T
        return norm(layer_of(self.levels[index], fused, self.head_dim))

    def log_probabilities(self, tokens: list[int], path: list[int]) -> list[float]:
        """Of what follows a path of drafts behind committed tokens."""
        known = len(tokens) - 1
        hidden = self.states(tokens[:-1])
        together = tokens + path
        if len(self.levels) > 1:
            for index in range(len(path) + 1):
                hidden = self.level(index, hidden, together[index + 1 : index + 1 + known])
        else:
            read = hidden
            for end in range(known, known + len(path) + 1):
                hidden = self.level(0, read, together[1 : end + 1])
                read = torch.cat([read, hidden[-1:]])
        found: list[float] = (hidden[-1] @ self.lm_head.T).log_softmax(-1).tolist()
        return found


def _weights(module: Any) -> dict[str, Tensor]:
    return {name: value.detach().double() for name, value in module.state_dict().items()}
