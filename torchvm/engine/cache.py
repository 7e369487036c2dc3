"""The key-value cache of a batch: one contiguous buffer per layer and side."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor
    from transformers import PretrainedConfig

__all__ = ["KVCache", "move_nodes"]


class KVCache(NamedTuple):
    """Buffers of (B, capacity, num_kv_heads, head_dim), one per layer.

    Positions 0 .. L-1 of a request hold its committed tokens, positions L .. L+n-1 the nodes of
    the tree that is being verified, and what lies behind is never read.
    """

    keys: list[Tensor]
    values: list[Tensor]

    @property
    def page_size(self) -> int:
        """Positions of a request."""
        return self.keys[0].shape[1]

    @classmethod
    def allocate(
        cls,
        config: PretrainedConfig,
        batch_size: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        num_layers: int,
    ) -> KVCache:
        """Allocate zeroed buffers of so many layers, for the heads of a model's config."""
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        shape = (batch_size, capacity, kv_heads, head_dim)
        layers = range(num_layers)
        return cls(
            [torch.zeros(shape, dtype=dtype, device=device) for _ in layers],
            [torch.zeros(shape, dtype=dtype, device=device) for _ in layers],
        )

    def reset(self) -> None:
        """Do nothing: what lies behind a request's committed tokens is never read."""

    def compact(
        self,
        slots: Sequence[int],
        seq_lens: Sequence[int],
        paths: Sequence[Sequence[int] | None],
    ) -> None:
        """Move the accepted nodes of each request right behind its committed tokens.

        Args:
            slots: where each request lies.
            seq_lens: L of each request when its tree was verified.
            paths: per request the accepted nodes below the root, ascending, or None; the root
                already stands at L.
        """
        move_nodes((*self.keys, *self.values), slots, seq_lens, paths)


def move_nodes(
    buffers: Iterable[Tensor],
    slots: Sequence[int],
    seq_lens: Sequence[int],
    paths: Sequence[Sequence[int] | None],
) -> None:
    """Move nodes of each request from L + node to L + 1, L + 2, ...

    Args:
        buffers: (slots, capacity, ...), each written.
        slots: where each request lies.
        seq_lens: L of each request.
        paths: per request the nodes below the root to be kept, ascending, or None.
    """
    rows, sources, targets = [], [], []
    for slot, length, path in zip(slots, seq_lens, paths, strict=True):
        for target, source in enumerate(path or (), start=1):
            if source != target:
                rows.append(slot)
                sources.append(length + source)
                targets.append(length + target)
    if not rows:
        return
    row, source, target = torch.tensor([rows, sources, targets])
    for buffer in buffers:
        # The right-hand side is a copy, so nodes may move onto each other's places.
        buffer[row, target] = buffer[row, source]
