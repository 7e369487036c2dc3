"""numba as the CPU kernels use it: cached where that is possible, on raw addresses.

Kernels take addresses as int64: turning tensors into arrays costs more than a small batch does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
from llvmlite import ir
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
    options = {"nogil": True, "error_model": "numpy"}
    try:
        compiled: Callable[..., Any] = numba.njit(cache=True, **options)(function)
    except RuntimeError:
        compiled = numba.njit(**options)(function)
    return compiled


def _pointer(address: Any, element: Any) -> Any:
    """Signature and code that turn an int64 address into a pointer to elements."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(element)(address), generate


@intrinsic
def int64_at(typing_context: Any, address: Any) -> Any:  # noqa: ARG001
    """Int64 elements from an address on, read and written by index without any check."""
    return _pointer(address, types.int64)


@intrinsic
def int32_at(typing_context: Any, address: Any) -> Any:  # noqa: ARG001
    """Int32 elements from an address on, read and written by index without any check."""
    return _pointer(address, types.int32)


@intrinsic
def load(typing_context: Any, address: Any, like: Any) -> Any:  # noqa: ARG001
    """Read a value of the type of `like` at an address of any alignment."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = context.get_value_type(signature.return_type)
        pointer = builder.inttoptr(arguments[0], ir.PointerType(kind))
        return builder.load(pointer, align=1)

    return like(types.int64, like), generate


@intrinsic
def store(typing_context: Any, address: Any, value: Any) -> Any:  # noqa: ARG001
    """Write a value at an address of any alignment."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.PointerType(arguments[1].type))
        builder.store(arguments[1], pointer, align=1)
        return context.get_dummy_value()

    return types.void(types.int64, value), generate
