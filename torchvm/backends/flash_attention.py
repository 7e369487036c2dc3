"""A back end in FlashAttention's manner: the kernel knows no masks, so trees are page tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

import torchvm.ops.tree_pages  # noqa: F401 - registers the op
from torchvm.backends.layers import GroupedQuery, LayerInputs, of_kind
from torchvm.backends.leaf import LeafBackend
from torchvm.ops.paged_attention import merge_attention

if TYPE_CHECKING:
    from torch import Tensor

    from torchvm.backends.base import VerifyBatch

__all__ = ["FlashAttentionBackend"]


class TreeSlots(NamedTuple):
    """The tree as page tables, of (B * n) requests of one query each."""

    slots: Tensor
    """(B * n, n) int32, where the nodes that each node sees lie in the cache."""
    counts: Tensor
    """(B * n,) int64, how many there are."""


class FlashMetadata(NamedTuple):
    """The batch, and its tree where it is no chain."""

    batch: VerifyBatch
    tree: TreeSlots | None


class FlashAttentionBackend(LeafBackend):
    """`torchvm::paged_attention`: once and causally for a chain; for a tree in two parts.

    The committed tokens are attended by all nodes alike, and each node's ancestors through a page
    table of its own, which `torchvm::expand_tree_pages` gathers from the mask once a forward. A
    vendor's kernel would take the place of `_attend`, which is the only call it needs.
    """

    label = "flash-attention"

    @property
    def is_read(self) -> bool:
        """Chains are causal; trees are gathered from the tree block."""
        return not self.is_chain

    def init_forward_metadata(self, batch: VerifyBatch) -> FlashMetadata:
        """Gather the tree, unless it is a chain."""
        if self.is_chain:
            return FlashMetadata(batch, None)
        slots, counts = torch.ops.torchvm.expand_tree_pages(
            batch.tree_mask, batch.seq_lens, batch.page_table, batch.positions.shape[1],
            batch.page_size, batch.tree_mask_mode,
        )  # fmt: skip
        return FlashMetadata(batch, TreeSlots(slots, counts))

    def forward_verify(self, layer: LayerInputs, metadata: FlashMetadata) -> Tensor:
        """Attend in one part, or in two.

        Raises:
            ValueError: for a tree in a layer with a sliding window: its nodes' windows begin at
                different positions, and the kernel has one for all.
        """
        inputs, batch = of_kind(layer, GroupedQuery, self.label), metadata.batch
        if metadata.tree is None:
            kv_lens = batch.seq_lens + inputs.query.shape[1]
            return self._attend(inputs, batch.page_table, kv_lens, is_causal=True)[0]
        if inputs.sliding_window:
            raise ValueError(
                f"sliding_window must be 0 for trees on the back end {self.label!r}, "
                f"got {inputs.sliding_window}"
            )
        prefix = self._attend(inputs, batch.page_table, batch.seq_lens, is_causal=False)
        nodes = inputs._replace(
            query=inputs.query.flatten(0, 1).unsqueeze(1),
            k_cache=inputs.k_cache.flatten(0, 1).unsqueeze(1),
            v_cache=inputs.v_cache.flatten(0, 1).unsqueeze(1),
        )
        output, lse = self._attend(nodes, *metadata.tree, is_causal=False)
        return merge_attention(
            *prefix, output.view(inputs.query.shape), lse.view(inputs.query.shape[:3])
        )

    def _attend(
        self, inputs: GroupedQuery, page_table: Tensor, kv_lens: Tensor, *, is_causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Call the kernel: (output, lse)."""
        output, lse = torch.ops.torchvm.paged_attention(
            inputs.query, inputs.k_cache, inputs.v_cache, page_table, kv_lens, is_causal,
            inputs.scale, inputs.sliding_window, inputs.logit_cap,
        )  # fmt: skip
        return output, lse
