"""What each op reads of a verify mask, and which ops build one.

A contract is the only thing the passes know about an op; an op without one reads everything.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchvm.ops.layout import TreeMaskMode, tree_mode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = [
    "BUILDERS",
    "MaskBuilder",
    "MaskRead",
    "MaskReader",
    "mask_readers",
    "register_mask_reader",
]


class MaskRead(IntEnum):
    """How much of a mask an op reads, from least to most."""

    NOTHING = 0
    """No cell; an op without a mode argument does not check the mask's size either."""
    TREE_BLOCK = 1
    """Only the n x n block of each request, never the prefix columns."""
    FULL = 2
    """Anything."""


class MaskBuilder(NamedTuple):
    """The argument names of an op that writes a mask in place."""

    mask_arg: str
    mode_arg: str
    num_draft_tokens_arg: str
    batch_arg: str
    """A tensor whose first dimension is the batch size."""


class MaskReader(NamedTuple):
    """A contract: what an op reads of the mask in argument `arg`."""

    op: str
    arg: str
    reads: MaskRead | Callable[..., MaskRead]
    mode_arg: str | None
    modes: frozenset[TreeMaskMode]
    causal_arg: str | None

    def read(self, constants: dict[str, Any]) -> MaskRead:
        """Return what a call with these constant arguments reads.

        Args:
            constants: the call's arguments that are plain Python values, by name, schema defaults
                included. A callable `reads` that raises or returns something else means FULL.
        """
        if isinstance(self.reads, MaskRead):
            return self.reads
        try:
            return MaskRead(self.reads(**constants))
        except Exception:
            return MaskRead.FULL


BUILDERS: dict[str, MaskBuilder] = {
    name: MaskBuilder("tree_mask", "tree_mask_mode", "num_draft_tokens", "seq_lens")
    for name in ("torchvm::build_tree", "torchvm::build_tree_from_parents")
}

_READERS: dict[str, dict[str, MaskReader]] = {}


def register_mask_reader(
    op: torch._ops.OpOverload | str,
    *,
    arg: str,
    reads: MaskRead | Callable[..., MaskRead],
    mode_arg: str | None = None,
    modes: Iterable[int] | None = None,
    causal_arg: str | None = None,
) -> None:
    """Say what an op reads of a verify mask; a second contract for the same argument replaces it.

    Args:
        op: an `OpOverload`, or `"namespace::name"` (`"namespace::name.overload"` for another
            overload than `default`). The op need not exist yet.
        arg: name of the op's mask argument.
        reads: a `MaskRead`, or a callable that is given the call's constant arguments by name as
            keywords (schema defaults included, tensors and symbolic values left out) and returns
            one: `lambda topk, **_: MaskRead.NOTHING if topk == 1 else MaskRead.TREE_BLOCK`.
            If it raises, the read is FULL.
        mode_arg: name of the int argument that tells the op the mask's `TreeMaskMode`. Every
            rewrite sets it, so the op always learns the final mode.
        modes: the modes that may be passed through `mode_arg`. Default: FULL_MASK and QLEN_ONLY
            with a `mode_arg`, FULL_MASK alone without.
        causal_arg: name of the bool argument that says "the tree is a chain, use no mask".

    Raises:
        TypeError: when `op`, `arg` or `reads` has the wrong type.
        ValueError: when an argument is not in the op's schema (if it is registered already), a
            mode is unknown, or `modes` names more than FULL_MASK without a `mode_arg`.
    """
    name = _op_name(op)
    if not isinstance(reads, MaskRead) and not callable(reads):
        raise TypeError(f"reads must be a MaskRead or a callable, got {reads!r}")
    for label, value in (("arg", arg), ("mode_arg", mode_arg), ("causal_arg", causal_arg)):
        if not isinstance(value, str) and (value is not None or label == "arg"):
            raise TypeError(f"{label} must be the name of an argument, got {value!r}")
    if modes is None:
        modes = [TreeMaskMode.FULL_MASK, *([TreeMaskMode.QLEN_ONLY] if mode_arg else [])]
    taken = frozenset(tree_mode(m) for m in modes)
    if mode_arg is None and taken - {TreeMaskMode.FULL_MASK}:
        raise ValueError(f"modes must be FULL_MASK alone without a mode_arg, got {sorted(taken)}")
    _check_schema(name, {"arg": arg, "mode_arg": mode_arg, "causal_arg": causal_arg})
    reader = MaskReader(name, arg, reads, mode_arg, taken, causal_arg)
    _READERS.setdefault(name, {})[arg] = reader


def mask_readers(op: torch._ops.OpOverload | str | None = None) -> tuple[MaskReader, ...]:
    """Return the contracts of one op, or of all ops, ordered by op and argument name."""
    names = sorted(_READERS) if op is None else [_op_name(op)]
    return tuple(c for name in names for _, c in sorted(_READERS.get(name, {}).items()))


def _op_name(op: torch._ops.OpOverload | str) -> str:
    """Return `"namespace::name"`, with `.overload` behind it unless that is `default`."""
    if isinstance(op, torch._ops.OpOverload):
        op = str(op.name())
    if not isinstance(op, str):
        raise TypeError(f'op must be an OpOverload or "namespace::name", got {op!r}')
    namespace, separator, rest = op.partition("::")
    if not (separator and namespace and rest):
        raise ValueError(f'op must be an OpOverload or "namespace::name", got {op!r}')
    return op.removesuffix(".default")


def _check_schema(name: str, arguments: dict[str, str | None]) -> None:
    """Raise ValueError if the op is registered and lacks one of the named arguments."""
    base, _, overload = name.partition(".")
    if not torch._C._dispatch_has_kernel(name):
        return
    schema = torch._C._get_schema(base, overload)
    known = [a.name for a in schema.arguments]
    for label, value in arguments.items():
        if value is not None and value not in known:
            raise ValueError(f"{label} must be an argument of {schema}, got {value!r}")
