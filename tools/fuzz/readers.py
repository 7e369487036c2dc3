"""Ops for random programs: readers with every kind of contract, and ops that write masks.

They are plain loops over Python numbers, written from the definition of the layouts. A reader's
result depends on every cell that its contract says it reads, and on no other. `tag` is only there
to tell one call from another.
"""

# ruff: noqa: ARG001, ARG005 - kernels and fakes have the arguments of their schemas
from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchvm.ops.contracts import MaskRead, register_mask_reader

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = [
    "CONTRACTS",
    "FULL",
    "NAMESPACE",
    "OPS",
    "PACKED",
    "QLEN",
    "Contract",
    "cells_needed",
    "choose",
]

NAMESPACE = "torchvm_fuzz"
OPS = getattr(torch.ops, NAMESPACE)
FULL, QLEN, PACKED = 0, 1, 2
NOTHING, TREE_BLOCK = MaskRead.NOTHING, MaskRead.TREE_BLOCK

_library = torch.library.Library(NAMESPACE, "FRAGMENT")


class Contract(NamedTuple):
    """What an op says of one of its mask arguments."""

    reads: MaskRead | Callable[..., MaskRead]
    arg: str = "mask"
    mode_arg: str | None = None
    modes: tuple[int, ...] | None = None
    causal_arg: str | None = None


CONTRACTS: dict[str, tuple[Contract, ...]] = {
    "torchvm::tree_attention": (
        Contract(
            TREE_BLOCK, "tree_mask", "tree_mask_mode", (FULL, QLEN, PACKED), "is_causal_chain"
        ),
    ),
    "torchvm::mask_convert": (Contract(TREE_BLOCK, mode_arg="from_mode", modes=(FULL, QLEN)),),
}
"""The contracts of every op that a random program may use."""


def choose(
    condition: Tensor,
    taken: Callable[..., Any],
    otherwise: Callable[..., Any],
    operands: tuple[Any, ...],
) -> Any:
    """Run `torch.cond`, or without a compiler the branch itself: an eager cond would compile."""
    if torch.compiler.is_compiling():
        return torch.cond(condition, taken, otherwise, operands)
    return (taken if condition else otherwise)(*operands)


def cells_needed(mode: int, lengths: list[int], n: int) -> int:
    """Elements of a buffer that a batch takes."""
    prefix = sum(lengths) if mode == FULL else 0
    return n * (prefix + len(lengths) * (_row_bytes(n) if mode == PACKED else n))


