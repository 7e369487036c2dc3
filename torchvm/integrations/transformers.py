"""Run a stock transformers causal LM on torchvm's attention, cache and verify mask.

Importing this module registers the attention function `torchvm` with transformers.
"""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import AttentionInterface

from torchvm.backends.layers import GroupedQuery

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from transformers import PreTrainedModel

    from torchvm.backends.base import AttentionBackend

__all__ = ["ATTENTION", "StepCache", "VerifyInputs", "cache_keyword", "tree_attention_of"]

ATTENTION = "torchvm"


class VerifyInputs(NamedTuple):
    """What the attention of every layer is told: the keyword `verify` of the model's forward."""

    backend: AttentionBackend
    metadata: Any
    """What the back end made of the batch: `backend.init_forward_metadata(VerifyBatch(...))`."""


class StepCache:
    """The cache object that one forward of a transformers model sees.

    It writes each request's n new keys and values behind its committed ones and gives attention
    the whole buffers, which a back end's op indexes itself.

    Args:
        keys: one (slots, capacity, num_kv_heads, head_dim) buffer per layer, written in place.
        values: like `keys`.
        slots: (B,) int64, where each request lies in the buffers.
        seq_lens: (B,) int64, where each request's new tokens begin.
        num_tokens: n.
    """

    is_compileable = False
    is_sliding = (False,)

    def __init__(
        self,
        keys: list[Tensor],
        values: list[Tensor],
        slots: Tensor,
        seq_lens: Tensor,
        num_tokens: int,
    ) -> None:
        self._keys, self._values = keys, values
        self._rows = slots.unsqueeze(1)
        self._columns = seq_lens.unsqueeze(1) + torch.arange(num_tokens, device=seq_lens.device)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store (B, num_kv_heads, n, head_dim) states; return the layer's buffers."""
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys[self._rows, self._columns] = key_states.transpose(1, 2).to(keys.dtype)
        values[self._rows, self._columns] = value_states.transpose(1, 2).to(values.dtype)
        return keys, values

    def get_seq_length(self, _layer_idx: int = 0) -> int:
        """Return 0: requests differ in length, so positions are always passed to the model."""
        return 0

    def get_query_offset(self, _layer_idx: int = 0) -> int:
        """Return 0, for the same reason."""
        return 0

    def get_mask_sizes(self, query_length: int, _layer_idx: int = 0) -> tuple[int, int]:
        """Return (kv_length, kv_offset) of a mask that no layer looks at."""
        return query_length, 0


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    verify: VerifyInputs | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention in transformers' convention: query (B, num_q_heads, n, head_dim)."""
    if verify is None:
        raise ValueError(
            f"attention {ATTENTION!r} needs verify=VerifyInputs(...) in the model's forward, "
            f"got None in {type(module).__name__}: use torchvm.engine.generate"
        )
    layer = GroupedQuery(
        query.transpose(1, 2), key, value, scaling, sliding_window or 0, softcap or 0.0
    )
    out = verify.backend.forward_verify(layer, verify.metadata)
    return out, None


AttentionInterface.register(ATTENTION, _attention)


@contextmanager
def tree_attention_of(model: PreTrainedModel) -> Iterator[None]:
    """Let a model attend through torchvm inside the block; its own attention comes back after.

    Raises:
        ValueError: when the model's class cannot change its attention.
    """
    before = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION)
    try:
        if model.config._attn_implementation != ATTENTION:
            raise ValueError(
                "model must be of a class that takes its attention from AttentionInterface, "
                f"got {type(model).__name__}"
            )
        yield
    finally:
        model.set_attn_implementation(before)


def cache_keyword(model: PreTrainedModel) -> str:
    """Name of the forward's cache argument, which transformers renamed in its fifth series."""
    known = inspect.signature(model.forward).parameters
    return "cache" if "cache" in known else "past_key_values"
