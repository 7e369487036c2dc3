"""What one layer gives its attention back end, by the kind of layer."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "GroupedQuery",
    "Latent",
    "LayerInputs",
    "LayerKind",
    "Recurrent",
    "SparseWindow",
    "of_kind",
    "split_layer",
]


class LayerKind(StrEnum):
    """How a layer attends."""

    grouped_query = "grouped-query"
    latent = "latent"
    sparse_window = "sparse-window"
    recurrent = "recurrent"


class GroupedQuery(NamedTuple):
    """Softmax attention with a key-value cache."""

    query: Tensor
    """(B, n, num_q_heads, head_dim)."""
    k_cache: Tensor
    """(num_pages, page_size, num_kv_heads, head_dim)."""
    v_cache: Tensor
    scale: float
    sliding_window: int = 0
    logit_cap: float = 0.0


class Latent(NamedTuple):
    """Multi-head latent attention, absorbed: one compressed key-value entry for all heads."""

    query_latent: Tensor
    """(B, n, heads, rank)."""
    query_rope: Tensor
    """(B, n, heads, rope_dim)."""
    latent_cache: Tensor
    """(num_pages, page_size, rank)."""
    rope_cache: Tensor
    """(num_pages, page_size, rope_dim)."""
    scale: float


class SparseWindow(NamedTuple):
    """A sliding window and selected compressed blocks, by position alone."""

    query: Tensor
    """(B, n, num_q_heads, head_dim)."""
    k_cache: Tensor
    """(num_pages, page_size, num_kv_heads, head_dim)."""
    v_cache: Tensor
    compressed_k: Tensor
    """(B, max_blocks, num_kv_heads, head_dim)."""
    compressed_v: Tensor
    selected: Tensor
    """(B, n, S) int32, -1 for none."""
    scale: float
    sliding_window: int


class Recurrent(NamedTuple):
    """Linear attention: a state per request in place of a cache."""

    query: Tensor
    """(B, n, heads, key_dim)."""
    key: Tensor
    value: Tensor
    """(B, n, heads, value_dim)."""
    gate: Tensor
    """(B, n, heads) float32, logarithm of the decay, at most 0."""
    beta: Tensor
    """(B, n, heads) float32, rate of the update."""
    state: Tensor
    """(B, heads, key_dim, value_dim) float32, after the committed tokens."""
    node_states: Tensor
    """(B, at least n, heads, key_dim, value_dim) float32: gets the state after each node."""
    scale: float


_CACHES = frozenset({"k_cache", "v_cache", "latent_cache", "rope_cache"})
"""Fields that belong to no request: their rows are pages."""

LayerInputs = GroupedQuery | Latent | SparseWindow | Recurrent
_Kind = TypeVar("_Kind", GroupedQuery, Latent, SparseWindow, Recurrent)


def of_kind(layer: LayerInputs, kind: type[_Kind], backend: str) -> _Kind:
    """Return the layer, which must be of this kind.

    Raises:
        TypeError: when it is of another.
    """
    if not isinstance(layer, kind):
        raise TypeError(
            f"layer must be {kind.__name__} for the back end {backend!r}, "
            f"got {type(layer).__name__}"
        )
    return layer


def split_layer(layer: LayerInputs, bs: int) -> tuple[LayerInputs, LayerInputs]:
    """Split a layer's inputs behind the first `bs` requests; caches go to both parts."""
    parts = (slice(bs), slice(bs, None))
    first, second = (layer._replace(**_rows(layer, part)) for part in parts)
    return first, second


def _rows(layer: LayerInputs, part: slice) -> dict[str, Any]:
    """The fields with a row per request, cut."""
    fields = layer._asdict().items()
    return {
        name: value[part]
        for name, value in fields
        if name not in _CACHES and isinstance(value, torch.Tensor)
    }
