"""Mask buffers that show what a build wrote, and how its results are compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from tests import oracle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

BEFORE, AFTER = 37, 53

MODES_AND_DTYPES = (
    (oracle.FULL, torch.bool),
    (oracle.FULL, torch.uint8),
    (oracle.QLEN, torch.bool),
    (oracle.QLEN, torch.uint8),
    (oracle.PACKED, torch.uint8),
)


class Buffer(NamedTuple):
    """A mask inside a larger allocation, every byte of which holds a poison."""

    whole: Tensor
    mask: Tensor
    """Larger than needed, at an odd offset."""
    poison: int

    def check(self, expected: oracle.Mask) -> None:
        """Require every cell that is to be written to be right, and every other to be as before.

        With two different poisons, a cell that is not written is wrong at one of them.
        """
        want = np.full(self.whole.numel(), self.poison, dtype=np.uint8)
        live = want[BEFORE : BEFORE + expected.cells.size]
        live[expected.written] = expected.cells[expected.written]
        np.testing.assert_array_equal(self.whole.view(torch.uint8).numpy(), want)


def poisoned(numel: int, dtype: torch.dtype, poison: int) -> Buffer:
    """A buffer for so many elements."""
    whole = torch.full((BEFORE + numel + AFTER,), poison, dtype=torch.uint8).view(dtype)
    return Buffer(whole, whole[BEFORE : BEFORE + numel + AFTER // 2], poison)


def poisons(dtype: torch.dtype) -> tuple[int, int]:
    """Two values that a buffer of this dtype may hold."""
    return (0, 1) if dtype is torch.bool else (0, 0xA5)


def check_outputs(
    found: Sequence[Tensor], expected: dict[str, list[list[int]] | list[int]]
) -> None:
    """Require outputs to be equal to the oracle's, by name and in its order."""
    assert len(found) == len(expected)
    for tensor, (name, want) in zip(found, expected.items(), strict=True):
        assert tensor.tolist() == want, name
