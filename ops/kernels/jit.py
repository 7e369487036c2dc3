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

__all__ = ["bytes_at", "copy", "fill", "inlined", "int32_at", "int64_at", "load", "njit"]


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


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a part of a kernel into its callers, where LLVM alone would keep it apart."""
    jit: Any = numba.njit(nogil=True, error_model="numpy", forceinline=True)
    compiled: Callable[..., Any] = jit(function)
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


def _bytes_at(typing_context: Any, address: Any) -> Any:  # noqa: ARG001
    """Uint8 elements from an address on, read and written by index without any check."""
    return _pointer(address, types.uint8)


def _load(typing_context: Any, address: Any, like: Any) -> Any:  # noqa: ARG001
    """Read a value of the type of `like` at an address of any alignment."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = context.get_value_type(signature.return_type)
        pointer = builder.inttoptr(arguments[0], ir.PointerType(kind))
        return builder.load(pointer, align=1)

    return like(types.int64, like), generate


def _copy(typing_context: Any, pointer: Any, to: Any, source: Any, count: Any) -> Any:  # noqa: ARG001
    """Copy `count` elements from index `source` to index `to`; the two must not overlap."""

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        base, to, source, count = arguments
        kinds = [base.type, base.type, count.type]
        function = builder.module.declare_intrinsic("llvm.memcpy", kinds)
        is_volatile = ir.Constant(ir.IntType(1), 0)
        builder.call(
            function, [builder.gep(base, [to]), builder.gep(base, [source]), count, is_volatile]
        )
        return context.get_dummy_value()

    return types.void(pointer, types.int64, types.int64, types.int64), generate


def _fill(typing_context: Any, pointer: Any, to: Any, value: Any, count: Any) -> Any:  # noqa: ARG001
    """Write a byte to `count` elements from index `to` on."""

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        base, to, value, count = arguments
        function = builder.module.declare_intrinsic("llvm.memset", [base.type, count.type])
        is_volatile = ir.Constant(ir.IntType(1), 0)
        builder.call(function, [builder.gep(base, [to]), value, count, is_volatile])
        return context.get_dummy_value()

    return types.void(pointer, types.int64, types.uint8, types.int64), generate


bytes_at: Any = intrinsic(_bytes_at)
copy: Any = intrinsic(_copy)
fill: Any = intrinsic(_fill)
int32_at: Any = intrinsic(_int32_at)
int64_at: Any = intrinsic(_int64_at)
load: Any = intrinsic(_load)
