"""Attention of plain decoding and of prompts: chains of tokens, in every kind of layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchvm.backends.base import AttentionBackend, VerifyBatch, VerifyConfig
from torchvm.backends.calls import (
    gated_delta_tree,
    mla_attention,
    sparse_window_attention,
    tree_attention,
)
from torchvm.backends.layers import GroupedQuery, Latent, LayerInputs, LayerKind, SparseWindow

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from torchvm.ops.tree import DraftTree
    from torchvm.verify_mask import VerifyMask

__all__ = ["CHAIN", "ChainBackend"]

_SIZES = VerifyConfig(num_draft_tokens=1, max_context_len=0, topk=1)


class ChainBackend(AttentionBackend):
    """Node i follows node i - 1, whatever the batch's mask and links say. It owns no mask."""

    @property
    def name(self) -> str:
        """No command line offers it."""
        return "chain"

    @property
    def config(self) -> VerifyConfig:
        """Chains; other sizes are of no consequence."""
        return _SIZES

    @property
    def verifier(self) -> AttentionBackend:
        """Itself."""
        return self

    @property
    def layer_kinds(self) -> frozenset[LayerKind]:
        """All of them."""
        return frozenset(LayerKind)

    @property
    def mask_dtype(self) -> torch.dtype:
        """Of no consequence."""
        return torch.bool

    @property
    def is_read(self) -> bool:
        """There is no mask to read."""
        return False

    @property
    def verify_mask(self) -> VerifyMask | None:
        """None: it verifies nothing."""
        return None

    @property
    def persistent_buffers(self) -> Mapping[str, Tensor]:
        """None."""
        return {}

    def init_cuda_graph_state(self, max_bs: int) -> None:
        """Allocate nothing."""

    def init_forward_metadata(self, batch: VerifyBatch) -> VerifyBatch:
        """Make the links of a chain."""
        n = batch.positions.shape[1]
        nodes = torch.arange(1, n + 1, device=batch.positions.device)
        following = torch.where(nodes < n, nodes, -1).repeat(batch.positions.shape[0], 1)
        return batch._replace(
            retrieve_next_token=following, retrieve_next_sibling=torch.full_like(following, -1)
        )

    def update_verify_buffers_to_fill_after_draft(self, tree: DraftTree) -> None:
        """Do nothing: there is no draft."""

    def forward_verify(self, layer: LayerInputs, metadata: VerifyBatch) -> Tensor:
        """Attend by the layer's own op."""
        if isinstance(layer, GroupedQuery):
            return tree_attention(layer, metadata, is_causal_chain=True)
        if isinstance(layer, Latent):
            return mla_attention(layer, metadata)
        if isinstance(layer, SparseWindow):
            return sparse_window_attention(layer, metadata)
        next_token, next_sibling = metadata.retrieve_next_token, metadata.retrieve_next_sibling
        assert next_token is not None
        assert next_sibling is not None
        return gated_delta_tree(layer, next_token, next_sibling)


CHAIN = ChainBackend()
