"""Targets for `torchvm dump`, good and bad."""

from __future__ import annotations

from typing import Any

import torch

import torchvm
from tests.readers import READERS

__all__ = [
    "a_gib",
    "broken",
    "dynamic_break",
    "fails_when_traced",
    "late_copy",
    "leaves",
    "needs_more",
    "no_masks",
    "not_a_pair",
    "odd_name",
    "sized",
    "unsound",
    "wrong_args",
]


_STEP = """
def step(parents, seq_lens):
    mask = torchvm.alloc_verify_mask(1, 2, 8, 0)
    torchvm.build_tree_from_parents(
        parents, seq_lens, mask, num_draft_tokens=2, tree_mask_mode=0
    )
    return READERS.count(mask, 1)
"""


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


def sized(
    *, max_bs: int = 2, num_draft_tokens: int = 4, max_context_len: int = 64
) -> tuple[Any, tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """A mask that comes in and is read, and keyword arguments, at sizes that are given."""

    def step(parents: torch.Tensor, *, lengths: torch.Tensor, mask: torch.Tensor) -> Any:
        torch.ops.torchvm.build_tree_from_parents(parents, lengths, mask, num_draft_tokens, 0)
        return READERS.block(mask, lengths, num_draft_tokens, 0)

    numel = int(torchvm.tree_mask_numel(0, max_bs, num_draft_tokens, max_context_len))
    parents = torch.zeros(max_bs, num_draft_tokens, dtype=torch.int64)
    # Ones are written to memory, were this no fake.
    mask = torch.ones(numel, dtype=torch.bool)
    return step, (parents,), {"lengths": torch.ones(max_bs, dtype=torch.int64), "mask": mask}


def unsound() -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Two masks: one that an unknown op takes and a reader of other lengths, one told wrongly."""

    def step(parents: torch.Tensor, seq_lens: torch.Tensor, other: torch.Tensor) -> Any:
        first, second = (torchvm.alloc_verify_mask(2, 4, 8, 0) for _ in range(2))
        for mask in (first, second):
            torchvm.build_tree_from_parents(
                parents, seq_lens, mask, num_draft_tokens=4, tree_mask_mode=0
            )
        unknown = READERS.unknown(first, 1)
        late = READERS.block(first, other, 4, 0)
        return unknown, late, READERS.block(second, seq_lens, 4, 1)

    lengths = torch.ones(2, dtype=torch.int64)
    return step, (torch.zeros(2, 4, dtype=torch.int64), lengths, lengths + 1)


def late_copy() -> tuple[Any, tuple[torch.Tensor, ...]]:
    """A copy of the old mask that has to stay, and a written input that never moves."""

    def step(parents: torch.Tensor, seq_lens: torch.Tensor, mask: torch.Tensor) -> Any:
        old = mask.clone()
        built = torch.ops.torchvm.build_tree_from_parents(parents, seq_lens, mask, 4, 0)
        lengths = built[0].view(parents.shape)[:, 0].contiguous()
        return READERS.block(old, lengths, 4, 0), lengths

    mask = torch.ones(2 * 4 * (8 + 4), dtype=torch.bool)
    torch._dynamo.mark_static_address(mask)
    return step, (torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, dtype=torch.int64), mask)


def needs_more(batch: int) -> Any:
    """Want an argument that nothing gives."""
    raise AssertionError(batch)


def leaves() -> Any:
    """End the process."""
    raise SystemExit(3)


def fails_when_traced() -> Any:
    """Return what cannot be traced."""

    def step(x: torch.Tensor) -> Any:
        return torchvm.build_tree_from_parents(x, x, x, num_draft_tokens=4, tree_mask_mode=1)

    return step, (torch.ones(3),)


def odd_name() -> tuple[Any, tuple[torch.Tensor, ...]]:
    """A mask whose source line is in a file that looks like markup."""
    scope: dict[str, Any] = {"torchvm": torchvm, "READERS": READERS}
    exec(compile(_STEP, "<b>\\N</b><!--GRAPHS-->.py", "exec"), scope)  # noqa: S102
    return scope["step"], (torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, dtype=torch.int64))
