"""A back end of linear attention: its recurrence follows the links of the draft tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from torchvm.backends.calls import gated_delta_tree
from torchvm.backends.layers import LayerInputs, LayerKind, Recurrent, of_kind
from torchvm.backends.leaf import LeafBackend

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from torchvm.backends.base import VerifyBatch, VerifyConfig
    from torchvm.ops.tree import DraftTree

__all__ = ["LinearAttnBackend"]


class Links(NamedTuple):
    """Of B requests' trees, each (B, n) int64."""

    next_token: Tensor
    next_sibling: Tensor


class LinearAttnBackend(LeafBackend):
    """`torchvm::gated_delta_tree`. It owns no mask but a buffer of links.

    Metadata that is made while the draft still runs refers to that buffer, and the draft's links
    have to be copied there before the forward: `update_verify_buffers_to_fill_after_draft`.
    """

    label = "linear"
    kind = LayerKind.recurrent

    def __init__(self, config: VerifyConfig) -> None:
        super().__init__(config)
        self._links: Links | None = None

    @property
    def is_read(self) -> bool:
        """Never: links say who follows whom."""
        return False

    @property
    def persistent_buffers(self) -> Mapping[str, Tensor]:
        """The links that come after the metadata, once they are allocated."""
        return {} if self._links is None else self._links._asdict()

    def init_cuda_graph_state(self, max_bs: int) -> None:
        """Allocate links of nobody; a second call for as many requests, or fewer, keeps them."""
        if self._links is None or max_bs > self._links.next_token.shape[0]:
            shape = (max_bs, self.config.num_draft_tokens)
            self._links = Links(
                *(
                    torch.full(shape, -1, dtype=torch.int64, device=self.config.device)
                    for _ in Links._fields
                )
            )

    def init_forward_metadata(self, batch: VerifyBatch) -> Links:
        """Take the batch's links, or the buffer's when the draft has not made them yet.

        Raises:
            ValueError: when there are neither.
        """
        if batch.retrieve_next_token is not None and batch.retrieve_next_sibling is not None:
            return Links(batch.retrieve_next_token, batch.retrieve_next_sibling)
        bs = batch.seq_lens.shape[0]
        links = self._buffer(bs)
        return Links(links.next_token[:bs], links.next_sibling[:bs])

    def update_verify_buffers_to_fill_after_draft(self, tree: DraftTree) -> None:
        """Copy the draft's links to the buffer, if there is one.

        Raises:
            ValueError: when the trees are more than the buffer was made for.
        """
        if self._links is None:
            return
        bs = tree.retrieve_next_token.shape[0]
        links = self._buffer(bs)
        links.next_token[:bs].copy_(tree.retrieve_next_token)
        links.next_sibling[:bs].copy_(tree.retrieve_next_sibling)

    def forward_verify(self, layer: LayerInputs, metadata: Links) -> Tensor:
        """Run the recurrence."""
        return gated_delta_tree(of_kind(layer, Recurrent, self.label), *metadata)

    def _buffer(self, bs: int) -> Links:
        held = 0 if self._links is None else self._links.next_token.shape[0]
        if self._links is None or bs > held:
            raise ValueError(
                f"init_cuda_graph_state must be called for at least {bs} requests before links "
                f"come after the metadata, got {held}"
            )
        return self._links
