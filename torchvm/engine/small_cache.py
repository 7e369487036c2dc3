"""What the layers of a small model remember: entries per position, or a state."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from torchvm.backends.layers import LayerKind
from torchvm.engine.cache import move_nodes
from torchvm.engine.target import PROMPT_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["SmallCache"]


class SmallCache(NamedTuple):
    """Named buffers of each layer.

    Layers with a cache have buffers of (B, capacity, ...). A recurrent layer has a `state`
    (B, ...) by slot, and `node_states` (B, tokens, ...), the state after each token of the last
    forward, by its order of requests.
    """

    layers: list[dict[str, Tensor]]
    page_size: int

    @classmethod
    def allocate(
        cls,
        kinds: Sequence[LayerKind],
        shapes: Sequence[dict[str, tuple[int, ...]]],
        batch_size: int,
        max_context_len: int,
        num_tokens: int,
    ) -> SmallCache:
        """Allocate zeroed buffers.

        Args:
            kinds: of the layers.
            shapes: names and trailing shapes of each layer's buffers.
            batch_size: B.
            max_context_len: most committed tokens.
            num_tokens: most tokens of a forward, prompts aside.
        """
        capacity = max_context_len + num_tokens
        layers = []
        for kind, named in zip(kinds, shapes, strict=True):
            if kind is LayerKind.recurrent:
                shape, tokens = named["state"], max(num_tokens, PROMPT_TOKENS)
                layers.append(
                    {
                        "state": torch.zeros(batch_size, *shape),
                        "node_states": torch.zeros(batch_size, tokens, *shape),
                    }
                )
            else:
                layers.append(
                    {name: torch.zeros(batch_size, capacity, *s) for name, s in named.items()}
                )
        return cls(layers, capacity)

    def reset(self) -> None:
        """Begin every state anew; entries behind committed tokens are never read."""
        for buffers in self.layers:
            if "state" in buffers:
                buffers["state"].zero_()

    def compact(
        self,
        slots: Sequence[int],
        seq_lens: Sequence[int],
        paths: Sequence[Sequence[int] | None],
    ) -> None:
        """Move accepted entries behind the committed ones, and take over the last one's state."""
        rows = [b for b, path in enumerate(paths) if path is not None]
        kept = [slots[b] for b in rows]
        last = [path[-1] if path else 0 for path in paths if path is not None]
        for buffers in self.layers:
            if "state" in buffers:
                buffers["state"][kept] = buffers["node_states"][rows, last]
            else:
                move_nodes(buffers.values(), slots, seq_lens, paths)
