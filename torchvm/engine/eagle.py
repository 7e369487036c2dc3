"""A draft head made of the target's own parts: EAGLE, or multi-token prediction."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torchvm.backends.base import VerifyBatch
from torchvm.backends.differentiable import DIFFERENTIABLE
from torchvm.engine.layer_views import layers_of, with_layers
from torchvm.ops.layout import TreeMaskMode

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor
    from transformers import PreTrainedModel

    from torchvm.backends.base import AttentionBackend
    from torchvm.engine.small_model import SmallModel
    from torchvm.engine.target import TargetCache

__all__ = ["EagleHead"]


class EagleHead(nn.Module):
    """One layer of the target's kind over its state and the next token's embedding, fused.

    A level is fuse (2 * hidden -> hidden), a decoder layer, and the target's final norm; logits
    come from the target's head. Embedding, norm and head are shared with the target: they are no
    parameters of this module, and its `state_dict` has none of them. For use see `DraftHead`.

    Train it through `outputs`, on the target's states (`torchvm.engine.states_of`), with the
    target frozen.

    Args:
        model: a Llama-like causal LM of transformers in eval mode, or a `SmallModel`.
        num_levels: 1 continues on its own outputs; more are a layer for each depth.
        seed: the matrices are random and follow from it; scales of norms are the target's.

    Raises:
        TypeError: for a model of another kind.
        ValueError: for less than one level, or a model that trains.
    """

    def __init__(
        self, model: PreTrainedModel | SmallModel, *, num_levels: int = 1, seed: int = 0
    ) -> None:
        super().__init__()
        if num_levels < 1:
            raise ValueError(f"num_levels must be >= 1, got {num_levels}")
        first = layers_of(model)[0]
        self.layers = nn.ModuleList(_copy(first) for _ in range(num_levels))
        # Not among the submodules: most of a view is the target's.
        self._views = tuple(with_layers(model, nn.ModuleList([layer])) for layer in self.layers)
        view = self._views[0]
        self.vocab_size = view.vocab_size
        self.hidden_size = view.hidden_size
        self.max_position_embeddings = view.max_position_embeddings
        self.num_levels = num_levels
        self.layer_kinds = view.layer_kinds
        self.device = view.device
        self.dtype: torch.dtype = next(first.parameters()).dtype
        self.fuse = nn.ModuleList(
            nn.Linear(
                2 * self.hidden_size, self.hidden_size, bias=False, dtype=self.dtype,
                device=self.device,
            )
            for _ in range(num_levels)
        )  # fmt: skip
        _draw(self, seed)
        self.eval()

    def attending(self) -> AbstractContextManager[None]:
        """Let the layers attend through back ends inside the block."""
        return self._views[0].attending()

    def allocate(
        self, level: int, batch_size: int, max_context_len: int, num_tokens: int
    ) -> TargetCache:
        """Make the cache of a level; see `DraftHead`."""
        return self._views[level - 1].allocate(batch_size, max_context_len, num_tokens)

    def forward(
        self,
        level: int,
        cache: Any,
        hidden: Tensor,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        seq_lens: Tensor,
        backend: AttentionBackend,
        metadata: Any,
    ) -> Tensor:
        """Run a level; see `DraftHead`."""
        view = self._views[level - 1]
        fused = self.fuse[level - 1](torch.cat([view.embed(tokens), hidden], -1))
        return view.run_layers(cache, fused, positions, slots, seq_lens, backend, metadata)

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Apply the target's head."""
        return self._views[0].logits_of(hidden)

    def outputs(self, hidden: Tensor, tokens: Tensor) -> list[Tensor]:
        """Run every level over whole sequences; autograd goes through it.

        Args:
            hidden: (B, T, hidden_size), the target's states of the tokens.
            tokens: (B, T) int64.

        Returns:
            Per level d its outputs (B, T - d, hidden_size). Output i, by `logits_of`, predicts
            token i + d + 1; the last one predicts what follows the sequence.

        Raises:
            ValueError: for shapes that are not these, or no token for the last level.
        """
        if hidden.shape != (*tokens.shape, self.hidden_size):
            raise ValueError(
                f"hidden must be {[*tokens.shape, self.hidden_size]} for these tokens, "
                f"got {list(hidden.shape)}"
            )
        if tokens.shape[1] <= self.num_levels:
            raise ValueError(
                f"tokens must be more than {self.num_levels} a row, got {tokens.shape[1]}"
            )
        found: list[Tensor] = []
        with self.attending():
            for level in range(1, self.num_levels + 1):
                hidden = self._whole(level, hidden[:, :-1], tokens[:, level:])
                found.append(hidden)
        return found

    def _whole(self, level: int, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Run a level with nothing before, in a cache that is part of the graph."""
        batch_size, length = tokens.shape
        cache = self.allocate(level, batch_size, length, 0)
        slots = torch.arange(batch_size, device=tokens.device)
        starts = torch.zeros_like(slots)
        positions = torch.arange(length, device=tokens.device).repeat(batch_size, 1)
        batch = VerifyBatch(
            slots.int().unsqueeze(1), cache.page_size, starts, positions, None,
            int(TreeMaskMode.QLEN_ONLY),
        )  # fmt: skip
        metadata = DIFFERENTIABLE.init_forward_metadata(batch)
        return self.forward(
            level, cache, hidden, tokens, positions, slots, starts, DIFFERENTIABLE, metadata
        )


def _copy(layer: nn.Module) -> nn.Module:
    """Copy a layer but for its config, in which a model says how its layers attend."""
    configs = [module.config for module in layer.modules() if hasattr(module, "config")]
    return copy.deepcopy(layer, {id(config): config for config in configs})


def _draw(head: nn.Module, seed: int) -> None:
    """Fill the matrices, each with a standard deviation of one by the root of its inputs."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in head.parameters():
            if weight.dim() > 1:
                drawn = torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5
                weight.copy_(drawn)
            weight.requires_grad_()