def _row_bytes(n: int) -> int:
    for limit in (8, 16, 32):
        if n <= limit:
            return limit // 8
    return -(-n // 64) * 8


def _block(mask: Tensor, seq_lens: Tensor, n: int, mode: int, tag: int = 0) -> Tensor:
    """Weigh every tree row: (B, n) float32, exact for any bytes."""
    cells, lengths = mask.tolist(), seq_lens.tolist()
    needed = cells_needed(mode, lengths, n)
    if min(lengths, default=0) < 0 or len(cells) < needed:
        raise ValueError(f"mask must be of at least {needed} elements, got {len(cells)}")
    rows = []
    start = 0
    for length in lengths:
        for _ in range(n):
            start += length if mode == FULL else 0
            if mode == PACKED:
                row = [int(cells[start + j // 8]) >> j % 8 & 1 for j in range(n)]
            else:
                row = [int(cell) for cell in cells[start : start + n]]
            rows.append(sum(cell << j for j, cell in enumerate(row)))
            start += _row_bytes(n) if mode == PACKED else n
    return torch.tensor(rows, dtype=torch.float32).view(len(lengths), n)


def _full(mask: Tensor, *_: int) -> Tensor:
    cells = [int(cell) for cell in mask.tolist()]
    weighed = sum(cell * (i % 7 + 1) for i, cell in enumerate(cells))
    return torch.tensor([float(weighed), float(len(cells))])


def _block_causal(
    mask: Tensor | None, seq_lens: Tensor, n: int, mode: int, causal: bool, tag: int
) -> Tensor:
    if causal:  # Row i of a chain is ones up to i.
        return (2.0 ** torch.arange(1, n + 1) - 1).expand(len(seq_lens), n).contiguous()
    if mask is None:
        raise ValueError("mask must be a tensor, got None")
    return _block(mask, seq_lens, n, mode)


def _nothing_told(mask: Tensor, seq_lens: Tensor, n: int, mode: int, tag: int) -> Tensor:
    """Read no cell, yet refuse a mask that is too small for the mode it is told."""
    needed = cells_needed(mode, seq_lens.tolist(), n)
    if mask.numel() < needed:
        raise ValueError(f"mask must be of at least {needed} elements, got {mask.numel()}")
    return torch.full((len(seq_lens), n), float(tag))


def _block_out(
    mask: Tensor, seq_lens: Tensor, n: int, mode: int, tag: int, result: Tensor
) -> None:
    result.copy_(_block(mask, seq_lens, n, mode))


def _block_both(
    mask: Tensor,
    seq_lens: Tensor,
    n: int,
    mode: int,
    tag: int,
    result: Tensor,
    extra: Tensor | None,
) -> Tensor:
    rows = _block(mask, seq_lens, n, mode)
    result.copy_(rows)
    if extra is not None:
        extra.add_(tag)
    return rows + 1


def _by_default(
    mask: Tensor, seq_lens: Tensor, n: int, prefix: bool = False, mode: int = 0, tag: int = 0
) -> Tensor:
    rows = _block(mask, seq_lens, n, mode)
    return rows + _full(mask)[0] if prefix else rows


def _scale(mask: Tensor, by: int, tag: int) -> None:
    mask.copy_(mask * by)


def _swap(first: Tensor, second: Tensor, tag: int) -> None:
    held = first[:3].clone()
    first[:3] = second[:3]
    second[:3] = held


def _touch(mask: Tensor, seq_lens: Tensor, n: int, mode: int, tag: int) -> Tensor:
    rows = _block(mask, seq_lens, n, mode)
    mask[:2] = 1
    return rows


def _rows(mask: Any, seq_lens: Tensor, n: int, *_: Any) -> Tensor:
    return torch.empty(seq_lens.shape[0], n)


def _two_numbers(*_: Any) -> Tensor:
    return torch.empty(2)


def _like_x(mask: Any, x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _define(
    schema: str, kernel: Callable[..., Any], fake: Callable[..., Any], *contracts: Contract
) -> None:
    name = f"{NAMESPACE}::{schema.partition('(')[0]}"
    _library.define(schema)
    _library.impl(name.partition("::")[2], kernel, "CPU")
    torch.library.register_fake(name, fake, lib=_library)
    CONTRACTS[name] = contracts
    for contract in contracts:
        register_mask_reader(name, **contract._asdict())


def _nothing_if_causal(causal: bool, **_: object) -> MaskRead:
    return MaskRead.NOTHING if causal else MaskRead.TREE_BLOCK


def _full_above_one(topk: int, **_: object) -> MaskRead:
    return MaskRead.NOTHING if topk == 1 else MaskRead.FULL


def _block_above_one(topk: int, **_: object) -> MaskRead:
    return MaskRead.NOTHING if topk == 1 else MaskRead.TREE_BLOCK


def _full_with_prefix(prefix: bool, **_: object) -> MaskRead:
    return MaskRead.FULL if prefix else MaskRead.TREE_BLOCK


def _nothing_below_three(num_draft_tokens: int, **_: object) -> MaskRead:
    return MaskRead.NOTHING if num_draft_tokens < 3 else MaskRead.TREE_BLOCK


def _raises(**_: object) -> MaskRead:
    raise RuntimeError


_MASK, _BATCH = "Tensor mask", "Tensor seq_lens, SymInt num_draft_tokens"
_TOLD = "int mask_mode, int tag"
_told = Contract(TREE_BLOCK, mode_arg="mask_mode")

_define(f"block({_MASK}, {_BATCH}, {_TOLD}) -> Tensor", _block, _rows, _told)
_define(
    f"block_any({_MASK}, {_BATCH}, {_TOLD}) -> Tensor",
    _block,
    _rows,
    _told._replace(modes=(FULL, QLEN, PACKED)),
)
_define(
    f"block_fixed({_MASK}, {_BATCH}, {_TOLD}) -> Tensor",
    _block,
    _rows,
    _told._replace(modes=(FULL,)),
)
_define(
    f"block_packs({_MASK}, {_BATCH}, {_TOLD}) -> Tensor",
    _block,
    _rows,
    _told._replace(modes=(FULL, PACKED)),
)
_define(
    f"block_untold({_MASK}, {_BATCH}, int tag) -> Tensor",
    lambda mask, seq_lens, n, tag: _block(mask, seq_lens, n, FULL),
    _rows,
    Contract(TREE_BLOCK),
)
_define(
    f"block_causal(Tensor? mask, {_BATCH}, int mask_mode, bool causal, int tag) -> Tensor",
    _block_causal,
    _rows,
    Contract(
        _nothing_if_causal,
        mode_arg="mask_mode",
        modes=(FULL, QLEN, PACKED),
        causal_arg="causal",
    ),
)
_define(
    f"block_causal_untold({_MASK}, {_BATCH}, bool causal, int tag) -> Tensor",
    lambda mask, seq_lens, n, causal, tag: _block_causal(mask, seq_lens, n, FULL, causal, tag),
    _rows,
    Contract(_nothing_if_causal, causal_arg="causal"),
)
_define(
    f"block_out({_MASK}, {_BATCH}, {_TOLD}, Tensor(a!) result) -> ()",
    _block_out,
    lambda *_: None,
    _told,
)
_define(
    f"block_both({_MASK}, {_BATCH}, {_TOLD}, Tensor(a!) result, Tensor(b!)? extra) -> Tensor",
    _block_both,
    _rows,
    _told,
)
_define(
    "nothing(Tensor mask, Tensor x, int tag) -> Tensor",
    lambda mask, x, tag: x * tag,
    _like_x,
    Contract(NOTHING),
)
_define(
    f"nothing_told({_MASK}, {_BATCH}, {_TOLD}) -> Tensor",
    _nothing_told,
    _rows,
    Contract(NOTHING, mode_arg="mask_mode"),
)
_define("full(Tensor mask, int tag) -> Tensor", _full, _two_numbers, Contract(MaskRead.FULL))
_define(
    f"full_told(Tensor mask, {_TOLD}) -> Tensor",
    _full,
    _two_numbers,
    Contract(MaskRead.FULL, mode_arg="mask_mode"),
)
_define(
    "by_topk(Tensor mask, Tensor x, int topk, int tag) -> Tensor",
    lambda mask, x, topk, tag: x * tag if topk == 1 else x * tag + _full(mask)[0],
    _like_x,
    Contract(_full_above_one),
)
_define(
    f"by_topk_told({_MASK}, {_BATCH}, int topk, {_TOLD}) -> Tensor",
    lambda mask, seq_lens, n, topk, mode, tag: (_nothing_told if topk == 1 else _block)(
        mask, seq_lens, n, mode, tag
    ),
    _rows,
    Contract(_block_above_one, mode_arg="mask_mode"),
)
_define(
    f"by_default({_MASK}, {_BATCH}, bool prefix=False, int mask_mode=0, int tag=0) -> Tensor",
    _by_default,
    _rows,
    Contract(_full_with_prefix, mode_arg="mask_mode"),
)
_define(
    f"by_size({_MASK}, {_BATCH}, {_TOLD}) -> Tensor",
    lambda mask, seq_lens, n, mode, tag: (_nothing_told if n < 3 else _block)(
        mask, seq_lens, n, mode, tag
    ),
    _rows,
    Contract(_nothing_below_three, mode_arg="mask_mode"),
)
_define(
    "raising(Tensor mask, int tag) -> Tensor",
    _full,
    _two_numbers,
    Contract(_raises),
)
_define("unknown(Tensor mask, int tag) -> Tensor", _full, _two_numbers)
_define(
    "unknown_list(Tensor[] masks, int tag) -> Tensor",
    lambda masks, tag: _full(torch.cat([mask.to(torch.uint8) for mask in masks])),
    _two_numbers,
)
_define(
    "pair(Tensor mask, Tensor other, int tag) -> Tensor",
    lambda mask, other, tag: _full(other),
    _two_numbers,
    Contract(NOTHING),
)
_define(
    f"two(Tensor mask, Tensor other, {_BATCH}, int mask_mode, int other_mode, int tag) -> Tensor",
    lambda mask, other, seq_lens, n, mode, other_mode, tag: (
        _block(mask, seq_lens, n, mode) + 64 * _block(other, seq_lens, n, other_mode)
    ),
    lambda mask, other, *rest: _rows(mask, *rest),
    _told,
    Contract(TREE_BLOCK, "other", "other_mode"),
)
_define(
    f"shared(Tensor mask, Tensor other, {_BATCH}, {_TOLD}) -> Tensor",
    lambda mask, other, seq_lens, n, mode, tag: (
        _block(mask, seq_lens, n, mode) + 64 * _block(other, seq_lens, n, mode)
    ),
    lambda mask, other, *rest: _rows(mask, *rest),
    _told,
    Contract(TREE_BLOCK, "other", "mask_mode"),
)
_define(
    f"shared_causal(Tensor? mask, Tensor? other, {_BATCH}, int mask_mode, int other_mode, "
    "bool causal, int tag) -> Tensor",
    lambda mask, other, seq_lens, n, mode, other_mode, causal, tag: (
        _block_causal(mask, seq_lens, n, mode, causal, tag)
        + 64 * _block_causal(other, seq_lens, n, other_mode, causal, tag)
    ),
    lambda mask, other, *rest: _rows(mask, *rest),
    Contract(_nothing_if_causal, mode_arg="mask_mode", causal_arg="causal"),
    Contract(_nothing_if_causal, "other", "other_mode", causal_arg="causal"),
)
_define(
    "scale_(Tensor(a!) mask, int by, int tag) -> ()",
    _scale,
    lambda *_: None,
)
_define("swap_(Tensor(a!) first, Tensor(b!) second, int tag) -> ()", _swap, lambda *_: None)
_define(
    f"touch_(Tensor(a!) mask, {_BATCH}, {_TOLD}) -> Tensor",
    _touch,
    _rows,
    _told,
)
