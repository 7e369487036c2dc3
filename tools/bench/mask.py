"""A verify step's mask, in every layout and in the ways engines fill a FULL_MASK."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchvm.ops.layout import TreeMaskMode, live_mask_numel, mask_storage, tree_row_numel
from torchvm.ops.tree import build_tree_from_parents
from torchvm.tools.bench.measure import Case, Contender

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

__all__ = ["TITLE", "Sizes", "Work", "cases", "mask_case", "walked"]

TITLE = "mask: one step's mask and links; sizes are live of all requests x n x context"
NOTES = (
    "filled: the buffer is filled with True before the tree is written, as engines do",
    "allocated: torch.full makes it anew in every step",
    "the reference is built cell by cell in Python, every layout spread out to FULL_MASK",
)
FULL, QLEN, PACKED = TreeMaskMode


class Work(NamedTuple):
    """Requests that live in a buffer for many."""

    live: int
    max_bs: int
    num_draft_tokens: int
    context: int
    """Committed tokens of each live request."""
    max_context_len: int

    def __str__(self) -> str:
        """The size, as the table has it."""
        live = f"{self.live} of {self.max_bs}" if self.live < self.max_bs else str(self.live)
        context = (
            f"{self.context:,} of {self.max_context_len:,}"
            if self.context < self.max_context_len
            else f"{self.context:,}"
        )
        return f"{live} x {self.num_draft_tokens} x {context}"


Sizes = tuple[Work, ...]
SIZES: Sizes = (
    Work(1, 1, 8, 4096, 4096),
    Work(32, 32, 16, 4096, 4096),
    Work(256, 256, 4, 4096, 4096),
    Work(1, 256, 4, 4096, 131_072),
)
QUICK: Sizes = (Work(2, 2, 8, 40, 40), Work(1, 4, 9, 30, 100))


def cases(sizes: Sizes = SIZES) -> Iterator[Case]:
    """Every size."""
    for work in sizes:
        yield mask_case(work)


def mask_case(work: Work) -> Case:
    """Compare the cells of all layouts and the links, and time the steps."""
    n, live = work.num_draft_tokens, work.live
    parents = torch.tensor([[(i - 1) // 2 for i in range(n)]] * live)
    seq_lens = torch.full((live,), work.context, dtype=torch.int64)

    def step(mode: TreeMaskMode, mask: Tensor, *, fill_prefix: bool = True) -> Any:
        return build_tree_from_parents(
            parents, seq_lens, mask, num_draft_tokens=n, tree_mask_mode=mode,
            fill_prefix=fill_prefix,
        )  # fmt: skip

    buffers = {}
    for mode in TreeMaskMode:
        numel, dtype = mask_storage(mode, work.max_bs, n, work.max_context_len)
        buffers[mode] = torch.zeros(int(numel), dtype=dtype)
    numel = buffers[FULL].numel()

    def built(mode: TreeMaskMode) -> tuple[Any, Tensor]:
        return step(mode, buffers[mode]), buffers[mode]

    def filled() -> tuple[Any, Tensor]:
        mask = buffers[FULL].fill_(True)
        return step(FULL, mask, fill_prefix=False), mask

    def allocated() -> tuple[Any, Tensor]:
        mask = torch.full((numel,), fill_value=True)
        return step(FULL, mask, fill_prefix=False), mask

    def contender(
        name: str, mode: TreeMaskMode, run: Callable[[], tuple[Any, Tensor]]
    ) -> Contender:
        def results() -> Any:
            buffers[FULL].zero_()
            links, mask = run()
            return [*links, _cells(mode, mask, live, n, work.context)]

        return Contender(name, run, results)

    contenders = (
        contender("QLEN_ONLY_BITPACKING", PACKED, lambda: built(PACKED)),
        contender("QLEN_ONLY", QLEN, lambda: built(QLEN)),
        contender("FULL_MASK", FULL, lambda: built(FULL)),
        contender("FULL_MASK, filled", FULL, filled),
        contender("FULL_MASK, allocated", FULL, allocated),
    )
    expected = walked(parents.tolist(), work.context)
    return Case("verify mask", str(work), contenders, lambda: expected, "a walk in Python")


def _cells(mode: TreeMaskMode, mask: Tensor, live: int, n: int, context: int) -> Tensor:
    """Spread a mask out to (live, n, context + n) bool."""
    if mode is FULL:
        rows = mask[: int(live_mask_numel(FULL, live, n, live * context))]
        return rows.view(live, n, context + n).clone()
    if mode is PACKED:
        width = int(tree_row_numel(PACKED, n))
        bits = mask[: live * n * width].view(live, n, width, 1) >> torch.arange(8)
        block = (bits & 1).flatten(2)[:, :, :n].bool()
    else:
        block = mask[: live * n * n].view(live, n, n)
    return torch.cat([torch.ones(live, n, context, dtype=torch.bool), block], dim=2)


def walked(parents: list[list[int]], context: int) -> list[Tensor]:
    """Lay out trees by walks from each node to the root.

    Args:
        parents: of each node of each tree.
        context: committed tokens of every request.

    Returns:
        positions (B * n,), retrieve_index, retrieve_next_token and retrieve_next_sibling (B, n),
        and the cells of a FULL_MASK (B, n, context + n) bool.
    """
    live, n = len(parents), len(parents[0])
    block = torch.zeros(live, n, n, dtype=torch.bool)
    token, sibling = (torch.full((live, n), -1) for _ in range(2))
    for b, row in enumerate(parents):
        for node in range(n):
            walk = node
            while walk > 0:
                block[b, node, walk] = True
                walk = row[walk]
            block[b, node, 0] = True
        for node in range(n - 1, 0, -1):
            sibling[b, node] = token[b, row[node]]
            token[b, row[node]] = node
    positions = (context + block.sum(2) - 1).flatten()
    index = torch.arange(live * n).view(live, n)
    prefix = torch.ones(live, n, context, dtype=torch.bool)
    return [positions, index, token, sibling, torch.cat([prefix, block], dim=2)]
