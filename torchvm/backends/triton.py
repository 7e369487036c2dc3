"""Triton's back ends: two stages (prefix, then tree), or one kernel over all of a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import torchvm.ops.unified_attention  # noqa: F401 - registers the op
from torchvm.backends.calls import tree_attention
from torchvm.backends.layers import GroupedQuery, LayerInputs, of_kind
from torchvm.backends.leaf import LeafBackend
from torchvm.ops.layout import TreeMaskMode

if TYPE_CHECKING:
    from torch import Tensor

    from torchvm.backends.base import VerifyBatch

__all__ = ["TritonBackend", "TritonUnifiedBackend"]


class TritonBackend(LeafBackend):
    """Two stages: `torchvm::tree_attention`, which skips the prefix columns of the mask.

    It follows the mask for chains too.
    """

    label = "triton"
    dtype = torch.uint8

    @property
    def is_read(self) -> bool:
        """At every topk."""
        return True

    def init_forward_metadata(self, batch: VerifyBatch) -> VerifyBatch:
        """Nothing is derived."""
        return batch

    def forward_verify(self, layer: LayerInputs, metadata: VerifyBatch) -> Tensor:
        """Attend prefix and tree in one op."""
        return tree_attention(
            of_kind(layer, GroupedQuery, self.label), metadata, is_causal_chain=False
        )


class TritonUnifiedBackend(TritonBackend):
    """One stage: `torchvm::unified_attention`, which looks every position up in a FULL_MASK."""

    label = "triton-unified"
    modes = frozenset({TreeMaskMode.FULL_MASK})

    def init_forward_metadata(self, batch: VerifyBatch) -> VerifyBatch:
        """Refuse a layout that would be misread."""
        self.require_mode(batch.tree_mask_mode)
        return batch

    def forward_verify(self, layer: LayerInputs, metadata: VerifyBatch) -> Tensor:
        """Attend prefix and tree alike."""
        inputs = of_kind(layer, GroupedQuery, self.label)
        out: Tensor = torch.ops.torchvm.unified_attention(
            inputs.query, inputs.k_cache, inputs.v_cache, metadata.page_table, metadata.seq_lens,
            metadata.tree_mask, inputs.scale, inputs.sliding_window, inputs.logit_cap,
        )  # fmt: skip
        return out
