"""Back ends of latent attention in FlashMLA's and TensorRT-LLM's manner: chains, and no mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchvm.backends.calls import mla_attention
from torchvm.backends.layers import Latent, LayerInputs, LayerKind, of_kind
from torchvm.backends.leaf import LeafBackend

if TYPE_CHECKING:
    from torch import Tensor

    from torchvm.backends.base import VerifyBatch

__all__ = ["FlashMLABackend", "TRTLLMMLABackend"]


class FlashMLABackend(LeafBackend):
    """`torchvm::mla_attention`: node i sees the committed tokens and nodes 0 .. i."""

    label = "flashmla"
    kind = LayerKind.latent
    takes_trees = False

    @property
    def is_read(self) -> bool:
        """Never: the kernel takes no mask."""
        return False

    def init_forward_metadata(self, batch: VerifyBatch) -> VerifyBatch:
        """Nothing is derived."""
        return batch

    def forward_verify(self, layer: LayerInputs, metadata: VerifyBatch) -> Tensor:
        """Attend causally."""
        return mla_attention(of_kind(layer, Latent, self.label), metadata)


class TRTLLMMLABackend(FlashMLABackend):
    """TensorRT-LLM's kernel has the same contract as FlashMLA's."""

    label = "trtllm-mla"
