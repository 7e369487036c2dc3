"""Phase-level buffers: what the steps of one phase read, at addresses that never change.

A captured graph reads fixed memory. Each phase (TARGET_VERIFY, say) registers its slots once, for
the largest batch there can be; a step copies its values in and pads the rows behind them. A batch
that is larger than that gets fresh buffers, by a decision that has a name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

__all__ = ["Fill", "LedgerRow", "PhaseBuffers", "Room", "Rows", "Slot", "ledger_row"]


class Rows(StrEnum):
    """What a slot has a row for."""

    request = "request"
    token = "token"  # noqa: S105 - of a language model
    """Node of a tree: n per request."""


class Fill(StrEnum):
    """How a slot gets a step's values."""

    copied = "copied"
    """`fill` copies them in, and pads behind them."""
    in_place = "in-place"
    """Ops of the step write it; `fill` refuses it."""


class Room(StrEnum):
    """Where a batch runs."""

    captured = "CAPTURED"
    """In the buffers, which are as large as it, or larger."""
    fresh = "FRESH"
    """In buffers of its own: it is larger than what was captured."""


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """A named part of a phase's buffers."""

    name: str
    owner: str
    """Who it is accounted to."""
    rows: Rows
    dtype: torch.dtype
    trailing: tuple[int, ...] = ()
    """Shape of a row."""
    padding: int = 0
    """What rows past a step's batch hold."""
    fill: Fill = Fill.copied
    make: Callable[[int], Tensor] | None = None
    """Allocates the slot for max_bs requests, where it is not (rows, *trailing): an owner's."""


class LedgerRow(msgspec.Struct, frozen=True):
    """Who owns how much."""

    phase: str
    name: str
    owner: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


