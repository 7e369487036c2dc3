"""alloc_verify_mask and mask_convert: sizes, refusals, round trips between all layouts."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tests import oracle
from tests.buffers import MODES_AND_DTYPES
from tests.trees import SIZES, Batch, draw_batch, draw_sizes
from torchvm.ops.contracts import MaskRead, mask_readers
from torchvm.ops.mask import alloc_verify_mask, mask_convert

FULL, QLEN, PACKED = oracle.FULL, oracle.QLEN, oracle.PACKED
ALLOC = torch.ops.torchvm.alloc_verify_mask.default
CONVERT = torch.ops.torchvm.mask_convert.default
CONTEXT = 310


@pytest.mark.parametrize(("mode", "dtype"), MODES_AND_DTYPES)
def test_alloc(mode: int, dtype: torch.dtype) -> None:
    for bs, n in ((0, 1), (1, 9), (3, 33)):
        mask = alloc_verify_mask(bs, n, 7, mode, dtype=dtype)
        assert mask.shape == (oracle.numel(mode, [7] * bs, n),)
        assert mask.dtype is dtype
        assert not mask.any()
        torch.library.opcheck(ALLOC, (bs, n, 7, mode), {"dtype": dtype, "device": "cpu"})
    assert alloc_verify_mask(1, 1, 1, mode).dtype is (
        torch.uint8 if mode == PACKED else torch.bool
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 4, 9, FULL), "bs must be >= 0, got -1"),
        ((1, 0, 9, FULL), "num_draft_tokens must be >= 1, got 0"),
        ((1, 4, -9, FULL), "max_context_len must be >= 0, got -9"),
        ((1, 4, 9, 7), "tree_mask_mode must be one of .* got 7"),
    ],
)
def test_alloc_refuses(arguments: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        alloc_verify_mask(*arguments)
    with FakeTensorMode(), pytest.raises(ValueError, match=message):
        ALLOC(*arguments)


def test_alloc_refuses_dtypes() -> None:
    with pytest.raises(ValueError, match=r"dtype must be torch.uint8 for QLEN_ONLY_BITPACKING"):
        alloc_verify_mask(1, 4, 9, PACKED, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"dtype must be torch.bool or torch.uint8 for .*, got"):
        alloc_verify_mask(1, 4, 9, QLEN, dtype=torch.float32)


def test_alloc_costs_nothing_when_fake() -> None:
    with FakeTensorMode():
        mask = alloc_verify_mask(1 << 20, 1024, 1 << 20, FULL, device="cuda:1")
    assert mask.numel() > 1 << 50
    assert mask.device == torch.device("cuda:1")


def _mask(batch: Batch, mode: int, dtype: torch.dtype, slack: int) -> torch.Tensor:
    """The oracle's mask, then cells of garbage."""
    cells = oracle.mask(batch.trees(), batch.lengths, mode, fill_prefix=True).cells
    data = np.concatenate([cells, np.ones(slack, dtype=np.uint8)])
    return torch.from_numpy(data).view(dtype)


def _check(batch: Batch) -> None:
    """Convert between every two layouts."""
    seq_lens = torch.tensor(batch.lengths, dtype=torch.int64)
    for (source, dtype), to_mode in itertools.product(MODES_AND_DTYPES, (FULL, QLEN, PACKED)):
        mask = _mask(batch, source, dtype, slack=9)
        before = mask.clone()
        found = mask_convert(
            mask, seq_lens, from_mode=source, to_mode=to_mode,
            num_draft_tokens=batch.n, max_context_len=CONTEXT,
        )  # fmt: skip
        kind = torch.bool if source == PACKED else dtype
        assert found.dtype is (torch.uint8 if to_mode == PACKED else kind)
        wanted = np.zeros(oracle.numel(to_mode, [CONTEXT] * len(batch.lengths), batch.n), np.uint8)
        cells = oracle.mask(batch.trees(), batch.lengths, to_mode, fill_prefix=True).cells
        wanted[: cells.size] = cells
        np.testing.assert_array_equal(found.view(torch.uint8).numpy(), wanted)
        assert torch.equal(mask, before)
        assert found.data_ptr() != mask.data_ptr() or not found.numel()


def test_random_trees() -> None:
    rng = random.Random(20)  # noqa: S311
    for _ in range(60):
        _check(draw_batch(rng, *draw_sizes(rng, 40), rng.randint(0, 4)))


@pytest.mark.parametrize("n", [size for size in SIZES if size < 200])
def test_every_change_of_layout(n: int) -> None:
    _check(draw_batch(random.Random(n), 5, 6, n, 2))  # noqa: S311


