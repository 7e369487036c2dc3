"""Tree attention on the CPU: tiles of keys against the rows of a kv head, softmax kept online.

Scores, weights and sums are float32 for every input dtype. The two products are written as 4 keys
x 2 rows and 2 rows x 4 values, which LLVM turns into vector code near the machine's peak.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]  # It publishes no types.
from numba import types
from numba.extending import intrinsic

from torchvm.ops.kernels.jit import bytes_at, int32_at, int64_at, njit
from torchvm.ops.kernels.threads import run_parts, split
from torchvm.ops.layout import TreeMaskMode, packed_row_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["tree_attention"]

FULL = int(TreeMaskMode.FULL_MASK)
PACKED = int(TreeMaskMode.QLEN_ONLY_BITPACKING)
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FLOAT32, BFLOAT16 = 0, 1

TILE = 64
# A block of rows and a tile of keys stay in the L2 cache together.
_BLOCK_ROWS = 96
# Waking another thread costs about what this many operations do.
_WORTH_A_THREAD = 10_000_000

f32 = np.float32
LOWEST = f32(np.finfo(np.float32).min)
HIDDEN = f32(-np.inf)
ZERO, ONE, HALF = f32(0), f32(1), f32(0.5)
# exp(x) = 2**k * exp(z) with |z| <= ln(2)/2; Cephes' polynomial, off by less than 1e-7.
SMALLEST = f32(-87)
LOG2_E, LN2_HIGH, LN2_LOW = f32(1.44269504), f32(0.693359375), f32(-2.12194440e-4)
P0, P1, P2 = f32(1.9875691500e-4), f32(1.3981999507e-3), f32(8.3334519073e-3)
P3, P4, P5 = f32(4.1665795894e-2), f32(1.6666665459e-1), f32(5.0000001201e-1)
# A half's bits, moved to a float's place, are the number times 2**-112.
HALF_SCALE = f32(2.0**112)

Address = Any


def _fast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a part of the kernel with sums that may be reordered; infinities and NaN count."""
    compiled: Callable[..., Any] = numba.njit(
        nogil=True, error_model="numpy", fastmath={"contract", "nsz", "reassoc"}
    )(function)
    return compiled


