"""From logits to the probabilities that tokens are sampled from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SamplingParams", "sampling_probs"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen where they are not the most probable.

    Raises:
        ValueError: when a value is out of its range.
    """

    temperature: float = 1.0
    """> 0; without a `SamplingParams` decoding is greedy."""
    top_p: float = 1.0
    """In (0, 1]."""
    top_k: int = 0
    """>= 0; 0 keeps all."""
    threshold_single: float = 1.0
    """In (0, 1]; below 1 also a draft of this probability is accepted, which is lossy."""
    threshold_acc: float = 1.0
    """In (0, 1]; below 1 drafts are accepted more often than they are probable: lossy too."""
    seed: int = 0
    """In [0, 2^64)."""

    def __post_init__(self) -> None:
        """Check every value."""
        if not self.temperature > 0:
            raise ValueError(f"temperature must be > 0 to sample, got {self.temperature}")
        for name in ("top_p", "threshold_single", "threshold_acc"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {getattr(self, name)}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be >= 0, got {self.top_k}")
        if not 0 <= self.seed < 1 << 64:
            raise ValueError(f"seed must be in [0, 2^64), got {self.seed}")


def sampling_probs(
    logits: Tensor, *, temperature: float, top_p: float = 1.0, top_k: int = 0
) -> Tensor:
    """Turn logits into the distribution that `verify_tree_sampling` accepts drafts by.

    The temperature comes first, then `top_k`, then `top_p` on what that leaves, renormalised.
    Tokens are ranked by probability, the smaller token first of two equals: `top_k` keeps exactly
    so many, and `top_p` the fewest whose probabilities add up to it, one at least.

    Args:
        logits: (..., V) floating point, V >= 1, with a finite largest one in each row.
        temperature: >= 0; 0 gives all probability to the largest logit, the first of equals.
        top_p: in (0, 1]; 1 keeps all.
        top_k: >= 0; 0 keeps all.

    Returns:
        (..., V) float32, each row adding up to 1.

    Raises:
        TypeError: when `logits` is not floating point.
        ValueError: when another argument is out of its range.

    Example:
        >>> import torch, torchvm
        >>> logits = torch.tensor([2.0, 1.0, 0.0, -1.0]).log_softmax(-1)
        >>> torchvm.sampling_probs(logits, temperature=1.0, top_k=2)
        tensor([0.7311, 0.2689, 0.0000, 0.0000])
        >>> torchvm.sampling_probs(logits, temperature=0.0)
        tensor([1., 0., 0., 0.])
    """
    _check(logits, temperature, top_p, top_k)
    logits = logits.float()
    if temperature == 0:
        best = logits.argmax(-1, keepdim=True)
        return torch.zeros_like(logits).scatter(-1, best, 1.0)
    # Logits of 0 and less overflow at no temperature.
    probs = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
    keeps_all = top_k == 0 or top_k >= logits.shape[-1]
    if keeps_all and top_p == 1:
        return probs
    ranked, tokens = probs.sort(dim=-1, descending=True, stable=True)
    if not keeps_all:
        ranked, tokens = ranked[..., :top_k], tokens[..., :top_k]
    if top_p < 1:
        share = ranked.double() / ranked.double().sum(-1, keepdim=True)
        ranked = ranked.where(share.cumsum(-1) - share < top_p, 0.0)
    kept = ranked / ranked.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter(-1, tokens, kept)


def _check(logits: Tensor, temperature: float, top_p: float, top_k: int) -> None:
    if not logits.is_floating_point():
        raise TypeError(f"logits must be floating point, got {logits.dtype}")
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits must be of at least 1 token, got {list(logits.shape)}")
    if not temperature >= 0:
        raise ValueError(f"temperature must be >= 0, got {temperature}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}")
    if top_k < 0:
        raise ValueError(f"top_k must be >= 0, got {top_k}")
