"""Graphs that `torchvm.tools.fuzz` found to be rewritten wrongly, cut down to the point."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import torchvm
from tests.readers import READERS
from tests.verify_graphs import CONTEXT, FULL, Case
from torchvm import Reason
from torchvm.tools.fuzz.readers import OPS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["FOUND"]

FOUND: dict[str, Case] = {}


def _case(*reasons: Reason) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        FOUND[function.__name__] = Case(function, reasons, reasons)
        return function

    return add


def _alloc(parents: Tensor) -> Tensor:
    return torchvm.alloc_verify_mask(parents.shape[0], parents.shape[1], CONTEXT, FULL)


def _build(mask: Tensor, parents: Tensor, seq_lens: Tensor) -> Tensor:
    positions: Tensor = torch.ops.torchvm.build_tree_from_parents(
        parents, seq_lens, mask, parents.shape[1], FULL
    )[0]
    return positions


def _chain(mask: Tensor, parents: Tensor, seq_lens: Tensor) -> Tensor:
    bs, n = parents.shape
    selected = torch.arange(n - 1).expand(bs, n - 1).contiguous()
    parent_list = torch.arange(-1, 7).expand(bs, 8).contiguous()
    positions: Tensor = torch.ops.torchvm.build_tree(
        parent_list, selected, seq_lens, mask, 1, 8, n, FULL
    )[0]
    return positions


def _attend(mask: Tensor, seq_lens: Tensor, n: int) -> Tensor:
    bs = seq_lens.shape[0]
    query = torch.arange(bs * n * 4, dtype=torch.float32).view(bs, n, 1, 4) % 7
    cache = torch.arange(32 * 4, dtype=torch.float32).view(1, 32, 1, 4) % 5
    pages = torch.zeros(bs, 1, dtype=torch.int32)
    return torchvm.tree_attention(
        query, cache, cache, pages, seq_lens, mask, tree_mask_mode=FULL, is_causal_chain=False,
        scale=0.5,
    )  # fmt: skip


@_case(Reason.LENGTHS_DIFFER)
def causal_reader_of_other_lengths(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    positions = _chain(mask, parents, seq_lens)
    n = parents.shape[1]
    return positions, READERS.block_causal(mask, seq_lens // 2, n, FULL, False)


@_case(Reason.NODES_DIFFER)
def causal_reader_of_fewer_nodes(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    positions = _chain(mask, parents, seq_lens)
    return positions, _attend(mask, seq_lens, parents.shape[1] - 1)


@_case(Reason.BUILT_THROUGH_VIEW)
def causal_reader_of_a_mask_with_a_chain_in_its_middle(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    short = seq_lens.clamp(max=9)
    positions = _chain(mask[5:], parents, short)
    n = parents.shape[1]
    return positions, READERS.block_causal(mask, short, n, FULL, False)


@_case(Reason.COMPACTED)
def causal_reader_of_a_chain_of_fixed_size_that_is_cut(parents: Tensor, seq_lens: Tensor) -> Any:
    bs = parents.shape[0]
    mask = torchvm.alloc_verify_mask(bs, 3, CONTEXT, FULL)
    selected = torch.arange(2).expand(bs, 2).contiguous()
    parent_list = torch.empty(bs, 0, dtype=torch.int64)
    depth = 1  # Two drafts from one step: the second has no parent.
    positions = torch.ops.torchvm.build_tree(
        parent_list, selected, seq_lens, mask, 1, depth, 3, FULL
    )[0]
    return positions, READERS.block_causal(mask, seq_lens, 3, FULL, False)


@_case(Reason.NODES_DIFFER)
def reader_of_fewer_nodes(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    positions = _build(mask, parents, seq_lens)
    return positions, _attend(mask, seq_lens, parents.shape[1] - 1)


@_case(Reason.LENGTHS_DIFFER)
def reader_of_lengths_that_were_booleans(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    positions = _build(mask, parents, seq_lens)
    short = seq_lens.to(torch.bool).to(torch.int64)
    return positions, READERS.block(mask, short, parents.shape[1], FULL)


@_case(Reason.CAPACITY)
def reader_of_more_requests_than_allocated(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = torchvm.alloc_verify_mask(1, parents.shape[1], 100 * CONTEXT, FULL)
    before = _attend(mask, seq_lens, parents.shape[1])
    return before, _build(mask, parents[:1], seq_lens[:1])


@_case(Reason.RETURNED, Reason.PREFIX_SKIPPED)
def one_mode_argument_for_two_masks(parents: Tensor, seq_lens: Tensor) -> Any:
    kept, read = _alloc(parents), _alloc(parents)
    positions = _build(kept, parents, seq_lens) + _build(read, parents, seq_lens)
    rows = OPS.shared(kept, read, seq_lens, parents.shape[1], FULL, 1)
    return positions, rows, kept


@_case(Reason.COMPACTED, Reason.COMPACTED)
def one_causal_argument_for_a_chain_and_a_tree(parents: Tensor, seq_lens: Tensor) -> Any:
    chain, tree = _alloc(parents), _alloc(parents)
    positions = _chain(chain, parents, seq_lens) + _build(tree, parents, seq_lens)
    n = parents.shape[1]
    return positions, OPS.shared_causal(chain, tree, seq_lens, n, FULL, FULL, False, 1)
