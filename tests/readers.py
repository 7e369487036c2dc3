"""Mask readers for the tests, written from the layouts' definition; slow on purpose.

Each records nothing and returns numbers that depend on every cell its contract says it reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchvm.ops.contracts import MaskRead, register_mask_reader

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["READERS"]

_library = torch.library.Library("torchvm_tests", "FRAGMENT")
READERS = torch.ops.torchvm_tests


def _block(mask: torch.Tensor, seq_lens: torch.Tensor, n: int, mask_mode: int) -> torch.Tensor:
    """Weighted sum of every tree row, (B, n) float32."""
    if mask_mode == 2:
        mask = _unpacked(mask, len(seq_lens), n)
    out = torch.zeros(len(seq_lens), n)
    weights = 2.0 ** torch.arange(n)
    start = 0
    for b, length in enumerate(seq_lens.tolist()):
        prefix = length if mask_mode == 0 else 0
        for i in range(n):
            row = mask[start + prefix : start + prefix + n]
            out[b, i] = (row.to(torch.float32) * weights).sum()
            start += prefix + n
    return out


def _unpacked(mask: torch.Tensor, bs: int, n: int) -> torch.Tensor:
    """One cell an element, from bit rows."""
    row_bytes = next((s for limit, s in ((8, 1), (16, 2), (32, 4)) if n <= limit), -(-n // 64) * 8)
    rows = mask[: bs * n * row_bytes].view(bs * n, row_bytes, 1)
    bits = (rows >> torch.arange(8)) & 1
    return bits.reshape(bs * n, row_bytes * 8)[:, :n].reshape(-1)


def _block_causal(
    mask: torch.Tensor | None, seq_lens: torch.Tensor, n: int, mask_mode: int, causal: bool
) -> torch.Tensor:
    if causal:  # Row i of a chain is ones up to i.
        return (2.0 ** torch.arange(1, n + 1) - 1).expand(len(seq_lens), n).contiguous()
    assert mask is not None
    return _block(mask, seq_lens, n, mask_mode)


def _block_causal_untold(
    mask: torch.Tensor | None, seq_lens: torch.Tensor, n: int, causal: bool
) -> torch.Tensor:
    return _block_causal(mask, seq_lens, n, 0, causal)


def _block_out(
    mask: torch.Tensor, seq_lens: torch.Tensor, n: int, mask_mode: int, result: torch.Tensor
) -> None:
    result.copy_(_block(mask, seq_lens, n, mask_mode))


def _block_full_only(mask: torch.Tensor, seq_lens: torch.Tensor, n: int) -> torch.Tensor:
    return _block(mask, seq_lens, n, 0)


def _count(mask: torch.Tensor, scale: int) -> torch.Tensor:
    return (mask.to(torch.float32).sum() * scale + mask.numel()).reshape(1)


def _by_topk(mask: torch.Tensor, x: torch.Tensor, topk: int) -> torch.Tensor:
    return x * 2 if topk == 1 else x * 2 + _count(mask, 1)


def _by_topk_told(mask: torch.Tensor, x: torch.Tensor, topk: int, mask_mode: int) -> torch.Tensor:
    return _by_topk(mask, x, topk)


def _scale(mask: torch.Tensor, scale: int) -> None:
    mask.mul_(scale)


def _rows(mask: torch.Tensor, seq_lens: torch.Tensor, n: int, *_: object) -> torch.Tensor:
    return torch.empty(seq_lens.shape[0], n)


def _define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, kernel, "CPU")
    torch.library.register_fake(f"torchvm_tests::{name}", fake, lib=_library)


_ROWS = "Tensor mask, Tensor seq_lens, SymInt n"
_define(f"block({_ROWS}, int mask_mode) -> Tensor", _block, _rows)
_define(f"block_any({_ROWS}, int mask_mode) -> Tensor", _block, _rows)
_define(
    "block_causal(Tensor? mask, Tensor seq_lens, SymInt n, int mask_mode, bool causal) -> Tensor",
    _block_causal,
    _rows,
)
_define(
    "block_causal_untold(Tensor? mask, Tensor seq_lens, SymInt n, bool causal) -> Tensor",
    _block_causal_untold,
    _rows,
)
_define(f"block_fixed({_ROWS}, int mask_mode) -> Tensor", _block, _rows)
_define(f"block_out({_ROWS}, int mask_mode, Tensor(a!) result) -> ()", _block_out, lambda *_: None)
_define(f"block_full_only({_ROWS}) -> Tensor", _block_full_only, _rows)
_define("count(Tensor mask, int scale) -> Tensor", _count, lambda m, s: torch.empty(1))
_define(
    "pair(Tensor mask, Tensor other, int scale) -> Tensor",
    lambda mask, other, scale: _count(other, scale),
    lambda mask, other, scale: torch.empty(1),
)
_define("unknown(Tensor mask, int scale) -> Tensor", _count, lambda m, s: torch.empty(1))
_define(
    "by_topk(Tensor mask, Tensor x, int topk) -> Tensor",
    _by_topk,
    lambda m, x, topk: torch.empty_like(x),
)
_define(
    "by_topk_told(Tensor mask, Tensor x, int topk, int mask_mode) -> Tensor",
    _by_topk_told,
    lambda m, x, topk, mask_mode: torch.empty_like(x),
)

_define(
    "scale_(Tensor(a!) mask, int scale) -> ()",
    _scale,
    lambda mask, scale: None,
)

for _name in ("block", "block_out"):
    register_mask_reader(
        f"torchvm_tests::{_name}", arg="mask", reads=MaskRead.TREE_BLOCK, mode_arg="mask_mode"
    )
register_mask_reader(
    "torchvm_tests::block_fixed",
    arg="mask",
    reads=MaskRead.TREE_BLOCK,
    mode_arg="mask_mode",
    modes=[0],
)
register_mask_reader(
    "torchvm_tests::block_any",
    arg="mask",
    reads=MaskRead.TREE_BLOCK,
    mode_arg="mask_mode",
    modes=[0, 1, 2],
)


def _unless_causal(causal: bool, **_: object) -> MaskRead:
    return MaskRead.NOTHING if causal else MaskRead.TREE_BLOCK


register_mask_reader(
    "torchvm_tests::block_causal",
    arg="mask",
    reads=_unless_causal,
    mode_arg="mask_mode",
    causal_arg="causal",
)
register_mask_reader(
    "torchvm_tests::block_causal_untold", arg="mask", reads=_unless_causal, causal_arg="causal"
)
register_mask_reader("torchvm_tests::block_full_only", arg="mask", reads=MaskRead.TREE_BLOCK)
register_mask_reader("torchvm_tests::pair", arg="mask", reads=MaskRead.NOTHING)
register_mask_reader("torchvm_tests::count", arg="mask", reads=MaskRead.FULL)


def _reads_by_topk(topk: int, **_: object) -> MaskRead:
    return MaskRead.NOTHING if topk == 1 else MaskRead.FULL


register_mask_reader("torchvm_tests::by_topk", arg="mask", reads=_reads_by_topk)
register_mask_reader(
    "torchvm_tests::by_topk_told", arg="mask", reads=_reads_by_topk, mode_arg="mask_mode"
)
