"""numba as the CPU kernels use it: cached where that is possible, on raw addresses.

Kernels take addresses as int64: turning tensors into arrays costs more than a small batch does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
from llvmlite import ir  # type: ignore[import-untyped]  # It publishes no types.
from numba import types
from numba.extending import intrinsic

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["int32_at", "int64_at", "load", "njit", "store"]


def njit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile on the first call, for all calls of this user where numba can keep a cache.

    A cache needs a writable directory: the package's own, the user's cache directory or
    NUMBA_CACHE_DIR. Without one each process compiles for itself. The cache of a function knows
    when its own file changes, not when this one does.
    """
    jit: Any = numba.njit(nogil=True, error_model="numpy")
    cached_jit: Any = numba.njit(nogil=True, error_model="numpy", cache=True)
    try:
        compiled: Callable[..., Any] = cached_jit(function)
    except RuntimeError:
        compiled = jit(function)
    return compiled


def _pointer(address: Any, element: Any) -> Any:
    """Signature and code that turn an int64 address into a pointer to elements."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    pointer: Any = types.CPointer
    return pointer(element)(address), generate


def _int64_at(typing_context: Any, address: Any) -> Any:  # noqa: ARG001
    """Int64 elements from an address on, read and written by index without any check."""
    return _pointer(address, types.int64)


def _int32_at(typing_context: Any, address: Any) -> Any:  # noqa: ARG001
    """Int32 elements from an address on, read and written by index without any check."""
    return _pointer(address, types.int32)


def _load(typing_context: Any, address: Any, like: Any) -> Any:  # noqa: ARG001
    """Read a value of the type of `like` at an address of any alignment."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = context.get_value_type(signature.return_type)
        pointer = builder.inttoptr(arguments[0], ir.PointerType(kind))
        return builder.load(pointer, align=1)

    return like(types.int64, like), generate


def _store(typing_context: Any, address: Any, value: Any) -> Any:  # noqa: ARG001
    """Write a value at an address of any alignment."""

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.PointerType(arguments[1].type))
        builder.store(arguments[1], pointer, align=1)
        return context.get_dummy_value()

    return types.void(types.int64, value), generate


int64_at: Any = intrinsic(_int64_at)
int32_at: Any = intrinsic(_int32_at)
load: Any = intrinsic(_load)
store: Any = intrinsic(_store)
