"""A causal language model of transformers as the engine's target."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

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

__all__ = ["TransformersTarget", "as_target", "module_view"]


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
        self.hidden_size: int = model.config.hidden_size
        self.num_layers: int = model.config.num_hidden_layers
        self.max_position_embeddings: int = model.config.max_position_embeddings
        self.device: torch.device = model.device
        self._cache_name = cache_keyword(model)
        # A causal LM may scale or cap what its head gives, so the whole of it runs.
        self._head = module_view(model, **{model.base_model_prefix: _Done()})

    def attending(self) -> AbstractContextManager[None]:
        """Let the model attend through back ends inside the block."""
        return tree_attention_of(self.model)

    def allocate(self, batch_size: int, max_context_len: int, num_tokens: int) -> KVCache:
        """Make a cache; any number of tokens is fine."""
        capacity = max_context_len + num_tokens
        return KVCache.allocate(
            self.model.config,
            batch_size,
            capacity,
            self.model.dtype,
            self.device,
            num_layers=self.num_layers,
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
        model = self.model if logits else self.model.base_model
        verify = VerifyInputs(backend, metadata)
        out = self._run(model, cache, positions, slots, seq_lens, verify, input_ids=tokens)
        found: Tensor | None = out.logits if logits else None
        return found

    def hidden_states(
        self,
        cache: KVCache,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        seq_lens: Tensor,
        backend: AttentionBackend,
        metadata: Any,
    ) -> Tensor:
        """Run the base model; see `torchvm.engine.target.HiddenTarget`."""
        embedded = self.embed(tokens)
        return self.run_layers(cache, embedded, positions, slots, seq_lens, backend, metadata)

    def embed(self, tokens: Tensor) -> Tensor:
        """Look tokens up: (..., hidden_size)."""
        embedded: Tensor = self.model.get_input_embeddings()(tokens)
        return embedded

    def run_layers(
        self,
        cache: KVCache,
        embedded: Tensor,
        positions: Tensor,
        slots: Tensor,
        seq_lens: Tensor,
        backend: AttentionBackend,
        metadata: Any,
    ) -> Tensor:
        """Run the base model over (B, n, hidden_size) that stand for tokens."""
        verify = VerifyInputs(backend, metadata)
        base = self.model.base_model
        out = self._run(base, cache, positions, slots, seq_lens, verify, inputs_embeds=embedded)
        hidden: Tensor = out.last_hidden_state
        return hidden

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Run what follows the base model."""
        logits: Tensor = self._head(inputs_embeds=hidden, use_cache=False).logits
        return logits

    def _run(
        self,
        model: Any,
        cache: KVCache,
        positions: Tensor,
        slots: Tensor,
        seq_lens: Tensor,
        verify: VerifyInputs,
        **inputs: Tensor,
    ) -> Any:
        step_cache = StepCache(cache.keys, cache.values, slots, seq_lens, positions.shape[1])
        return model(
            position_ids=positions,
            use_cache=True,
            verify=verify,
            **{self._cache_name: step_cache},
            **inputs,
        )


class _Done(nn.Module):
    """Takes the place of a base model whose states are known."""

    def forward(self, inputs_embeds: Tensor, **_: Any) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=inputs_embeds)


def as_target(model: PreTrainedModel | TargetModel) -> TargetModel:
    """Wrap a model of transformers; any other is a target already.

    Raises:
        ValueError: when it trains.
    """
    if isinstance(model, PreTrainedModel):
        return TransformersTarget(model)
    return model


def module_view(module: nn.Module, **submodules: nn.Module) -> Any:
    """Make a module that differs in some submodules alone, and shares the others."""
    view: Any = copy.copy(module)
    view._modules = {**module._modules, **submodules}
    return view
