"""Attention of whole sequences in plain torch, which autograd goes through."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchvm.backends.chain import ChainBackend
from torchvm.backends.layers import GroupedQuery, LayerInputs, LayerKind, of_kind

if TYPE_CHECKING:
    from torch import Tensor

    from torchvm.backends.base import VerifyBatch

__all__ = ["DIFFERENTIABLE", "DifferentiableBackend"]


class DifferentiableBackend(ChainBackend):
    """Chains with nothing before them, for training: the ops have no gradients."""

    @property
    def name(self) -> str:
        """No command line offers it."""
        return "differentiable"

    @property
    def layer_kinds(self) -> frozenset[LayerKind]:
        """Those with a key-value cache."""
        return frozenset({LayerKind.grouped_query})

    def forward_verify(self, layer: LayerInputs, metadata: VerifyBatch) -> Tensor:
        """Attend from each token to itself and those before it."""
        grouped = of_kind(layer, GroupedQuery, self.name)
        query, slots = grouped.query, metadata.page_table[:, 0].long()
        n, num_kv_heads = query.shape[1], grouped.k_cache.shape[2]
        keys, values = (side[slots, :n] for side in (grouped.k_cache, grouped.v_cache))
        per_kv_head = query.unflatten(2, (num_kv_heads, -1))
        scores = torch.einsum("bihgd,bjhd->bhgij", per_kv_head, keys) * grouped.scale
        if grouped.logit_cap:
            scores = grouped.logit_cap * torch.tanh(scores / grouped.logit_cap)
        steps = torch.arange(n, device=query.device)
        back = steps.unsqueeze(1) - steps
        hidden = back < 0
        if grouped.sliding_window:
            hidden = hidden | (back >= grouped.sliding_window)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("bhgij,bjhd->bihgd", weights, values).flatten(2, 3)


DIFFERENTIABLE = DifferentiableBackend()
