"""What the compile caches must know about the passes: everything a rewrite depends on."""

from __future__ import annotations

import hashlib
import inspect
from enum import Enum
from functools import cache
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch

import torchvm.ops
import torchvm.passes
from torchvm.ops.contracts import mask_readers
from torchvm.ops.library import NAMESPACE
from torchvm.ops.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["UnhashableError", "cache_key", "function_key"]


class UnhashableError(Exception):
    """A callable depends on a value that cannot be identified in another process."""


def cache_key(options: Sequence[object]) -> str | None:
    """Return a key of everything the passes depend on, the same in every process.

    It covers the sources of the passes and the ops, the schemas of the ops, torchvm's version,
    every registered contract (callables by code, defaults, closure and globals) and `options`.

    Args:
        options: plain values that change what the passes do.

    Returns:
        A hexadecimal digest, or None when a contract cannot be identified: then the caller must
        go without compile caches.
    """
    try:
        contracts = [
            (r.op, r.arg, _value_key(r.reads), r.mode_arg, sorted(r.modes), r.causal_arg)
            for r in mask_readers()
        ]
    except UnhashableError:
        return None
    text = repr((__version__, _source_digest(), _schemas(), contracts, list(options)))
    return hashlib.sha256(text.encode()).hexdigest()


def function_key(function: Callable[..., Any]) -> str:
    """Identify a Python function by what it computes: code, defaults, closure and globals.

    Raises:
        UnhashableError: when one of these is not a plain value, function, class or module.
    """
    return _value_key(function)


@cache
def _source_digest() -> str:
    digest = hashlib.sha256()
    for package in (torchvm.ops, torchvm.passes):
        for folder in package.__path__:
            for path in sorted(Path(folder).glob("*.py")):
                digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _schemas() -> list[str]:
    names = torch._C._dispatch_get_all_op_names()
    own = (name.partition(".") for name in names if name.startswith(f"{NAMESPACE}::"))
    return sorted(str(torch._C._get_schema(name, overload)) for name, _, overload in own)


def _function_key(function: FunctionType, seen: tuple[CodeType, ...]) -> str:
    code = function.__code__
    if code in seen:  # Recursion: its own code is in the key already.
        return f"recursive {code.co_qualname}"
    seen = (*seen, code)
    closure = inspect.getclosurevars(function)
    named = {**closure.nonlocals, **closure.globals}
    parts = [
        _code_key(code),
        _value_key(function.__defaults__, seen),
        _value_key(function.__kwdefaults__, seen),
        _value_key(named, seen),
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _code_key(code: CodeType) -> str:
    constants = [
        _code_key(c) if isinstance(c, CodeType) else _value_key(c) for c in code.co_consts
    ]
    return repr((code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants))


def _value_key(value: Any, seen: tuple[CodeType, ...] = ()) -> str:
    """Identify a value without its address; UnhashableError when there is no such way."""
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if value is None or value is Ellipsis or isinstance(value, bool | int | float | complex):
        return repr(value)
    if isinstance(value, str | bytes | torch.dtype | torch.device):
        return repr(value)
    if isinstance(value, tuple | list):
        return type(value).__name__ + repr([_value_key(v, seen) for v in value])
    if isinstance(value, set | frozenset):
        return type(value).__name__ + repr(sorted(_value_key(v, seen) for v in value))
    if isinstance(value, dict):
        return repr(sorted((_value_key(k, seen), _value_key(v, seen)) for k, v in value.items()))
    if isinstance(value, FunctionType):
        return _function_key(value, seen)
    if isinstance(value, type | BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, ModuleType):
        return value.__name__
    raise UnhashableError(f"{type(value).__name__} has no key that another process shares")
