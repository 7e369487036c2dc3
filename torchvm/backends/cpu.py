"""The CPU's back end: reads the tree block, and nothing of a chain's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchvm.backends.calls import tree_attention
from torchvm.backends.layers import GroupedQuery, LayerInputs, of_kind
from torchvm.backends.leaf import LeafBackend

if TYPE_CHECKING:
    from torch import Tensor

    from torchvm.backends.base import VerifyBatch

__all__ = ["CPUBackend"]


class CPUBackend(LeafBackend):
    """`torchvm::tree_attention` with a causal chain where topk is 1."""

    label = "cpu"

    @property
    def is_read(self) -> bool:
        """Chains are causal and need no mask."""
        return not self.is_chain

    def init_forward_metadata(self, batch: VerifyBatch) -> VerifyBatch:
        """Nothing is derived."""
        return batch

    def forward_verify(self, layer: LayerInputs, metadata: VerifyBatch) -> Tensor:
        """Attend prefix and tree in one op."""
        return tree_attention(
            of_kind(layer, GroupedQuery, self.label), metadata, is_causal_chain=self.is_chain
        )
