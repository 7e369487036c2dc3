"""A back end in FlashInfer's manner: packs the whole flat mask to bits, once a forward."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

import torchvm.ops.packed_attention
import torchvm.ops.packed_mask  # noqa: F401 - these register the ops
from torchvm.backends.layers import GroupedQuery, LayerInputs, of_kind
from torchvm.backends.leaf import LeafBackend
from torchvm.ops.layout import TreeMaskMode

if TYPE_CHECKING:
    from torch import Tensor

    from torchvm.backends.base import VerifyBatch

__all__ = ["FlashInferBackend"]


class PackedMetadata(NamedTuple):
    """The batch, and its mask as bits."""

    batch: VerifyBatch
    packed_mask: Tensor
    """uint8, little-endian bits of each request's rows, a request beginning on a byte."""
    mask_indptr: Tensor
    """(B + 1,) int64, where each request's bytes begin."""


class FlashInferBackend(LeafBackend):
    """`torchvm::pack_mask_bits`, which reads a FULL_MASK, and `torchvm::packed_attention`."""

    label = "flashinfer"
    modes = frozenset({TreeMaskMode.FULL_MASK})

    @property
    def is_read(self) -> bool:
        """At every topk."""
        return True

    def init_forward_metadata(self, batch: VerifyBatch) -> PackedMetadata:
        """Pack the mask, which must be one that has a prefix."""
        self.require_mode(batch.tree_mask_mode)
        packed_mask, mask_indptr = torch.ops.torchvm.pack_mask_bits(
            batch.tree_mask, batch.seq_lens, batch.positions.shape[1], self.config.max_context_len
        )
        return PackedMetadata(batch, packed_mask, mask_indptr)

    def forward_verify(self, layer: LayerInputs, metadata: PackedMetadata) -> Tensor:
        """Attend where the bits say so."""
        inputs, batch = of_kind(layer, GroupedQuery, self.label), metadata.batch
        out: Tensor = torch.ops.torchvm.packed_attention(
            inputs.query, inputs.k_cache, inputs.v_cache, batch.page_table, batch.seq_lens,
            metadata.packed_mask, metadata.mask_indptr, inputs.scale, inputs.sliding_window,
            inputs.logit_cap,
        )  # fmt: skip
        return out
