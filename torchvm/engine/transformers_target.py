"""A causal language model of transformers as the engine's target."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from torchvm.backends.layers import LayerKind
from torchvm.engine.cache import KVCache
from torchvm.integrations.transformers import (
    StepCache,
    VerifyInputs,
    cache_keyword,
    tree_attention_of,
)

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch
    from torch import Tensor

    from torchvm.backends.base import AttentionBackend
    from torchvm.engine.target import TargetModel

__all__ = ["TransformersTarget", "as_target"]


class TransformersTarget:
    """A causal LM of transformers as the engine's target.

    Args:
        model: Llama-like, in eval mode.

    Raises:
        ValueError: when it trains.
    """

    layer_kinds = frozenset({LayerKind.grouped_query})

    def __init__(self, model: PreTrainedModel) -> None:
        if model.training:
            raise ValueError("model must be in eval mode, got one that trains: call model.eval()")
        self.model = model
        self.vocab_size: int = model.config.vocab_size
        self.max_position_embeddings: int = model.config.max_position_embeddings
        self.device: torch.device = model.device
        self._cache_name = cache_keyword(model)

    def attending(self) -> AbstractContextManager[None]:
        """Let the model attend through back ends inside the block."""
        return tree_attention_of(self.model)

    def allocate(self, batch_size: int, max_context_len: int, num_tokens: int) -> KVCache:
        """Make a cache; any number of tokens is fine."""
        capacity = max_context_len + num_tokens
        return KVCache.allocate(
            self.model.config, batch_size, capacity, self.model.dtype, self.device
        )

    def forward(
        self,
        cache: KVCache,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        seq_lens: Tensor,
        backend: AttentionBackend,
        metadata: Any,
        *,
        logits: bool = True,
    ) -> Tensor | None:
        """Run the model, or its layers alone; see `torchvm.engine.target.TargetModel`."""
        step_cache = StepCache(cache.keys, cache.values, slots, seq_lens, tokens.shape[1])
        model: Any = self.model if logits else self.model.base_model
        out = model(
            input_ids=tokens,
            position_ids=positions,
            use_cache=True,
            verify=VerifyInputs(backend, metadata),
            **{self._cache_name: step_cache},
        )
        found: Tensor | None = out.logits if logits else None
        return found


def as_target(model: PreTrainedModel | TargetModel) -> TargetModel:
    """Wrap a model of transformers; any other is a target already.

    Raises:
        ValueError: when it trains.
    """
    if isinstance(model, PreTrainedModel):
        return TransformersTarget(model)
    return model
