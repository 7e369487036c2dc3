"""Tree attention on the CPU: matrix products over slices of the context, softmax kept online."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import torch

from torchvm.ops.layout import TreeMaskMode, packed_row_bytes, request_offsets

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["tree_attention", "tree_blocks"]

# Scores held at once: 16 MiB of float32, which bounds the scratch whatever the context.
_MAX_SCORES = 1 << 22
_MIN_SLICE, _MAX_SLICE = 256, 4096


class _Softmax(NamedTuple):
    """Running state of one request, float32; R = heads per kv head times n rows."""

    peak: Tensor
    """(kv heads, R, 1), the largest score so far."""
    weight: Tensor
    """(kv heads, R, 1), sum of exp(score - peak)."""
    value: Tensor
    """(kv heads, R, head_dim), the values under those weights."""


def tree_blocks(tree_mask: Tensor, mode: TreeMaskMode, seq_lens: Tensor, n: int) -> Tensor:
    """Read the tree block of every request, and nothing else of the mask.

    Args:
        tree_mask: 1-D bool or uint8, at least as large as the batch needs.
        mode: the layout of `tree_mask`.
        seq_lens: (B,) int64.
        n: draft tokens per request.

    Returns:
        (B, n, n) bool: whether node i of request b may attend node j.
    """
    batch = seq_lens.shape[0]
    if mode is TreeMaskMode.QLEN_ONLY:
        return tree_mask[: batch * n * n].view(batch, n, n).bool()
    if mode is TreeMaskMode.QLEN_ONLY_BITPACKING:
        row_bytes = int(packed_row_bytes(n))
        rows = tree_mask[: batch * n * row_bytes].view(batch, n, row_bytes, 1)
        bits = torch.arange(8, dtype=torch.uint8)
        return ((rows >> bits) & 1).view(batch, n, 8 * row_bytes)[:, :, :n].bool()
    offsets = request_offsets(seq_lens, n).tolist()
    blocks = [
        tree_mask[begin:end].view(n, -1)[:, -n:] for begin, end in itertools.pairwise(offsets)
    ]
    return torch.stack(blocks).bool() if blocks else tree_mask.new_empty(0, n, n).bool()


def tree_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    pages: list[list[int]],
    lengths: list[int],
    blocks: Tensor | None,
    scale: float,
    sliding_window: int,
    logit_cap: float,
) -> Tensor:
    """Attend the whole prefix and the tree block; the arguments are those of the op, checked.

    Three are prepared: `pages` holds the ids of the pages each request uses, `lengths` is
    seq_lens, and `blocks` is the mask as `tree_blocks` returns it, or None for a chain. Scores,
    weights and sums are float32 for every input dtype, rounded once at the end.
    """
    n = query.shape[1]
    out = query.new_empty(query.shape)
    chain = torch.ones(n, n, dtype=torch.bool).tril_() if blocks is None else None
    for b, length in enumerate(lengths):
        visible = chain if blocks is None else blocks[b]
        assert visible is not None
        request = _Request(k_cache, v_cache, pages[b], length)
        _attend(out[b], query[b], request, visible, scale, sliding_window, logit_cap)
    return out


class _Request(NamedTuple):
    """The cache of one request, paged or contiguous."""

    k_cache: Tensor
    v_cache: Tensor
    pages: list[int]
    length: int

    def keys_and_values(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Return positions [begin, end), each (kv heads, end - begin, head_dim) float32.

        A view where one page holds them all and the cache is float32.
        """
        page_size = self.k_cache.shape[1]
        first, last = begin // page_size, (end - 1) // page_size
        shift = first * page_size
        if first == last:
            page = self.pages[first]
            keys, values = self.k_cache[page], self.v_cache[page]
        else:
            several = torch.tensor(self.pages[first : last + 1])
            keys = self.k_cache[several].flatten(0, 1)
            values = self.v_cache[several].flatten(0, 1)
        inside = slice(begin - shift, end - shift)
        return keys[inside].float().transpose(0, 1), values[inside].float().transpose(0, 1)