def test_any_value_but_0_is_a_cell() -> None:
    seq_lens = torch.tensor([2])
    mask = torch.tensor([9, 0, 200, 0, 0, 1, 128, 255], dtype=torch.uint8)
    again = mask_convert(
        mask, seq_lens, from_mode=FULL, to_mode=FULL, num_draft_tokens=2, max_context_len=2
    )
    assert again.tolist() == [1, 0, 1, 0, 0, 1, 1, 1]
    block = mask_convert(
        mask, seq_lens, from_mode=FULL, to_mode=QLEN, num_draft_tokens=2, max_context_len=2
    )
    assert block.tolist() == [1, 0, 1, 1]


def test_contract() -> None:
    """The prefix is read where a FULL_MASK is copied, and nowhere else."""
    (reader,) = mask_readers(CONVERT)
    seq_lens = torch.tensor([3, 0])
    block = torch.tensor([1, 0, 1, 1]).bool().repeat(2)
    mask = mask_convert(
        block, seq_lens, from_mode=QLEN, to_mode=FULL, num_draft_tokens=2, max_context_len=9
    )
    poisoned = mask.clone()
    poisoned[[0, 1, 2, 5, 6, 7]] = False
    for to_mode in (FULL, QLEN, PACKED):
        first, second = (CONVERT(m, seq_lens, FULL, to_mode, 2, 9) for m in (mask, poisoned))
        reads = reader.read({"from_mode": FULL, "to_mode": to_mode})
        assert reads is (MaskRead.TREE_BLOCK if torch.equal(first, second) else MaskRead.FULL)
        assert (reads is MaskRead.FULL) == (to_mode == FULL)
    assert reader.modes == {FULL, QLEN}


@pytest.mark.parametrize("size", [0, 2])
@pytest.mark.parametrize(("source", "dtype"), MODES_AND_DTYPES)
def test_opcheck_of_conversion(source: int, dtype: torch.dtype, size: int) -> None:
    batch = draw_batch(random.Random(21), 2, 3, 6, size, longest=9)  # noqa: S311
    seq_lens = torch.tensor([batch.lengths, batch.lengths], dtype=torch.int64).t()[:, 0]
    mask = _mask(batch, source, dtype, slack=3)
    for to_mode in (FULL, QLEN, PACKED):
        torch.library.opcheck(CONVERT, (mask, seq_lens, source, to_mode, 6, 12))


@pytest.mark.parametrize("to_mode", [FULL, QLEN, PACKED])
def test_fake_keeps_sizes_symbolic(to_mode: int) -> None:
    fake = FakeTensorMode(shape_env=ShapeEnv())
    square, seq_lens = (
        fake.from_tensor(t, static_shapes=False)
        for t in (torch.empty(6, 11), torch.zeros(3, dtype=torch.int64))
    )
    mask = fake.from_tensor(torch.zeros(400, dtype=torch.bool), static_shapes=False)
    with fake:
        found = CONVERT(mask, seq_lens, FULL, to_mode, *square.shape)
    assert isinstance(found.shape[0], torch.SymInt)
    assert found.shape[0] == oracle.numel(to_mode, [11] * 3, 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": torch.zeros(27).bool()}, "mask must be of at least 28 elements .* got 27"),
        ({"mask": torch.zeros(1).bool()}, "mask must be of at least 8 elements .* got 1"),
        ({"mask": torch.zeros(8, 8).bool()}, r"mask must be 1-D, got \[8, 8\]"),
        ({"mask": torch.zeros(99)}, "mask must be torch.bool or torch.uint8 .* got torch.float32"),
        ({"from_mode": PACKED}, "mask must be torch.uint8 for QLEN_ONLY_BITPACKING, got torch.b"),
        ({"seq_lens": torch.tensor([[1, 2]])}, r"seq_lens must be 1-D, got \[1, 2\]"),
        ({"seq_lens": torch.tensor([-3, 2])}, "seq_lens must be >= 0, got -3"),
        ({"to_mode": FULL, "max_context_len": 7}, "max_context_len must be >= all .* 8, got 7"),
        ({"to_mode": 5}, "tree_mask_mode must be one of .* got 5"),
        ({"num_draft_tokens": 0}, "num_draft_tokens must be >= 1, got 0"),
    ],
)
def test_conversion_refuses(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "mask": torch.zeros(28).bool(), "seq_lens": torch.tensor([2, 8]), "from_mode": FULL,
        "to_mode": QLEN, "num_draft_tokens": 2, "max_context_len": 8, **changes,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        mask_convert(**given)
    with pytest.raises(ValueError, match=message):
        CONVERT(**given)
