"""A back end with kernels of its own, which owns the mask that they read."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch

from torchvm.backends.base import AttentionBackend, VerifyConfig
from torchvm.backends.layers import LayerKind
from torchvm.ops.layout import TreeMaskMode, tree_mode
from torchvm.verify_mask import VerifyMask, default_tree_mask_mode, maybe_create_verify_mask

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from torchvm.ops.tree import DraftTree

__all__ = ["LeafBackend"]


class LeafBackend(AttentionBackend):
    """Owns the mask of the layout that its config names, and writes nothing after a draft.

    Args:
        config: what is fixed for the back end's life.

    Raises:
        ValueError: for a topk below 1, or one above 1 when the kernels read no mask.
    """

    kind: ClassVar[LayerKind] = LayerKind.grouped_query
    dtype: ClassVar[torch.dtype] = torch.bool
    takes_trees: ClassVar[bool] = True
    """Whether its kernels can tell siblings apart."""
    modes: ClassVar[frozenset[TreeMaskMode]] = frozenset(TreeMaskMode)
    """Layouts that its kernels understand, when they read the mask."""
    label: ClassVar[str]

    def __init__(self, config: VerifyConfig) -> None:
        if config.topk < 1:
            raise ValueError(f"topk must be >= 1, got {config.topk}")
        if config.topk > 1 and not self.takes_trees:
            from torchvm.backends.registry import tree_backends

            raise ValueError(
                f"topk must be 1 for the back end {self.label!r}, whose kernels read no mask and "
                f"verify chains alone, got {config.topk}: trees are verified, in "
                f"{LayerKind.grouped_query} layers, by {', '.join(tree_backends())}"
            )
        self._config = config
        # Compiled code is guarded on what it looks at, and need not know any other topk.
        self.is_chain = config.topk == 1
        self._verify_mask: VerifyMask | None = None
        if config.tree_mask_mode is not None:
            self.require_mode(config.tree_mask_mode)

    @property
    def name(self) -> str:
        """The class's label."""
        return self.label

    @property
    def config(self) -> VerifyConfig:
        """What it was made for."""
        return self._config

    @property
    def verifier(self) -> AttentionBackend:
        """Itself."""
        return self

    @property
    def layer_kinds(self) -> frozenset[LayerKind]:
        """The class's one kind."""
        return frozenset({self.kind})

    @property
    def mask_dtype(self) -> torch.dtype:
        """The class's dtype."""
        return self.dtype

    @property
    @abstractmethod
    def is_read(self) -> bool:
        """What the class declares for its topk."""

    @property
    def verify_mask(self) -> VerifyMask | None:
        """The mask, once it is allocated."""
        return self._verify_mask

    @property
    def persistent_buffers(self) -> Mapping[str, Tensor]:
        """None, unless the class allocates some."""
        return {}

    def init_cuda_graph_state(self, max_bs: int) -> None:
        """Allocate the mask; a second call for as many requests, or fewer, keeps it."""
        if not self.config.owns_mask:
            return
        if self._verify_mask is not None and max_bs <= self._verify_mask.max_bs:
            return
        self._verify_mask = maybe_create_verify_mask(
            is_draft_runner=self.config.is_draft_runner,
            skip_prefill=self.config.skip_prefill,
            max_bs=max_bs,
            max_context_len=self.config.max_context_len,
            num_draft_tokens=self.config.num_draft_tokens,
            device=self.config.device,
            is_read=self.is_read,
            dtype=self.dtype,
            mode=self._mode(),
        )

    def require_mode(self, mode: int) -> None:
        """Raise ValueError for a layout that the kernels would misread."""
        if self.is_read and mode not in self.modes:
            names = " or ".join(known.name for known in sorted(self.modes))
            raise ValueError(
                f"tree_mask_mode must be {names} for the back end {self.label!r}, "
                f"got {tree_mode(mode).name}"
            )

    def _mode(self) -> TreeMaskMode | None:
        """The config's, or FULL_MASK where the default of the device would be misread."""
        mode, default = self.config.tree_mask_mode, default_tree_mask_mode(self.config.device)
        misread = self.is_read and default not in self.modes
        return TreeMaskMode.FULL_MASK if mode is None and misread else mode

    def update_verify_buffers_to_fill_after_draft(self, tree: DraftTree) -> None:
        """Do nothing: builds write the mask in place."""
