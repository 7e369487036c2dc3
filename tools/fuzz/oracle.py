"""Whether a mask may have a smaller layout, found out by running with that layout.

A program runs eagerly while every mask in question is given the other layout: its allocation, its
builds, and what its readers are told. The buffer keeps its declared size, so that sizes taken
from it stay, but holds garbage past the cells of the smaller layout. If the results are the same
for every garbage, nothing in the program can tell the difference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torchvm.tools.fuzz.readers import CONTRACTS, FULL, PACKED, QLEN, cells_needed

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["Layouts", "Recorder", "Relayout"]

ALLOC = "torchvm::alloc_verify_mask"
BUILDS = ("torchvm::build_tree", "torchvm::build_tree_from_parents")
# Their results take the dtype of the mask, which packing changes.
FACTORIES = frozenset(
    f"aten::{name}"
    for kind in ("zeros", "ones", "empty", "full")
    for name in (f"new_{kind}", f"{kind}_like")
)


class Layouts(NamedTuple):
    """How masks are laid out in a run; a mask is known by its `max_context_len`."""

    modes: dict[int, int]
    unfilled: frozenset[int] = frozenset()
    """Masks of which no build fills the prefix."""
    chained: frozenset[float] = frozenset()
    """Tags of the reader calls that are told of a causal chain."""

    def compact(self, key: int) -> Layouts:
        """Make one more mask QLEN_ONLY."""
        return Layouts({**self.modes, key: QLEN}, self.unfilled - {key}, self.chained)


class _Watch(TorchDispatchMode):
    """Sees every op, those inside functionalization wrappers and branches too."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.higher_order.cond:  # It runs under no mode.
            with self:
                condition, taken, otherwise, operands = args
                return (taken if condition else otherwise)(*operands)
        if isinstance(func, torch._ops.HigherOrderOperator):
            with self:
                key = torch._C.DispatchKey.CompositeExplicitAutograd
                return func.dispatch(key, *args, **kwargs)
        name = func._schema.name
        if name == ALLOC or name in BUILDS or name in CONTRACTS:
            arguments = func._schema.arguments
            given = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
            missing = {a.name: a.default_value for a in arguments if a.name not in given}
            return self._watched(func, name, {**missing, **given})
        return self._other(func, name, args, kwargs)

    def _watched(self, func: Callable[..., Any], name: str, given: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _other(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        raise NotImplementedError


class Recorder(_Watch):
    """Records the layouts of a compiled run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modes: dict[int, int] = {}
        self.fills: dict[int, list[bool]] = {}
        self.chained: set[float] = set()
        self._masks: dict[int, int] = {}
        self._kept: list[Tensor] = []  # So that no other tensor gets their address.

    def _watched(self, func: Callable[..., Any], name: str, given: dict[str, Any]) -> Any:
        result = func(**given)
        if name == ALLOC:
            self.modes[given["max_context_len"]] = given["tree_mask_mode"]
            self._follow(result, given["max_context_len"])
        elif name in BUILDS:
            key = self._masks.get(_address(given["tree_mask"]))
            if key is not None:
                self.fills.setdefault(key, []).append(given["fill_prefix"])
        elif any(c.causal_arg and given[c.causal_arg] for c in CONTRACTS[name]):
            self.chained.add(_tag(given))
        return result

    def _other(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        result = func(*args, **kwargs)
        if name == "aten::clone" and _address(args[0]) in self._masks:
            self._follow(result, self._masks[_address(args[0])])
        return result

    def _follow(self, mask: Tensor, key: int) -> None:
        self._masks[_address(mask)] = key
        self._kept.append(mask)


class _Held(NamedTuple):
    """A mask whose layout differs from what the program says."""

    key: int
    mode: int
    buffer: Tensor
    numel: int
    """Elements of the smaller layout, at the front of `buffer`."""
    dtype: torch.dtype
    """What the program asked for."""

    def tight(self, argument: Tensor) -> Tensor:
        """Cut the whole buffer to the smaller layout; leave any part of it."""
        return argument[: self.numel] if argument.shape == self.buffer.shape else argument


class Relayout(_Watch):
    """Gives the masks of an eager run other layouts and garbage where those have no cells.

    A call that cannot have the layout, because its op does not take the mode or finds the buffer
    too small, gets garbage instead: the compiled program may have dropped it as dead.
    """

    def __init__(self, layouts: Layouts, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._layouts = layouts
        self._generator = torch.Generator().manual_seed(seed)
        self._held: dict[int, _Held] = {}

    def _watched(self, func: Callable[..., Any], name: str, given: dict[str, Any]) -> Any:
        if name == ALLOC:
            return self._alloc(func, given)
        if name in BUILDS:
            return self._build(func, given)
        told = self._told(name, given)
        try:
            if told is not None:
                return func(**told)
        except ValueError:
            pass
        masks = {c.arg: given[c.arg] for c in CONTRACTS[name]}
        held = {arg: h for arg, mask in masks.items() if (h := self._held.get(_address(mask)))}
        garbage = {arg: self._garbage(h.buffer.numel(), h.dtype) for arg, h in held.items()}
        return func(**{**given, **garbage})

    def _other(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        held = self._held.get(_address(args[0])) if name in FACTORIES else None
        if held is not None and kwargs.get("dtype") is None and args[0].dtype is not held.dtype:
            kwargs = {**kwargs, "dtype": held.dtype}
        return func(*args, **kwargs)

    def _alloc(self, func: Callable[..., Any], given: dict[str, Any]) -> Tensor:
        key, declared = given["max_context_len"], given["tree_mask_mode"]
        mask: Tensor = func(**given)
        mode = self._layouts.modes.get(key, declared)
        if mode != declared:
            numel = cells_needed(mode, [0] * given["bs"], given["num_draft_tokens"])
            buffer = self._garbage(mask.numel(), torch.uint8 if mode == PACKED else mask.dtype)
            buffer[:numel] = 0
            self._held[_address(buffer)] = _Held(key, mode, buffer, numel, mask.dtype)
            return buffer
        if key in self._layouts.unfilled:
            self._held[_address(mask)] = _Held(key, mode, mask, mask.numel(), mask.dtype)
        return mask

    def _build(self, func: Callable[..., Any], given: dict[str, Any]) -> Any:
        mask = given["tree_mask"]
        held = self._held.get(_address(mask))
        if held is None:
            return func(**given)
        if held.key in self._layouts.unfilled:
            return self._build_unfilled(func, given)
        try:
            return func(**{**given, "tree_mask": held.tight(mask), "tree_mask_mode": held.mode})
        except ValueError:
            return func(**{**given, "tree_mask": self._garbage(mask.numel(), held.dtype)})

    def _build_unfilled(self, func: Callable[..., Any], given: dict[str, Any]) -> Any:
        mask, n, start = given["tree_mask"], given["num_draft_tokens"], 0
        result = func(**given)
        if given["tree_mask_mode"] == FULL:
            for length in given["seq_lens"].tolist():
                for _ in range(n):
                    mask[start : start + length] = self._garbage(length, mask.dtype)
                    start += length + n
        return result

    def _told(self, name: str, given: dict[str, Any]) -> dict[str, Any] | None:
        """What a reader is given in the other layouts; None when it cannot be."""
        told: dict[str, Any] = {}
        for contract in CONTRACTS[name]:
            if contract.causal_arg and _tag(given) in self._layouts.chained:
                told[contract.causal_arg] = True
            held = self._held.get(_address(given[contract.arg]))
            if held is None or contract.mode_arg is None or held.key in self._layouts.unfilled:
                continue
            modes = (0, 1) if contract.modes is None else contract.modes
            if held.mode not in modes or told.get(contract.mode_arg, held.mode) != held.mode:
                return None
            told[contract.mode_arg] = held.mode
            told[contract.arg] = held.tight(given[contract.arg])
        return {**given, **told}

    def _garbage(self, numel: int, dtype: torch.dtype) -> Tensor:
        high = 2 if dtype is torch.bool else 256
        return torch.randint(0, high, (numel,), generator=self._generator).to(dtype)


def _address(value: Any) -> int:
    """Tell one allocation from another."""
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else 0


def _tag(given: dict[str, Any]) -> float:
    tag: float = given.get("tag", given.get("scale", 0.0))
    return tag
