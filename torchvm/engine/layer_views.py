"""Views of a model with other layers: its first ones, or a head's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from torch import nn
from transformers import PreTrainedModel

from torchvm.engine.small_model import SmallModel
from torchvm.engine.transformers_target import TransformersTarget, module_view
from torchvm.integrations.transformers import tree_attention_of

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = ["layers_of", "with_layers"]


def layers_of(model: PreTrainedModel | SmallModel) -> nn.ModuleList:
    """Return the layers of a model.

    Raises:
        TypeError: for a model whose layers are not where these have them.
    """
    if isinstance(model, SmallModel):
        layers: nn.ModuleList = model.layers
        return layers
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model must be a PreTrainedModel or a SmallModel, got {type(model).__name__}"
        )
    found = getattr(model.base_model, "layers", None)
    if model.base_model is model or not isinstance(found, nn.ModuleList):
        raise TypeError(
            "model must be Llama-like, a head over a base model with a list `layers`, "
            f"got {type(model).__name__}"
        )
    return found


def with_layers(
    model: PreTrainedModel | SmallModel, layers: nn.ModuleList
) -> TransformersTarget | SmallModel:
    """Make a view of a model that has other layers, and shares all else with it.

    Args:
        model: is left as it is.
        layers: of the kinds of the model's first ones, in their order.

    Raises:
        TypeError: for a model whose layers are not where these have them.
    """
    layers_of(model)
    if not isinstance(model, SmallModel):
        return _LayersTarget(model, layers)
    view: SmallModel = module_view(model, layers=layers)
    kinds = model.config.kinds[: len(layers)]
    view.config = msgspec.structs.replace(model.config, kinds=kinds)
    view.layer_kinds = frozenset(kinds)
    return view


class _LayersTarget(TransformersTarget):
    """A causal LM of transformers with other layers."""

    def __init__(self, model: PreTrainedModel, layers: nn.ModuleList) -> None:
        super().__init__(model)
        self._whole = model
        self.num_layers = len(layers)
        base: Any = module_view(model.base_model, layers=layers)
        self.model = module_view(model, **{model.base_model_prefix: base})

    def attending(self) -> AbstractContextManager[None]:
        """Let the layers attend through back ends; they look at the whole model's config."""
        return tree_attention_of(self._whole)
