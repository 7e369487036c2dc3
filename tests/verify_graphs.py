"""Functions that allocate, build and read verify masks in every way a graph can, for the passes.

Each takes `parents` (B, n) and `seq_lens` (B,) and takes its sizes from them, so that it compiles
with static and with dynamic shapes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

import torchvm
from tests.readers import READERS
from torchvm import Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["CASES", "CONTEXT", "Case", "batch"]

CONTEXT = 20
FULL, QLEN = 0, 1


class Case(NamedTuple):
    """A function and what the passes must say of each mask in it."""

    function: Callable[[Tensor, Tensor], Any]
    verdicts: tuple[Reason, ...]
    dynamic_verdicts: tuple[Reason, ...]


CASES: dict[str, Case] = {}


def _case(
    *verdicts: Reason, dynamic: tuple[Reason, ...] | None = None
) -> Callable[[Callable[[Tensor, Tensor], Any]], Callable[[Tensor, Tensor], Any]]:
    def add(function: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor, Tensor], Any]:
        CASES[function.__name__] = Case(function, verdicts, dynamic or verdicts)
        return function

    return add


def batch(bs: int = 2, n: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random well-formed parents (bs, n) and lengths (bs,)."""
    generator = torch.Generator().manual_seed(seed)
    parents = torch.zeros(bs, n, dtype=torch.int64)
    for j in range(1, n):
        parents[:, j] = torch.randint(0, j, (bs,), generator=generator)
    return parents, torch.randint(1, CONTEXT, (bs,), generator=generator)


def _alloc(parents: Tensor, mode: int = FULL, dtype: torch.dtype | None = None) -> Tensor:
    return torchvm.alloc_verify_mask(
        parents.shape[0], parents.shape[1], CONTEXT, mode, dtype=dtype
    )


def _build(mask: Tensor, parents: Tensor, seq_lens: Tensor, mode: int = FULL) -> Tensor:
    positions: Tensor = torch.ops.torchvm.build_tree_from_parents(
        parents, seq_lens, mask, parents.shape[1], mode
    )[0]
    return positions


@_case(Reason.ELIDED)
def dead(parents: Tensor, seq_lens: Tensor) -> Any:
    return _build(_alloc(parents), parents, seq_lens)


@_case(Reason.ELIDED)
def dead_uint8(parents: Tensor, seq_lens: Tensor) -> Any:
    return _build(_alloc(parents, dtype=torch.uint8), parents, seq_lens)