def ledger_row(phase: str, name: str, owner: str, tensor: Tensor) -> LedgerRow:
    """What a tensor adds to the ledger of a phase."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return LedgerRow(phase, name, owner, tuple(tensor.shape), dtype, tensor.nbytes)


class Held(NamedTuple):
    """A slot and its memory."""

    slot: Slot
    tensor: Tensor


class PhaseBuffers:
    """The slots of one phase.

    Args:
        phase: its name.
        max_bs: most requests of a batch, padding included.
        num_draft_tokens: n, tokens of a request.
        device: where they live.

    Raises:
        ValueError: for sizes below 1.
    """

    def __init__(
        self, phase: str, *, max_bs: int, num_draft_tokens: int, device: torch.device | str
    ) -> None:
        for name, size in (("max_bs", max_bs), ("num_draft_tokens", num_draft_tokens)):
            if size < 1:
                raise ValueError(f"{name} must be >= 1, got {size}")
        self.phase = phase
        self.max_bs = max_bs
        self.num_draft_tokens = num_draft_tokens
        self.device = torch.device(device)
        self._held: dict[str, Held] = {}
        self._said: set[int] = set()

    def register(self, slot: Slot) -> Tensor:
        """Allocate a slot, filled with its padding; what its owner makes is left as made.

        Raises:
            ValueError: when the name is taken, or the owner's tensor is elsewhere, of another
                dtype, or to be copied into.
        """
        if slot.name in self._held:
            owner = self._held[slot.name].slot.owner
            raise ValueError(f"slot {slot.name!r} must be registered once, and {owner!r} did")
        if slot.make is not None:
            tensor = slot.make(self.max_bs)
            found = (slot.fill, tensor.device.type, tensor.dtype)
            if found != (Fill.in_place, self.device.type, slot.dtype):
                raise ValueError(
                    f"slot {slot.name!r} must be written in place, on {self.device} and of "
                    f"{slot.dtype}, as its owner makes it, got {', '.join(map(str, found))}"
                )
        else:
            shape = (self._count(slot, self.max_bs), *slot.trailing)
            tensor = torch.full(shape, slot.padding, dtype=slot.dtype, device=self.device)
        self._held[slot.name] = Held(slot, tensor)
        return tensor

    def view(self, name: str, bs: int) -> Tensor:
        """Return the rows of the first `bs` requests; all of what an owner made.

        Raises:
            ValueError: for an unknown name, or more requests than there is room for.
        """
        slot, tensor = self._find(name)
        self._check_room(bs)
        return tensor if slot.make is not None else tensor[: self._count(slot, bs)]

    def fill(self, bs: int, padded_bs: int, **values: Tensor) -> dict[str, Tensor]:
        """Copy a step's values in and pad the rows behind them.

        Nothing is written unless everything fits.

        Args:
            bs: requests of the step; 0 is an idle batch, all padding.
            padded_bs: requests that the graph runs on.
            **values: by slot, of (rows of bs requests, *trailing); every copied slot.

        Returns:
            Views of (rows of padded_bs requests, *trailing), by slot.

        Raises:
            ValueError: when a slot is missing, unknown, written in place or of another shape or
                dtype, or the batch is larger than its padding or the buffers.
        """
        self._check_room(padded_bs)
        if not 0 <= bs <= padded_bs:
            raise ValueError(f"bs must be in [0, {padded_bs}], got {bs}")
        copied = {n for n, held in self._held.items() if held.slot.fill is Fill.copied}
        if set(values) != copied:
            raise ValueError(f"values must be of {sorted(copied)}, got {sorted(values)}")
        for name, value in values.items():
            slot, _ = self._held[name]
            shape = (self._count(slot, bs), *slot.trailing)
            if tuple(value.shape) != shape or value.dtype is not slot.dtype:
                raise ValueError(
                    f"{name} must be of shape {list(shape)} and {slot.dtype}, "
                    f"got {list(value.shape)} and {value.dtype}"
                )
        views = {}
        for name, value in values.items():
            slot, _ = self._held[name]
            views[name] = self.view(name, padded_bs)
            filled = self._count(slot, bs)
            views[name][:filled].copy_(value)
            views[name][filled:].fill_(slot.padding)
        return views

    def room(self, bs: int) -> Room:
        """Where a batch of `bs` requests runs."""
        return Room.captured if bs <= self.max_bs else Room.fresh

    def for_batch(self, bs: int) -> PhaseBuffers:
        """Return buffers that hold a batch: these, or fresh ones of the same slots.

        Warns:
            UserWarning: once for each size that needs fresh ones.
        """
        if self.room(bs) is Room.captured:
            return self
        if bs not in self._said:
            self._said.add(bs)
            warnings.warn(
                f"{Room.fresh}: {self.phase} was captured for {self.max_bs} requests, and a batch "
                f"of {bs} runs in buffers of its own, uncaptured",
                UserWarning,
                stacklevel=2,
            )
        fresh = PhaseBuffers(
            self.phase, max_bs=bs, num_draft_tokens=self.num_draft_tokens, device=self.device
        )
        for slot, _ in self._held.values():
            fresh.register(slot)
        return fresh

    def addresses(self) -> dict[str, int]:
        """Where each slot lies, for whoever must show that nothing moved."""
        return {name: held.tensor.data_ptr() for name, held in self._held.items()}

    def ledger(self) -> tuple[LedgerRow, ...]:
        """Who owns how many bytes, in the order of registration."""
        return tuple(
            ledger_row(self.phase, name, slot.owner, tensor)
            for name, (slot, tensor) in self._held.items()
        )

    def _count(self, slot: Slot, bs: int) -> int:
        return bs * (self.num_draft_tokens if slot.rows is Rows.token else 1)

    def _find(self, name: str) -> Held:
        if name not in self._held:
            raise ValueError(f"name must be one of {sorted(self._held)}, got {name!r}")
        return self._held[name]

    def _check_room(self, bs: int) -> None:
        if not 0 <= bs <= self.max_bs:
            raise ValueError(f"bs must be in [0, {self.max_bs}] in these buffers, got {bs}")
