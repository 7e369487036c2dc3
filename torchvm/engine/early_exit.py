"""Drafts of the verifying model's own first layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from torchvm.engine.draft_models import ModelDrafter
from torchvm.engine.layer_views import layers_of, with_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from torchvm.engine.small_model import SmallModel
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
        num_draft_tokens: n, root included; by default 8, or as many as are scored if fewer.
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
        num_draft_tokens: int | None = None,
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
    layers = layers_of(model)
    if not 1 <= num_layers <= len(layers):
        raise ValueError(f"num_layers must be 1 to the model's {len(layers)}, got {num_layers}")
    return with_layers(model, nn.ModuleList(list(layers)[:num_layers]))