@_case(Reason.ELIDED)
def dead_after_two_builds(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    first = _build(mask, parents, seq_lens)
    return first + _build(mask, parents, seq_lens + 1)


@_case(Reason.ELIDED)
def dead_from_scores(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    bs, n = parents.shape
    selected = torch.arange(n - 1).expand(bs, n - 1).contiguous()
    parent_list = torch.empty(bs, 0, dtype=torch.int64)
    topk = 8  # Ids below it are children of the root.
    return torch.ops.torchvm.build_tree(
        parent_list, selected, seq_lens, mask, topk, 1, n, FULL, True
    )[0]


@_case(Reason.NO_CONTRACT)
def read_without_contract(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    return _build(mask, parents, seq_lens), READERS.unknown(mask, 1)


@_case(Reason.FULL_READ)
def read_in_full(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    return _build(mask, parents, seq_lens), READERS.count(mask, 1)


@_case(Reason.NO_CONTRACT)
def in_two_arguments_of_one_op(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    return _build(mask, parents, seq_lens), READERS.pair(mask, mask, 1)


@_case(Reason.ELIDED)
def contract_says_nothing(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    positions = _build(mask, parents, seq_lens)
    return READERS.by_topk(mask, positions.to(torch.float32), 1)


@_case(Reason.FULL_READ)
def contract_says_full_above_topk_1(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    positions = _build(mask, parents, seq_lens)
    return READERS.by_topk(mask, positions.to(torch.float32), 2)


@_case(Reason.ELIDED)
def contract_says_nothing_and_is_told(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    positions = _build(mask, parents, seq_lens)
    return READERS.by_topk_told(mask, positions.to(torch.float32), 1, FULL)


@_case(Reason.COMPACTED)
def tree_block_reader(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    positions = _build(mask, parents, seq_lens)
    return positions, READERS.block(mask, seq_lens, parents.shape[1], FULL)


@_case(Reason.COMPACTED)
def several_tree_block_readers(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    positions = _build(mask, parents, seq_lens)
    n = parents.shape[1]
    first = READERS.block(mask, seq_lens, n, FULL)
    return positions, first, READERS.block(mask, seq_lens, n, FULL) + first


@_case(Reason.COMPACTED)
def packing_readers(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    positions = _build(mask, parents, seq_lens)
    n = parents.shape[1]
    first = READERS.block_any(mask, seq_lens, n, FULL)
    return positions, first + READERS.block_any(mask, seq_lens, n, FULL)


@_case(Reason.COMPACTED)
def one_of_two_readers_packs(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    positions = _build(mask, parents, seq_lens)
    n = parents.shape[1]
    first = READERS.block_any(mask, seq_lens, n, FULL)
    return positions, first + READERS.block(mask, seq_lens, n, FULL)


@_case(Reason.COMPACTED)
def packing_reader_beside_a_use_of_the_dtype(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    positions = _build(mask, parents, seq_lens)
    rows = READERS.block_any(mask, seq_lens, parents.shape[1], FULL)
    return positions, rows, mask.new_ones(3)


def _chain(mask: Tensor, parents: Tensor, seq_lens: Tensor, mode: int = FULL) -> Tensor:
    bs, n = parents.shape
    selected = torch.arange(n - 1).expand(bs, n - 1).contiguous()
    depth = 8  # Of which a tree uses the first n - 1 levels.
    parent_list = torch.arange(-1, depth - 1).expand(bs, depth).contiguous()
    positions: Tensor = torch.ops.torchvm.build_tree(
        parent_list, selected, seq_lens, mask, 1, depth, n, mode, True
    )[0]
    return positions


@_case(Reason.CAUSAL_CHAIN)
def causal_reader_of_a_chain(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    positions = _chain(mask, parents, seq_lens)
    return positions, READERS.block_causal(mask, seq_lens, parents.shape[1], FULL, False)


@_case(Reason.CAUSAL_CHAIN)
def untold_causal_reader_of_a_chain(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    positions = _chain(mask, parents, seq_lens)
    return positions, READERS.block_causal_untold(mask, seq_lens, parents.shape[1], False)


@_case(Reason.ALREADY_COMPACT)
def untold_causal_reader_of_a_compact_chain(parents: Tensor, seq_lens: Tensor) -> Any:
    """It looks where a FULL_MASK has the tree, which is not where this mask has it."""
    bs, n = parents.shape
    mask = torchvm.alloc_verify_mask(bs * (1 + CONTEXT), n, CONTEXT, QLEN)
    positions = _chain(mask, parents, seq_lens, QLEN)
    return positions, READERS.block_causal_untold(mask, seq_lens, n, False)


@_case(Reason.COMPACTED)
def causal_reader_of_a_tree(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    positions = _build(mask, parents, seq_lens)
    return positions, READERS.block_causal(mask, seq_lens, parents.shape[1], FULL, False)


@_case(Reason.COMPACTED)
def causal_reader_of_a_beam(parents: Tensor, seq_lens: Tensor) -> Any:
    """Deep enough to be a chain, but its first two nodes are siblings."""
    mask = _alloc(parents)
    (bs, n), topk, depth = parents.shape, 2, 8
    selected = torch.arange(n - 1).expand(bs, n - 1).contiguous()
    width = topk * (depth - 1) + 1
    parent_list = torch.arange(-1, width - 1).expand(bs, width).contiguous()
    positions = torch.ops.torchvm.build_tree(
        parent_list, selected, seq_lens, mask, topk, depth, n, FULL, True
    )[0]
    return positions, READERS.block_causal(mask, seq_lens, n, FULL, False)


@_case(Reason.FULL_READ)
def chain_with_another_reader(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    positions = _chain(mask, parents, seq_lens)
    rows = READERS.block_causal(mask, seq_lens, parents.shape[1], FULL, False)
    return positions, rows, READERS.count(mask, 1)


@_case(Reason.PREFIX_SKIPPED)
def tree_block_reader_without_mode(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    positions = _build(mask, parents, seq_lens)
    return positions, READERS.block_full_only(mask, seq_lens, parents.shape[1])


@_case(Reason.PREFIX_SKIPPED)
def tree_block_reader_of_full_alone(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    positions = _build(mask, parents, seq_lens)
    return positions, READERS.block_fixed(mask, seq_lens, parents.shape[1], FULL)


@_case(Reason.COMPACTED)
def out_variant_reader(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    positions = _build(mask, parents, seq_lens)
    result = torch.empty(parents.shape)
    READERS.block_out(mask, seq_lens, parents.shape[1], FULL, result)
    return positions, result


@_case(Reason.LENGTHS_DIFFER)
def reader_with_other_lengths(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    positions = _build(mask, parents, seq_lens)
    return positions, READERS.block(mask, seq_lens // 2, parents.shape[1], FULL)


@_case(Reason.VIEWED)
def read_through_early_view(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    view = mask[2:9]
    return _build(mask, parents, seq_lens), view.sum()


@_case(Reason.VIEWED)
def read_by_aten(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    return _build(mask, parents, seq_lens), mask.sum()


@_case(Reason.RETURNED)
def returned(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    return _build(mask, parents, seq_lens), mask


@_case(Reason.COMPACTED)
def read_before_the_build(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    before = READERS.block(mask, seq_lens, parents.shape[1], FULL)
    return _build(mask, parents, seq_lens), before


@_case(Reason.COMPACTED)
def read_between_two_builds(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    first = _build(mask, parents, seq_lens)
    between = READERS.block(mask, seq_lens, parents.shape[1], FULL)
    longer = seq_lens + 1
    last = _build(mask, parents.flip(0), longer)
    return first, last, between, READERS.block(mask, longer, parents.shape[1], FULL)


@_case(Reason.BUILDS_DIFFER)
def second_build_of_fewer_requests(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    first = _build(mask, parents, seq_lens)
    fewer = seq_lens[:1]
    last = _build(mask, parents[:1], fewer)
    return first, last, READERS.block(mask, fewer, parents.shape[1], FULL)


@_case(Reason.BUILT_THROUGH_VIEW)
def built_through_a_slice(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    return _build(mask[5:], parents, seq_lens.clamp(max=9))


@_case(Reason.BUILT_THROUGH_VIEW)
def built_and_read_through_a_slice(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    short = seq_lens.clamp(max=9)
    positions = _build(mask[5:], parents, short)
    return positions, READERS.block(mask[5:], short, parents.shape[1], FULL)


@_case(Reason.NOT_AN_ALLOC)
def prefilled_in_place(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    mask.fill_(True)
    return _build(mask, parents, seq_lens)


@_case(Reason.NOT_AN_ALLOC)
def prefilled_by_full(parents: Tensor, seq_lens: Tensor) -> Any:
    bs, n = parents.shape
    mask = torch.full((bs * n * (CONTEXT + n),), fill_value=True)
    return _build(mask, parents, seq_lens)


@_case(Reason.OTHER_WRITE)
def written_by_another_op(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents, dtype=torch.uint8)
    positions = _build(mask, parents, seq_lens)
    READERS.scale_(mask, 3)
    return positions, READERS.count(mask, 1)


@_case(Reason.ELIDED)
def shape_is_used(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    return _build(mask, parents, seq_lens), mask.new_ones(mask.shape)


@_case(Reason.ELIDED)
def number_of_elements_is_used(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    return _build(mask, parents, seq_lens), torch.arange(mask.numel()), mask.numel() + 1


@_case(Reason.CAPACITY)
def alloc_for_fewer_than_built(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = torchvm.alloc_verify_mask(1, 1, 5000, FULL)
    return _build(mask, parents, seq_lens)


@_case(Reason.COMPACTED, dynamic=(Reason.CAPACITY,))
def alloc_of_fixed_size(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = torchvm.alloc_verify_mask(8, 8, CONTEXT, FULL)
    positions = _build(mask, parents, seq_lens)
    return positions, READERS.block(mask, seq_lens, parents.shape[1], FULL)


@_case(Reason.MODE_MISMATCH)
def alloc_and_build_disagree(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    return _build(mask, parents, seq_lens, QLEN)


@_case(Reason.MODE_MISMATCH)
def build_and_reader_disagree(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    positions = _build(mask, parents, seq_lens)
    return positions, READERS.block(mask, seq_lens, parents.shape[1], QLEN)


@_case(Reason.ALREADY_COMPACT)
def declared_compact(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents, QLEN)
    positions = _build(mask, parents, seq_lens, QLEN)
    return positions, READERS.block(mask, seq_lens, parents.shape[1], QLEN)


@_case(Reason.FULL_READ, Reason.ELIDED)
def two_masks_one_read(parents: Tensor, seq_lens: Tensor) -> Any:
    read, unread = _alloc(parents), _alloc(parents)
    positions = _build(read, parents, seq_lens) + _build(unread, parents, seq_lens)
    return positions, READERS.count(read, 1)


@_case(Reason.ELIDED)
def inside_cond(parents: Tensor, seq_lens: Tensor) -> Any:
    def tree(parents: Tensor, seq_lens: Tensor) -> Tensor:
        return _build(_alloc(parents), parents, seq_lens)

    def nothing(parents: Tensor, seq_lens: Tensor) -> Tensor:
        return torch.zeros(parents.shape[0] * parents.shape[1], dtype=torch.int64)

    return torch.cond(seq_lens.sum() > 0, tree, nothing, (parents, seq_lens))


@_case(Reason.HIGHER_ORDER)
def read_inside_cond(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _alloc(parents)
    positions = _build(mask, parents, seq_lens)
    counted = torch.cond(seq_lens.sum() > 0, lambda m: m.sum() + 1, lambda m: m.sum() - 1, (mask,))
    return positions, counted


@_case(Reason.COMPACTED)
def inside_activation_checkpoint(parents: Tensor, seq_lens: Tensor) -> Any:
    return checkpoint(tree_block_reader, parents, seq_lens, use_reentrant=False)
