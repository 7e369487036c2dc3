"""The key-value cache of a batch: one contiguous buffer per layer and side."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import PretrainedConfig

__all__ = ["KVCache"]


class KVCache(NamedTuple):
    """Buffers of (B, capacity, num_kv_heads, head_dim), one per layer.

    Positions 0 .. L-1 of a request hold its committed tokens, positions L .. L+n-1 the nodes of
    the tree that is being verified, and what lies behind is never read.
    """

    keys: list[Tensor]
    values: list[Tensor]

    @classmethod
    def allocate(
        cls, config: PretrainedConfig, batch_size: int, capacity: int, dtype: torch.dtype
    ) -> KVCache:
        """Allocate zeroed buffers for the layers and heads of a model's config."""
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        shape = (batch_size, capacity, kv_heads, head_dim)
        layers = range(config.num_hidden_layers)
        return cls(
            [torch.zeros(shape, dtype=dtype) for _ in layers],
            [torch.zeros(shape, dtype=dtype) for _ in layers],
        )

    def compact(self, seq_lens: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Move the accepted nodes of each request right behind its committed tokens.

        Args:
            seq_lens: L of each request when its tree was verified.
            paths: per request the accepted nodes below the root, ascending; the root already
                stands at L.
        """
        rows, sources, targets = [], [], []
        for b, (length, path) in enumerate(zip(seq_lens, paths, strict=True)):
            for target, source in enumerate(path, start=1):
                if source != target:
                    rows.append(b)
                    sources.append(length + source)
                    targets.append(length + target)
        if not rows:
            return
        row, source, target = torch.tensor([rows, sources, targets])
        for side in (*self.keys, *self.values):
            # The right-hand side is a copy, so nodes may move onto each other's places.
            side[row, target] = side[row, source]
