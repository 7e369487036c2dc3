"""The ops that several back ends call, given a layer and what a batch says of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import torchvm.ops.attention
import torchvm.ops.linear_attention
import torchvm.ops.mla_attention
import torchvm.ops.sparse_attention  # noqa: F401 - these register the ops

if TYPE_CHECKING:
    from torch import Tensor

    from torchvm.backends.base import VerifyBatch
    from torchvm.backends.layers import GroupedQuery, Latent, Recurrent, SparseWindow

__all__ = ["gated_delta_tree", "mla_attention", "sparse_window_attention", "tree_attention"]


def tree_attention(layer: GroupedQuery, batch: VerifyBatch, *, is_causal_chain: bool) -> Tensor:
    """Attend the committed tokens and the tree, or a chain."""
    out: Tensor = torch.ops.torchvm.tree_attention(
        layer.query, layer.k_cache, layer.v_cache, batch.page_table, batch.seq_lens,
        batch.tree_mask, batch.tree_mask_mode, is_causal_chain, layer.scale,
        layer.sliding_window, layer.logit_cap,
    )  # fmt: skip
    return out


def mla_attention(layer: Latent, batch: VerifyBatch) -> Tensor:
    """Attend a chain of tokens to the compressed entries."""
    out: Tensor = torch.ops.torchvm.mla_attention(
        layer.query_latent, layer.query_rope, layer.latent_cache, layer.rope_cache,
        batch.page_table, batch.seq_lens, layer.scale,
    )  # fmt: skip
    return out


def sparse_window_attention(layer: SparseWindow, batch: VerifyBatch) -> Tensor:
    """Attend by position: a window of tokens, and the selected blocks."""
    out: Tensor = torch.ops.torchvm.sparse_window_attention(
        layer.query, layer.k_cache, layer.v_cache, batch.page_table, batch.positions,
        layer.compressed_k, layer.compressed_v, layer.selected, layer.scale, layer.sliding_window,
    )  # fmt: skip
    return out


def gated_delta_tree(layer: Recurrent, next_token: Tensor, next_sibling: Tensor) -> Tensor:
    """Run the recurrence along the links, and leave every node's state in the layer's buffer."""
    out, states = torch.ops.torchvm.gated_delta_tree(
        layer.query, layer.key, layer.value, layer.gate, layer.beta, layer.state, next_token,
        next_sibling, layer.scale,
    )  # fmt: skip
    layer.node_states[:, : states.shape[1]] = states
    result: Tensor = out
    return result
