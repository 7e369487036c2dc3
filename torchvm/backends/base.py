"""What an attention back end is to the engine: who owns the verify mask, and who reads it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from torchvm.ops.layout import TreeMaskMode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from torchvm.backends.layers import LayerInputs, LayerKind
    from torchvm.ops.tree import DraftTree
    from torchvm.verify_mask import VerifyMask

__all__ = ["AttentionBackend", "VerifyBatch", "VerifyConfig", "named_buffers"]


class VerifyConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What is fixed for as long as a back end lives."""

    num_draft_tokens: int
    """n, draft tokens per request, root included."""
    max_context_len: int
    """Most committed tokens of a request."""
    topk: int
    """Most children of a node; 1 drafts chains."""
    device: torch.device = torch.device("cpu")
    tree_mask_mode: TreeMaskMode | None = None
    """The mask's layout, as a plan found it; None is the device's default for a mask that is
    declared read and QLEN_ONLY for one that is not."""
    is_draft_runner: bool = False
    skip_prefill: bool = False
    """Made for decoding steps alone: it verifies nothing and owns no mask."""
    owns_mask: bool = True
    """False for a child that verifies on a part of another back end's mask."""


class VerifyBatch(NamedTuple):
    """One batch of trees, as its layout left it; shared by every layer of a forward."""

    page_table: Tensor
    """(B, max_pages) int32."""
    page_size: int
    """Positions of a page."""
    seq_lens: Tensor
    """(B,) int64, committed tokens of each request."""
    positions: Tensor
    """(B, n) int64."""
    tree_mask: Tensor | None
    """1-D, in the layout `tree_mask_mode`; None where no tree is verified."""
    tree_mask_mode: int
    retrieve_next_token: Tensor | None = None
    """(B, n) int64, first child of each node. None when the draft is still running: then a back
    end that follows links reads the buffers that `update_verify_buffers_to_fill_after_draft`
    fills."""
    retrieve_next_sibling: Tensor | None = None
    """(B, n) int64, next sibling of each node, or None with `retrieve_next_token`."""
    seq_lens_cpu: Sequence[int] | None = None
    """The lengths on the host, for those that cut a FULL_MASK; nobody fetches them."""


class AttentionBackend(ABC):
    """The base contract. Every member is abstract, so nobody inherits an answer by accident.

    A dispatcher that forgets to forward a member cannot be made at all. With a default here, it
    would silently own no mask.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """What `torchvm generate --backend` calls it."""

    @property
    @abstractmethod
    def config(self) -> VerifyConfig:
        """What it was made for."""

    @property
    @abstractmethod
    def verifier(self) -> AttentionBackend:
        """The back end whose kernels run verify on the mask: itself, unless it dispatches."""

    @property
    @abstractmethod
    def layer_kinds(self) -> frozenset[LayerKind]:
        """The kinds of layer that it attends for."""

    @property
    @abstractmethod
    def mask_dtype(self) -> torch.dtype:
        """Elements of a mask that is not packed: torch.bool or torch.uint8."""

    @property
    @abstractmethod
    def is_read(self) -> bool:
        """Whether its verify kernels read the mask: a claim, which a plan checks."""

    @property
    @abstractmethod
    def verify_mask(self) -> VerifyMask | None:
        """The mask that builds write into; None before `init_cuda_graph_state` or without one."""

    @property
    @abstractmethod
    def persistent_buffers(self) -> Mapping[str, Tensor]:
        """What it holds beside the mask for as long as it lives, for the phase's ledger."""

    @abstractmethod
    def init_cuda_graph_state(self, max_bs: int) -> None:
        """Allocate what a captured graph needs at stable addresses.

        Args:
            max_bs: most requests in a batch, padding included.
        """

    @abstractmethod
    def init_forward_metadata(self, batch: VerifyBatch) -> Any:
        """Derive, once a forward, what every layer needs of the batch."""

    @abstractmethod
    def update_verify_buffers_to_fill_after_draft(self, tree: DraftTree) -> None:
        """Take over what the draft wrote after the metadata was made.

        Nothing is to be done for a mask, which builds write in place.

        Args:
            tree: the links of the draft's trees, of B requests.
        """

    @abstractmethod
    def forward_verify(self, layer: LayerInputs, metadata: Any) -> Tensor:
        """Attend the n nodes of each request, in one layer.

        A vendor's kernel takes the place of the op that a back end calls here, and gets a contract
        (`register_mask_reader`) if it is given the mask.

        Args:
            layer: the layer's queries and caches; the nodes' own keys already stand behind the
                committed ones.
            metadata: of `init_forward_metadata`.

        Returns:
            (B, n, heads, value dimension).
        """


def named_buffers(children: Mapping[str, AttentionBackend]) -> dict[str, Tensor]:
    """The buffers of a dispatcher's children, each name behind its child's."""
    return {
        f"{label}.{name}": buffer
        for label, child in children.items()
        for name, buffer in child.persistent_buffers.items()
    }
