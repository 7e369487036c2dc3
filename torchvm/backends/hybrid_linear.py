"""Models of full-attention and linear layers: each kind of layer has its child."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torchvm.backends.base import AttentionBackend, named_buffers
from torchvm.backends.layers import LayerKind, Recurrent

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor

    from torchvm.backends.base import VerifyBatch, VerifyConfig
    from torchvm.backends.layers import LayerInputs
    from torchvm.ops.tree import DraftTree
    from torchvm.verify_mask import VerifyMask

__all__ = ["HybridLinearAttnBackend"]


class HybridMetadata(NamedTuple):
    """Each child's own."""

    full: Any
    linear: Any


class HybridLinearAttnBackend(AttentionBackend):
    """The mask is the full-attention child's; links and the hook after a draft reach both.

    Args:
        full: attends in layers with a cache.
        linear: runs the recurrence of the others.

    Raises:
        ValueError: when the children's kinds of layer are not these, or they are made for trees
            of different sizes.
    """

    def __init__(self, full: AttentionBackend, linear: AttentionBackend) -> None:
        if LayerKind.recurrent in full.layer_kinds:
            raise ValueError(f"full must attend with a cache, got {full.name!r}")
        if LayerKind.recurrent not in linear.layer_kinds:
            raise ValueError(f"linear must be a back end of linear layers, got {linear.name!r}")
        sizes = [(c.config.topk, c.config.num_draft_tokens) for c in (full, linear)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"full and linear must be made for the same topk and num_draft_tokens, got {sizes}"
            )
        self.full, self.linear = full, linear

    @property
    def name(self) -> str:
        """Both children."""
        return f"hybrid-linear({self.full.name}, {self.linear.name})"

    @property
    def config(self) -> VerifyConfig:
        """Both children's, up to their masks."""
        return self.full.config

    @property
    def verifier(self) -> AttentionBackend:
        """Both children's, as one."""
        return HybridLinearAttnBackend(self.full.verifier, self.linear.verifier)

    @property
    def layer_kinds(self) -> frozenset[LayerKind]:
        """Both children's."""
        return self.full.layer_kinds | self.linear.layer_kinds

    @property
    def mask_dtype(self) -> torch.dtype:
        """The full-attention child's."""
        return self.full.mask_dtype

    @property
    def is_read(self) -> bool:
        """The full-attention child's: the other reads links."""
        return self.full.is_read

    @property
    def verify_mask(self) -> VerifyMask | None:
        """The full-attention child's."""
        return self.full.verify_mask

    @property
    def persistent_buffers(self) -> Mapping[str, Tensor]:
        """Both children's."""
        return named_buffers({"full": self.full, "linear": self.linear})

    def init_cuda_graph_state(self, max_bs: int) -> None:
        """Allocate the mask, and the links."""
        self.full.init_cuda_graph_state(max_bs)
        self.linear.init_cuda_graph_state(max_bs)

    def init_forward_metadata(self, batch: VerifyBatch) -> HybridMetadata:
        """Make both children's."""
        return HybridMetadata(
            self.full.init_forward_metadata(batch), self.linear.init_forward_metadata(batch)
        )

    def update_verify_buffers_to_fill_after_draft(self, tree: DraftTree) -> None:
        """Tell both children."""
        self.full.update_verify_buffers_to_fill_after_draft(tree)
        self.linear.update_verify_buffers_to_fill_after_draft(tree)

    def forward_verify(self, layer: LayerInputs, metadata: HybridMetadata) -> Tensor:
        """Attend on the child that the layer is for."""
        if isinstance(layer, Recurrent):
            return self.linear.forward_verify(layer, metadata.linear)
        return self.full.forward_verify(layer, metadata.full)