def _attend(
    out: Tensor,
    query: Tensor,
    request: _Request,
    visible: Tensor,
    scale: float,
    sliding_window: int,
    logit_cap: float,
) -> None:
    """Attend one request: (n, heads, head_dim) -> `out`, the same."""
    n, num_heads, head_dim = query.shape
    num_kv_heads = request.k_cache.shape[2]
    grouped = query.float().view(n, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
    rows = grouped.reshape(num_kv_heads, -1, head_dim).mul(scale)
    window = _Window(visible, sliding_window) if sliding_window else None
    hidden = ~(visible & window.tree) if window else ~visible

    total = request.length + n
    # The root is the shallowest node, so no node sees further back than it does.
    begin = max(0, request.length - sliding_window + 1) if window else 0
    step = min(max(_MAX_SCORES // (num_heads * n), _MIN_SLICE), _MAX_SLICE)
    state = None
    for start in range(begin, total, step):
        stop = min(start + step, total)
        keys, values = request.keys_and_values(start, stop)
        scores = torch.bmm(rows, keys.transpose(1, 2))
        if logit_cap:
            scores.div_(logit_cap).tanh_().mul_(logit_cap)
        cells = scores.view(num_kv_heads, -1, n, stop - start)
        first = start - request.length
        if stop > request.length:
            tree = slice(max(first, 0), stop - request.length)
            cells[..., max(-first, 0) :].masked_fill_(hidden[:, tree], -torch.inf)
        if window and first < 0:
            window.hide_prefix(cells, first)
        if stop - start == total and request.length and not window:
            # Every row sees the prefix, and there is one slice: the fused softmax is faster.
            result = torch.bmm(torch.softmax(scores, -1), values)
        else:
            state = _accumulate(state, scores, values)
    if state is not None:
        # A row that sees nothing has weight 0 and comes out as zeros.
        result = state.value / state.weight.masked_fill(state.weight == 0, 1)
    grouped_out = out.view(n, num_kv_heads, -1, head_dim)
    grouped_out.copy_(result.view(num_kv_heads, -1, n, head_dim).permute(2, 0, 1, 3))


class _Window:
    """What a sliding window leaves visible; a node's position is the root's plus its depth."""

    def __init__(self, visible: Tensor, size: int) -> None:
        self.size = size
        self.depth = visible.sum(-1, keepdim=True) - 1
        self.tree = self.depth - self.depth.T < size

    def hide_prefix(self, cells: Tensor, first: int) -> None:
        """Set the scores of prefix columns out of reach to -inf, in place.

        Args:
            cells: (kv heads, group, n, columns), scores of consecutive columns.
            first: the first column, counted from the root's, so it is negative.
        """
        # Even the deepest node, n - 1 below the root at most, reaches all columns from here on.
        bound = min(first + cells.shape[-1], 0, cells.shape[2] - self.size)
        if bound > first:
            columns = torch.arange(first, bound)
            unseen = self.depth - columns >= self.size
            cells[..., : bound - first].masked_fill_(unseen, -torch.inf)


def _accumulate(state: _Softmax | None, scores: Tensor, values: Tensor) -> _Softmax:
    """Fold (kv heads, R, columns) scores, which are overwritten, and their values into `state`."""
    # A finite peak keeps exp(-inf - peak) at 0 for rows that have seen nothing yet.
    peak = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
    if state is not None:
        peak = torch.maximum(peak, state.peak)
    weights = scores.sub_(peak).exp_()
    weight, value = weights.sum(-1, keepdim=True), torch.bmm(weights, values)
    if state is not None:
        decay = (state.peak - peak).exp_()
        weight, value = weight + state.weight * decay, value + state.value * decay
    return _Softmax(peak, weight, value)
