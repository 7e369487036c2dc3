"""A back end in DeepSeek-V4's manner: a window and selected blocks, by position alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchvm.backends.calls import sparse_window_attention
from torchvm.backends.layers import LayerInputs, LayerKind, SparseWindow, of_kind
from torchvm.backends.leaf import LeafBackend

if TYPE_CHECKING:
    from torch import Tensor

    from torchvm.backends.base import VerifyBatch

__all__ = ["DeepSeekV4Backend"]


class DeepSeekV4Backend(LeafBackend):
    """`torchvm::sparse_window_attention`: siblings share a position, so it verifies chains."""

    label = "deepseek-v4"
    kind = LayerKind.sparse_window
    takes_trees = False

    @property
    def is_read(self) -> bool:
        """Never: the kernel looks at positions."""
        return False

    def init_forward_metadata(self, batch: VerifyBatch) -> VerifyBatch:
        """Nothing is derived."""
        return batch

    def forward_verify(self, layer: LayerInputs, metadata: VerifyBatch) -> Tensor:
        """Attend by position."""
        return sparse_window_attention(of_kind(layer, SparseWindow, self.label), metadata)
