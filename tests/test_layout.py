"""The size formulas, as numbers and as symbols."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests import oracle
from torchvm.ops.layout import (
    TreeMaskMode,
    live_mask_numel,
    mask_dtype,
    mask_storage,
    packed_row_bytes,
    request_offsets,
    tree_mask_numel,
    tree_mode,
    tree_row_numel,
)

FULL, QLEN, PACKED = TreeMaskMode


def test_modes_have_fixed_numbers() -> None:
    assert [(mode.name, int(mode)) for mode in TreeMaskMode] == [
        ("FULL_MASK", 0),
        ("QLEN_ONLY", 1),
        ("QLEN_ONLY_BITPACKING", 2),
    ]
    assert [tree_mode(value) for value in (0, 1, 2, PACKED)] == [FULL, QLEN, PACKED, PACKED]


@pytest.mark.parametrize("value", [-1, 3, True, 1.0, "FULL_MASK", None, torch.int64])
def test_other_modes_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"tree_mask_mode must be one of FULL_MASK \(0\), .*got"):
        tree_mode(value)


@pytest.mark.parametrize(
    ("mode", "bs", "n", "context", "numel"),
    [
        (FULL, 256, 4, 1_048_576, 1_073_745_920),
        (FULL, 256, 8, 1_048_576, 2_147_500_032),
        (FULL, 1, 1, 0, 1),
        (FULL, 0, 8, 99, 0),
        (QLEN, 256, 4, 1_048_576, 4096),
        (QLEN, 3, 33, 7, 3267),
        (PACKED, 256, 4, 1_048_576, 1024),
        (PACKED, 2, 65, 0, 2080),
    ],
)
def test_sizes(mode: TreeMaskMode, bs: int, n: int, context: int, numel: int) -> None:
    dtype = torch.uint8 if mode is PACKED else torch.bool
    assert mask_storage(mode, bs, n, context) == (numel, dtype)
    if mode is not PACKED:
        assert tree_mask_numel(mode, bs, n, context) == numel
    assert live_mask_numel(mode, bs, n, bs * context) == numel


def test_a_packed_mask_has_no_cells_to_count() -> None:
    with pytest.raises(NotImplementedError, match="use mask_storage"):
        tree_mask_numel(PACKED, 1, 8, 0)


def test_row_sizes() -> None:
    for n in range(1, 200):
        assert packed_row_bytes(n) == oracle.row_elements(oracle.PACKED, n)
        assert [tree_row_numel(mode, n) for mode in TreeMaskMode] == [n, n, packed_row_bytes(n)]
    assert [packed_row_bytes(n) for n in (8, 9, 16, 17, 32, 33, 64, 65, 1024)] == [
        1, 2, 2, 4, 4, 8, 8, 16, 128,
    ]  # fmt: skip


def test_live_sizes() -> None:
    assert live_mask_numel(FULL, 2, 8, 15) == 248
    assert [live_mask_numel(mode, 2, 8) for mode in TreeMaskMode] == [128, 128, 16]


def test_dtypes() -> None:
    assert mask_dtype(FULL, None) is mask_dtype(QLEN, torch.bool) is torch.bool
    assert mask_dtype(PACKED, None) is mask_dtype(FULL, torch.uint8) is torch.uint8
    with pytest.raises(ValueError, match=r"dtype must be torch.uint8 for QLEN_ONLY_BITPACKING"):
        mask_dtype(PACKED, torch.bool)
    with pytest.raises(ValueError, match=r"torch.bool or torch.uint8 for QLEN_ONLY, got torch.i"):
        mask_storage(QLEN, 1, 1, 1, torch.int32)


def test_offsets_are_int64() -> None:
    assert request_offsets(torch.tensor([5, 10]), 8).tolist() == [0, 104, 248]
    assert request_offsets(torch.tensor([], dtype=torch.int64), 8).tolist() == [0]
    large = request_offsets(torch.tensor([1_048_576] * 256), 8)
    assert int(large[-1]) == 2_147_500_032


@pytest.mark.parametrize("mode", list(TreeMaskMode))
def test_symbols(mode: TreeMaskMode) -> None:
    fake = FakeTensorMode(shape_env=ShapeEnv())
    bs, n, context = fake.from_tensor(torch.empty(3, 20, 11), static_shapes=False).shape
    numel, _ = mask_storage(mode, bs, n, context)
    assert isinstance(numel, torch.SymInt)
    assert numel == mask_storage(mode, 3, 20, 11)[0]
    assert live_mask_numel(mode, bs, n, bs * context) == numel
