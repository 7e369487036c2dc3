"""Targets for `torchvm dump`, good and bad."""

from __future__ import annotations

from typing import Any

import torch

import torchvm
from tests.readers import READERS

__all__ = ["a_gib", "broken", "dynamic_break", "no_masks", "not_a_pair", "wrong_args"]


def a_gib() -> tuple[Any, tuple[torch.Tensor, ...]]:
    """A FULL_MASK of 1 GiB that one reader of the tree block takes."""

    def step(parents: torch.Tensor, seq_lens: torch.Tensor) -> Any:
        mask = torchvm.alloc_verify_mask(256, 4, 1 << 20, torchvm.TreeMaskMode.FULL_MASK)
        tree = torchvm.build_tree_from_parents(
            parents, seq_lens, mask, num_draft_tokens=4, tree_mask_mode=0
        )
        return tree.positions, READERS.block(mask, seq_lens, 4, 0)

    return step, (torch.zeros(256, 4, dtype=torch.int64), torch.ones(256, dtype=torch.int64))


def no_masks() -> tuple[Any, list[torch.Tensor]]:
    """No op of torchvm at all, arguments as a list."""
    return (lambda x: (x * 2).sum()), [torch.ones(3)]


def dynamic_break() -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Two graphs."""

    def step(parents: torch.Tensor, seq_lens: torch.Tensor) -> Any:
        mask = torchvm.alloc_verify_mask(1, 2, 8, 0)
        torchvm.build_tree_from_parents(
            parents, seq_lens, mask, num_draft_tokens=2, tree_mask_mode=0
        )
        torch._dynamo.graph_break()
        return READERS.count(mask, 1)

    return step, (torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, dtype=torch.int64))


def broken() -> Any:
    """Raise."""
    raise RuntimeError("no such weights")


def not_a_pair() -> int:
    """Return something else."""
    return 3


def wrong_args() -> tuple[Any, Any]:
    """Return one tensor instead of a tuple of arguments."""
    return torch.sin, torch.ones(2)