def _pointers(element: Any) -> Any:
    """Make the function that turns an address into elements without any check on an index."""

    def pointer_at(_: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kind = context.get_value_type(signature.return_type)
            return builder.inttoptr(arguments[0], kind)

        pointer: Any = types.CPointer
        return pointer(element)(address), generate

    made: Any = intrinsic(pointer_at)
    return made


def _prefetch(_: Any, address: Any) -> Any:
    """Ask for the cache line at an address; any address is allowed."""

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        pointer, word = ir.PointerType(ir.IntType(8)), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        line = builder.inttoptr(arguments[0], pointer)
        is_read, locality, is_data = word(0), word(2), word(1)
        builder.call(function, [line, is_read, locality, is_data])
        return context.get_dummy_value()

    return types.void(address), generate


float32_at = _pointers(types.float32)
uint16_at = _pointers(types.uint16)
prefetch: Any = intrinsic(_prefetch)


@_fast
def _load_tile(
    to: Address, source: Address, kind: int, pages: Any, page_size: int, page_stride: int,
    row_stride: int, start: int, stop: int, dim: int,
) -> None:  # fmt: skip
    """Copy positions [start, stop) of a head to (TILE, dim) float32; zeros behind them."""
    size = 4 if kind == FLOAT32 else 2
    for t in range(TILE):
        floats = float32_at(to + t * dim * 4)
        position = start + t
        if position >= stop:
            for d in range(dim):
                floats[d] = ZERO
            continue
        ahead = position + TILE
        if ahead < stop:
            page = np.int64(pages[ahead // page_size])
            row = source + size * (page * page_stride + ahead % page_size * row_stride)
            for line in range(0, size * dim, 64):
                prefetch(row + line)
        page = np.int64(pages[position // page_size])
        row = source + size * (page * page_stride + position % page_size * row_stride)
        if kind == FLOAT32:
            values = float32_at(row)
            for d in range(dim):
                floats[d] = values[d]
            continue
        bits, halves = int32_at(to + t * dim * 4), uint16_at(row)
        if kind == BFLOAT16:
            for d in range(dim):
                bits[d] = np.int32(halves[d]) << np.int32(16)
            continue
        for d in range(dim):
            half = np.int32(halves[d])
            special = np.int32(0x7F800000) if half & 0x7C00 == 0x7C00 else np.int32(0)
            moved = (half & np.int32(0x7FFF)) << np.int32(13)
            bits[d] = moved | special | ((half & np.int32(0x8000)) << np.int32(16))
        for d in range(dim):
            floats[d] *= HALF_SCALE


@_fast
def _score(scores: Address, rows: Address, keys: Address, num_rows: int, dim: int) -> None:
    """Scores (num_rows, TILE) = rows (num_rows, dim) @ keys (TILE, dim).T; num_rows is even."""
    line = dim * 4
    for r in range(0, num_rows, 2):
        q0, q1 = float32_at(rows + r * line), float32_at(rows + (r + 1) * line)
        s0 = float32_at(scores + r * TILE * 4)
        s1 = float32_at(scores + (r + 1) * TILE * 4)
        for t in range(0, TILE, 4):
            k0, k1 = float32_at(keys + t * line), float32_at(keys + (t + 1) * line)
            k2, k3 = float32_at(keys + (t + 2) * line), float32_at(keys + (t + 3) * line)
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = ZERO
            for d in range(dim):
                a, b = q0[d], q1[d]
                a0 += k0[d] * a
                a1 += k1[d] * a
                a2 += k2[d] * a
                a3 += k3[d] * a
                b0 += k0[d] * b
                b1 += k1[d] * b
                b2 += k2[d] * b
                b3 += k3[d] * b
            s0[t], s0[t + 1], s0[t + 2], s0[t + 3] = a0, a1, a2, a3
            s1[t], s1[t + 1], s1[t + 2], s1[t + 3] = b0, b1, b2, b3


@_fast
def _add_values(sums: Address, weights: Address, values: Address, num_rows: int, dim: int) -> None:
    """Sums (num_rows, dim) += weights (num_rows, TILE) @ values (TILE, dim); num_rows is even."""
    line = dim * 4
    for r in range(0, num_rows, 2):
        s0, s1 = float32_at(sums + r * line), float32_at(sums + (r + 1) * line)
        for t in range(0, TILE, 4):
            p = float32_at(weights + (r * TILE + t) * 4)
            q = float32_at(weights + ((r + 1) * TILE + t) * 4)
            p0, p1, p2, p3 = p[0], p[1], p[2], p[3]
            q0, q1, q2, q3 = q[0], q[1], q[2], q[3]
            v = float32_at(values + t * line)
            for d in range(dim):
                v0, v1, v2, v3 = v[d], v[dim + d], v[2 * dim + d], v[3 * dim + d]
                s0[d] += p0 * v0 + p1 * v1 + p2 * v2 + p3 * v3
                s1[d] += q0 * v0 + q1 * v1 + q2 * v2 + q3 * v3


@_fast
def _peak(scores: Any, lanes: Any) -> Any:
    """Largest of TILE scores, by lanes so that it vectorises; NaN is passed over."""
    for j in range(8):
        lanes[j] = scores[j]
    for t in range(8, TILE, 8):
        for j in range(8):
            lanes[j] = max(lanes[j], scores[t + j])
    peak = lanes[0]
    for j in range(1, 8):
        peak = max(peak, lanes[j])
    return peak


@_fast
def _exponentiate(scores: Any, peak: Any, powers: Any, powers_as_floats: Any) -> Any:
    """Replace TILE scores by exp(score - peak), hidden ones by 0; return their sum."""
    for t in range(TILE):
        x = scores[t] - peak
        y = max(x, SMALLEST)
        k = np.floor(y * LOG2_E + HALF)
        powers[t] = (np.int32(k) + np.int32(127)) << np.int32(23)
        z = y - k * LN2_HIGH - k * LN2_LOW
        p = ((((P0 * z + P1) * z + P2) * z + P3) * z + P4) * z + P5
        scores[t] = ZERO if x < SMALLEST else p * z * z + z + ONE
    total = ZERO
    for t in range(TILE):
        scores[t] *= powers_as_floats[t]
        total += scores[t]
    return total


@_fast
def _fold(
    scores: Address, values: Address, peaks: Any, weights: Any, sums: Address, num_rows: int,
    dim: int, lanes: Any, powers: Any, powers_as_floats: Any,
) -> None:  # fmt: skip
    """Fold a tile's scores, which are overwritten, and values into the rows' running softmax."""
    for r in range(num_rows):
        row = float32_at(scores + r * TILE * 4)
        highest = _peak(row, lanes)
        if highest > peaks[r]:
            decay = np.exp(peaks[r] - highest)
            peaks[r] = highest
            weights[r] *= decay
            total = float32_at(sums + r * dim * 4)
            for d in range(dim):
                total[d] *= decay
        weights[r] += _exponentiate(row, peaks[r], powers, powers_as_floats)
    _add_values(sums, scores, values, num_rows, dim)


@_fast
def _soften(scores: Any, count: int, cap: Any) -> None:
    for c in range(count):
        scores[c] = cap * np.tanh(scores[c] / cap)


@njit
def _read_tree(
    visible: Any, depths: Any, mask: Address, n: int, mode: int, stride: int, is_causal: bool
) -> None:
    """Fill one request's tree block and depths; `mask` is its root's first tree cell."""
    cells = bytes_at(mask)
    for i in range(n):
        count = 0
        for j in range(n):
            if is_causal:
                cell = j <= i
            elif mode == PACKED:
                cell = cells[i * stride + (j >> 3)] >> (j & 7) & 1 == 1
            else:
                cell = cells[i * stride + j] != 0
            visible[i, j] = cell
            count += cell
        depths[i] = count - 1


@njit
def _hide(
    scores: Address, visible: Any, depths: Any, first: int, last: int, group: int, start: int,
    stop: int, length: int, window: int,
) -> None:  # fmt: skip
    """Set to -inf what nodes [first, last) do not see of positions [start, start + TILE)."""
    nodes = last - first
    for i in range(first, last):
        for t in range(TILE):
            column = start + t - length
            if column < 0:
                seen = window == 0 or depths[i] - column < window
            elif start + t < stop:
                seen = visible[i, column] and (window == 0 or depths[i] - depths[column] < window)
            else:
                seen = False
            if not seen:
                for h in range(group):
                    float32_at(scores + (h * nodes + i - first) * TILE * 4)[t] = HIDDEN


@njit
def _begin_block(
    query: Address, strides: Any, scale: Any, rows: Address, sums: Address, peaks: Any,
    weights: Any, num_rows: int, nodes: int, group: int, dim: int,
) -> None:  # fmt: skip
    """Gather a block's scaled queries, row h * nodes + i for head h and node i, and clear sums."""
    for r in range(num_rows):
        peaks[r], weights[r] = LOWEST, ZERO
        # An odd row at the end doubles the last one and is not written out.
        h, i = min(r // nodes, group - 1), r % nodes
        source = float32_at(query + 4 * (i * strides[1] + h * strides[2]))
        row, total = float32_at(rows + r * dim * 4), float32_at(sums + r * dim * 4)
        for d in range(dim):
            row[d], total[d] = source[d] * scale, ZERO


@njit
def _end_block(
    out: Address, sums: Address, weights: Any, nodes: int, group: int, num_heads: int, dim: int
) -> None:
    """Write a block's results; a row that saw nothing has weight 0 and comes out as zeros."""
    for r in range(group * nodes):
        target = float32_at(out + 4 * dim * (r % nodes * num_heads + r // nodes))
        total = float32_at(sums + r * dim * 4)
        weight = ONE if weights[r] == 0 else weights[r]
        for d in range(dim):
            target[d] = total[d] / weight


@njit
def _attend(
    out: Address, query: Address, q_strides: Any, k_cache: Address, k_strides: Any,
    v_cache: Address, v_strides: Any, table: Address, table_width: int, lengths_at: Address,
    mask: Address, mode: int, row_bytes: int, is_causal: bool, kind: int, n: int, num_heads: int,
    num_kv_heads: int, dim: int, page_size: int, block: int, scale: Any, window: int, cap: Any,
    first_task: int, last_task: int,
) -> None:  # fmt: skip
    """Run some tasks of a batch, whose arguments are checked; strides are in elements.

    A task is a block of nodes of one kv head; those of a request are adjacent.
    """
    lengths = int64_at(lengths_at)
    size = 4 if kind == FLOAT32 else 2
    group = num_heads // num_kv_heads
    most = group * min(block, n) + 1
    visible, depths = np.empty((n, n), np.bool_), np.empty(n, np.int64)
    peaks, weights = np.empty(most, np.float32), np.empty(most, np.float32)
    lanes, powers = np.empty(8, np.float32), np.empty(TILE, np.int32)
    powers_as_floats = powers.view(np.float32)
    room = np.empty(most * (2 * dim + TILE) + 2 * TILE * dim, np.float32)
    rows: Any = np.int64(room.ctypes.data)
    sums = rows + most * dim * 4
    scores = sums + most * dim * 4
    keys = scores + most * TILE * 4
    values = keys + TILE * dim * 4
    request = -1
    per_request = num_kv_heads * ((n + block - 1) // block)
    for task in range(first_task, last_task):
        b, unit = task // per_request, task % per_request
        while request < b:
            request += 1
            length = lengths[request]
            prefix = length if mode == FULL else 0
            if request == b:
                tree = mask + prefix
                _read_tree(visible, depths, tree, n, mode, prefix + row_bytes, is_causal)
            mask += n * (prefix + row_bytes)
        pages = int32_at(table + 4 * b * table_width)
        g, first = unit % num_kv_heads, unit // num_kv_heads * block
        last = min(first + block, n)
        nodes = last - first
        num_rows = group * nodes + group * nodes % 2
        _begin_block(
            query + 4 * (b * q_strides[0] + first * q_strides[1] + g * group * q_strides[2]),
            q_strides, scale, rows, sums, peaks, weights, num_rows, nodes, group, dim,
        )  # fmt: skip
        begin = 0
        if window:
            # Rows of a block that is no tree may see every node, so all of those are looked at.
            begin = max(0, length + min(0, depths[first:last].min() - window + 1))
        stop = length + (last if is_causal else n)
        for start in range(begin, stop, TILE):
            _load_tile(
                keys, k_cache + size * g * k_strides[2], kind, pages, page_size, k_strides[0],
                k_strides[1], start, stop, dim,
            )  # fmt: skip
            _load_tile(
                values, v_cache + size * g * v_strides[2], kind, pages, page_size,
                v_strides[0], v_strides[1], start, stop, dim,
            )  # fmt: skip
            _score(scores, rows, keys, num_rows, dim)
            if cap > 0:
                _soften(float32_at(scores), num_rows * TILE, cap)
            if window or start + TILE > length:
                _hide(scores, visible, depths, first, last, group, start, stop, length, window)
            _fold(
                scores, values, peaks, weights, sums, num_rows, dim, lanes, powers,
                powers_as_floats,
            )  # fmt: skip
        _end_block(
            out + 4 * dim * ((b * n + first) * num_heads + g * group),
            sums, weights, nodes, group, num_heads, dim,
        )  # fmt: skip


def tree_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    lengths: list[int],
    seq_lens: Tensor,
    tree_mask: Tensor | None,
    mode: TreeMaskMode,
    scale: float,
    sliding_window: int,
    logit_cap: float,
) -> Tensor:
    """Launch on the arguments of the op, checked, on as many threads as torch may use.

    `lengths` are the seq_lens; `tree_mask` None is a chain.
    """
    batch, n, num_heads, dim = query.shape
    num_kv_heads = k_cache.shape[2]
    rows = _dense_last(query.float())
    keys, values = _dense_last(k_cache), _dense_last(v_cache)
    table, seq_lens = page_table.contiguous(), seq_lens.contiguous()
    mask = None if tree_mask is None else tree_mask.contiguous()
    out = rows.new_empty(query.shape)
    block = max(1, _BLOCK_ROWS * num_kv_heads // num_heads)
    arguments = (
        out.data_ptr(), rows.data_ptr(), rows.stride(), keys.data_ptr(), keys.stride(),
        values.data_ptr(), values.stride(), table.data_ptr(), table.shape[1], seq_lens.data_ptr(),
        0 if mask is None else mask.data_ptr(), int(mode),
        int(packed_row_bytes(n)) if mode == PACKED else n, mask is None, KINDS[k_cache.dtype],
        n, num_heads, num_kv_heads, dim, k_cache.shape[1], block, f32(scale), sliding_window,
        f32(logit_cap),
    )  # fmt: skip
    per_request = num_kv_heads * -(-n // block)
    threads = min(torch.get_num_threads(), batch * per_request)
    operations = 4 * dim * num_heads * n * (sum(lengths) + batch * n)
    if threads > 1 and operations > _WORTH_A_THREAD:
        bounds = split([length + n for length in lengths], per_request, threads)
        run_parts(lambda first, last: _attend(*arguments, first, last), bounds)
    else:
        _attend(*arguments, 0, batch * per_request)
    return out.to(query.dtype)


def _dense_last(tensor: Tensor) -> Tensor:
    """The tensor, its last dimension contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
