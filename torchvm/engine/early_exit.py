"""Drafts of the verifying model's own first layers."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import msgspec
from torch import nn
from transformers import PreTrainedModel

from torchvm.engine.cache import KVCache
from torchvm.engine.draft_models import ModelDrafter
from torchvm.engine.small_model import SmallModel
from torchvm.engine.transformers_target import TransformersTarget
from torchvm.integrations.transformers import tree_attention_of

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torchvm.engine.target import TargetModel

__all__ = ["EarlyExitDrafter", "first_layers"]


class EarlyExitDrafter(ModelDrafter):
    """Draft what the first layers of a model say, followed by its final norm and its head.

    Args:
        model: the one that verifies, a Llama-like causal LM of transformers or a `SmallModel`;
            its weights are shared, not copied.
        num_layers: layers that draft, at most the model's.
        topk: see `ModelDrafter`, like all that follow.
        depth: levels below the root.
        num_draft_tokens: n, root included.
        batch_size: B.
        max_context_len: most tokens of a request.

    Raises:
        TypeError: for a model of another kind.
        ValueError: for a number of layers that the model does not have, and as `ModelDrafter`.
    """

    def __init__(
        self,
        model: PreTrainedModel | SmallModel,
        num_layers: int,
        *,
        topk: int = 2,
        depth: int = 4,
        num_draft_tokens: int = 8,
        batch_size: int,
        max_context_len: int,
    ) -> None:
        super().__init__(
            first_layers(model, num_layers),
            topk=topk,
            depth=depth,
            num_draft_tokens=num_draft_tokens,
            batch_size=batch_size,
            max_context_len=max_context_len,
        )


def first_layers(model: PreTrainedModel | SmallModel, num_layers: int) -> TargetModel:
    """Make a view of a model that ends after some layers, over the same modules.

    Args:
        model: is left as it is.
        num_layers: how many layers the view has.

    Raises:
        TypeError: for a model whose layers are not where these have them.
        ValueError: for a number of layers that the model does not have.
    """
    if isinstance(model, SmallModel):
        layers = _first(model.layers, num_layers)
        view = _view(model, layers=layers)
        kinds = model.config.kinds[:num_layers]
        view.config = msgspec.structs.replace(model.config, kinds=kinds)
        view.layer_kinds = frozenset(kinds)
        target: TargetModel = view
        return target
    if isinstance(model, PreTrainedModel):
        return _EarlyExit(model, num_layers)
    raise TypeError(f"model must be a PreTrainedModel or a SmallModel, got {type(model).__name__}")


class _EarlyExit(TransformersTarget):
    """The first layers of a causal LM of transformers as a target."""

    def __init__(self, model: PreTrainedModel, num_layers: int) -> None:
        super().__init__(model)
        base: Any = model.base_model
        layers = getattr(base, "layers", None)
        if base is model or not isinstance(layers, nn.ModuleList):
            raise TypeError(
                "model must be Llama-like, a head over a base model with a list `layers`, "
                f"got {type(model).__name__}"
            )
        self._whole = model
        self._num_layers = num_layers
        shorter = _view(base, layers=_first(layers, num_layers))
        self.model = _view(model, **{model.base_model_prefix: shorter})

    def attending(self) -> AbstractContextManager[None]:
        """Let the layers attend through back ends; they look at the whole model's config."""
        return tree_attention_of(self._whole)

    def allocate(self, batch_size: int, max_context_len: int, num_tokens: int) -> KVCache:
        """Make a cache of as many layers."""
        whole = super().allocate(batch_size, max_context_len, num_tokens)
        return KVCache(whole.keys[: self._num_layers], whole.values[: self._num_layers])


def _first(layers: nn.ModuleList, count: int) -> nn.ModuleList:
    if not 1 <= count <= len(layers):
        raise ValueError(f"num_layers must be 1 to the model's {len(layers)}, got {count}")
    return nn.ModuleList(list(layers)[:count])


def _view(module: nn.Module, **submodules: nn.Module) -> Any:
    """Make a module that differs in some submodules alone, and shares the others."""
    view: Any = copy.copy(module)
    view._modules = {**module._modules, **submodules}
    return view
