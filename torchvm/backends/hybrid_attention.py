"""One back end for prompts, another for decoding: verification runs on one of the two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from torchvm.backends.base import AttentionBackend

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor

    from torchvm.backends.base import VerifyBatch, VerifyConfig
    from torchvm.backends.layers import LayerInputs, LayerKind
    from torchvm.ops.tree import DraftTree
    from torchvm.verify_mask import VerifyMask

__all__ = ["HybridAttnBackend"]


class HybridAttnBackend(AttentionBackend):
    """Forwards every member to the child that runs verify; the other child owns no mask.

    Args:
        prefill: the engine's back end for prompts.
        decode: its back end for decoding steps.
        speculative_attention_mode: "decode" verifies on the decode child, "prefill" on the other.

    Raises:
        ValueError: for another mode.
    """

    def __init__(
        self,
        prefill: AttentionBackend,
        decode: AttentionBackend,
        *,
        speculative_attention_mode: Literal["decode", "prefill"],
    ) -> None:
        children = {"decode": decode, "prefill": prefill}
        if speculative_attention_mode not in children:
            raise ValueError(
                "speculative_attention_mode must be 'decode' or 'prefill', "
                f"got {speculative_attention_mode!r}"
            )
        self.prefill, self.decode = prefill, decode
        self._child = children[speculative_attention_mode]

    @property
    def name(self) -> str:
        """Both children, the verifier marked."""
        names = [
            f"{child.name}*" if child is self._child else child.name
            for child in (self.prefill, self.decode)
        ]
        return f"hybrid-attention({', '.join(names)})"

    @property
    def config(self) -> VerifyConfig:
        """The verifying child's."""
        return self._child.config

    @property
    def verifier(self) -> AttentionBackend:
        """The child that runs verify, or the one that does within it."""
        return self._child.verifier

    @property
    def layer_kinds(self) -> frozenset[LayerKind]:
        """The verifier's."""
        return self._child.layer_kinds

    @property
    def mask_dtype(self) -> torch.dtype:
        """The verifier's."""
        return self._child.mask_dtype

    @property
    def is_read(self) -> bool:
        """The verifier's."""
        return self._child.is_read

    @property
    def verify_mask(self) -> VerifyMask | None:
        """The verifier's."""
        return self._child.verify_mask

    @property
    def persistent_buffers(self) -> Mapping[str, Tensor]:
        """The verifier's."""
        return self._child.persistent_buffers

    def init_cuda_graph_state(self, max_bs: int) -> None:
        """Allocate the verifier's."""
        self._child.init_cuda_graph_state(max_bs)

    def init_forward_metadata(self, batch: VerifyBatch) -> Any:
        """Make the verifier's."""
        return self._child.init_forward_metadata(batch)

    def update_verify_buffers_to_fill_after_draft(self, tree: DraftTree) -> None:
        """Tell the verifier."""
        self._child.update_verify_buffers_to_fill_after_draft(tree)

    def forward_verify(self, layer: LayerInputs, metadata: Any) -> Tensor:
        """Attend on the verifier."""
        return self._child.forward_verify(layer, metadata)
