"""Two-batch overlap: one batch runs as two, each on a child of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from torchvm.backends.base import AttentionBackend, VerifyBatch, VerifyConfig, named_buffers
from torchvm.backends.layers import split_layer
from torchvm.ops.layout import TreeMaskMode, live_mask_numel, tree_mode
from torchvm.ops.tree import DraftTree

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from torchvm.backends.layers import LayerInputs, LayerKind
    from torchvm.verify_mask import VerifyMask

__all__ = ["TboAttnBackend", "split_batch"]


class TboMetadata(NamedTuple):
    """The children's own; None where the batch has one request and the primary runs it."""

    first_bs: int
    children: tuple[Any, Any] | None
    whole: Any


def split_batch(batch: VerifyBatch, bs: int) -> tuple[VerifyBatch, VerifyBatch]:
    """Split a batch behind the first `bs` requests; the mask's parts are views.

    A FULL_MASK is cut at `n * sum(seq_lens[:bs]) + bs * n * n`, a compact one at bs requests.

    Raises:
        ValueError: for a FULL_MASK without `seq_lens_cpu`, lengths that are not the batch's, or a
            mask that is shorter than the batch.
    """
    n, total = batch.positions.shape[1], batch.seq_lens.shape[0]
    masks: tuple[Tensor | None, Tensor | None] = (None, None)
    lengths = batch.seq_lens_cpu
    if batch.tree_mask is not None:
        mode = tree_mode(batch.tree_mask_mode)
        if mode is TreeMaskMode.FULL_MASK and lengths is None:
            raise ValueError(
                "seq_lens_cpu must be the lengths on the host to split a FULL_MASK, got None"
            )
        known = [0] * total
        if lengths is not None:
            known = list(lengths)
            _check_lengths(known, batch.seq_lens)
        middle = int(live_mask_numel(mode, bs, n, sum(known[:bs])))
        end = int(live_mask_numel(mode, total, n, sum(known)))
        if batch.tree_mask.numel() < end:
            raise ValueError(
                f"tree_mask must be of at least {end} elements for {mode.name} with these "
                f"seq_lens, got {batch.tree_mask.numel()}"
            )
        masks = (batch.tree_mask[:middle], batch.tree_mask[middle:end])
    halves = []
    for part, mask in zip((slice(bs), slice(bs, None)), masks, strict=True):
        rows = {
            name: value[part]
            for name, value in batch._asdict().items()
            if name != "tree_mask"
            and (isinstance(value, torch.Tensor) or name == "seq_lens_cpu")
            and value is not None
        }
        halves.append(batch._replace(tree_mask=mask, **rows))
    return halves[0], halves[1]


class TboAttnBackend(AttentionBackend):
    """The primary owns mask and contract; the children attend for a half of the batch each.

    Args:
        primary: owns the mask.
        children: two like the primary, made with `owns_mask=False`.

    Raises:
        ValueError: when the children are not two of the primary's type, name and config, their
            ownership aside.
    """

    def __init__(
        self, primary: AttentionBackend, children: tuple[AttentionBackend, AttentionBackend]
    ) -> None:
        alike = [_likeness(child) == _likeness(primary) for child in children]
        if alike != [True, True]:
            raise ValueError(
                f"children must be two {primary.name!r} back ends made like the primary but for "
                f"owns_mask, got {[child.name for child in children]}"
            )
        self.primary, self.children = primary, children
        self._first_bs: int | None = None

    @property
    def name(self) -> str:
        """The primary's, and how it runs."""
        return f"two-batch({self.primary.name})"

    @property
    def config(self) -> VerifyConfig:
        """The primary's."""
        return self.primary.config

    @property
    def verifier(self) -> AttentionBackend:
        """The primary's, whose kernels are the children's too."""
        return self.primary.verifier

    @property
    def layer_kinds(self) -> frozenset[LayerKind]:
        """The primary's."""
        return self.primary.layer_kinds

    @property
    def mask_dtype(self) -> torch.dtype:
        """The primary's."""
        return self.primary.mask_dtype

    @property
    def is_read(self) -> bool:
        """The primary's."""
        return self.primary.is_read

    @property
    def verify_mask(self) -> VerifyMask | None:
        """The primary's. A property of the class, so no `__getattr__` is needed to find it."""
        return self.primary.verify_mask

    @property
    def persistent_buffers(self) -> Mapping[str, Tensor]:
        """The primary's and both children's."""
        first, second = self.children
        return named_buffers({"primary": self.primary, "first": first, "second": second})

    def init_cuda_graph_state(self, max_bs: int) -> None:
        """Allocate the primary's mask, of which the children read views, and what else they need.

        Raises:
            ValueError: when a child owns a mask, which nothing would ever build into.
        """
        for back_end in (self.primary, *self.children):
            back_end.init_cuda_graph_state(max_bs)
        if any(child.verify_mask is not None for child in self.children):
            raise ValueError("children must own no mask, got one made without owns_mask=False")

    def init_forward_metadata(self, batch: VerifyBatch) -> TboMetadata:
        """Make the children's, each for its half."""
        total = batch.seq_lens.shape[0]
        if total < len(self.children):
            self._first_bs = 0
            return TboMetadata(total, None, self.primary.init_forward_metadata(batch))
        self._first_bs = first_bs = total // 2
        first, second = self.children
        half, other = split_batch(batch, first_bs)
        children = first.init_forward_metadata(half), second.init_forward_metadata(other)
        return TboMetadata(first_bs, children, None)

    def update_verify_buffers_to_fill_after_draft(self, tree: DraftTree) -> None:
        """Tell the primary, and each child of its part.

        The cut is that of the metadata, which may be of more requests: those that pad the batch.
        """
        self.primary.update_verify_buffers_to_fill_after_draft(tree)
        total = tree.retrieve_next_token.shape[0]
        first_bs = total // 2 if self._first_bs is None else self._first_bs
        for child, part in zip(
            self.children, (slice(first_bs), slice(first_bs, None)), strict=True
        ):
            child.update_verify_buffers_to_fill_after_draft(_part_of(tree, part))

    def forward_verify(self, layer: LayerInputs, metadata: TboMetadata) -> Tensor:
        """Attend on the children, each for its half."""
        if metadata.children is None:
            return self.primary.forward_verify(layer, metadata.whole)
        halves = split_layer(layer, metadata.first_bs)
        return torch.cat(
            [
                child.forward_verify(half, own)
                for child, half, own in zip(self.children, halves, metadata.children, strict=True)
            ]
        )


def _likeness(backend: AttentionBackend) -> tuple[object, ...]:
    """What two back ends must have in common to run the same kernels."""
    config = msgspec.structs.replace(backend.config, owns_mask=True)
    return type(backend), backend.name, config


def _check_lengths(lengths: list[int], seq_lens: Tensor) -> None:
    """Require host lengths to be those of the batch, as far as that is known without waiting."""
    on_host = seq_lens.device.type == "cpu" and not torch.compiler.is_compiling()
    if len(lengths) != seq_lens.shape[0] or (on_host and lengths != seq_lens.tolist()):
        raise ValueError(f"seq_lens_cpu must be the batch's seq_lens, got {lengths}")


def _part_of(tree: DraftTree, part: slice) -> DraftTree:
    """Some requests' rows; positions are flat, and so counted in nodes."""
    batch, n = tree.retrieve_next_token.shape
    positions = tree.positions.view(batch, n)[part].flatten()
    return DraftTree(positions, *(links[part] for links in tree[1:]))
