"""Time the tree ops on one CPU thread, beside a plain C loop and a Python loop per request.

    python -m torchvm.tools.bench.tree [--json]

The floor is C source in this file, compiled by `cc -O3 -march=native` in the same run. It does the
work of the op: four outputs, the mask, the bounds and the rule for malformed trees; its time is
taken inside C and its outputs are allocated beforehand. Ratios are printed when all results agree.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from torchvm.ops.candidates import DraftCandidates, select_draft_candidates
from torchvm.ops.layout import TreeMaskMode, live_mask_numel, mask_storage
from torchvm.ops.tree import DraftTree, build_tree
from torchvm.tools.bench.gpu import Levels, beam_search

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

__all__ = ["Floor", "Row", "Selection", "main", "python_loop"]

BATCHES = (1, 32, 256)
TREES = ((4, 2, 2), (16, 4, 3), (64, 8, 5))
"""(n, topk, depth)."""
CONTEXT = 4096
CAPACITY = (256, 4, 1 << 20)
"""(requests, n, context) of the buffer in which one request lives."""
BUDGET_US = 3e5
"""How long one measurement takes, roughly."""
MODES = (TreeMaskMode.QLEN_ONLY, TreeMaskMode.FULL_MASK)
ALLOWANCE_US = 15.0
"""What a call through PyTorch's dispatcher may cost before the loop begins."""

FLOOR_SOURCE = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static int64_t find(const int64_t *ids, int64_t count, int64_t wanted) {
    int64_t low = 0, high = count;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (ids[middle] < wanted) low = middle + 1; else high = middle;
    }
    return low < count && ids[low] == wanted ? low + 1 : -1;
}

/* Returns -1, before any write, when the mask is too small. The mask is FULL_MASK with a prefix,
   or QLEN_ONLY. */
int build(const int64_t *parent_list, const int64_t *selected_index, const int64_t *seq_lens,
          uint8_t *mask, int64_t numel, int64_t batch, int64_t n, int64_t topk, int64_t depth,
          int full, int64_t *positions, int64_t *index, int64_t *token, int64_t *sibling) {
    int64_t needed = 0, limit = depth < n ? depth : n;
    int64_t width = depth > 1 ? topk * (depth - 1) + 1 : 0;
    for (int64_t b = 0; b < batch; b++) needed += n * ((full ? seq_lens[b] : 0) + n);
    if (needed > numel) return -1;
    int64_t *parent = malloc(n * sizeof *parent), *level = malloc(n * sizeof *level);
    int64_t *last = malloc(n * sizeof *last);
    for (int64_t b = 0; b < batch; b++) {
        const int64_t *ids = selected_index + b * (n - 1), *beams = parent_list + b * width;
        int64_t prefix = full ? seq_lens[b] : 0, stride = prefix + n, base = b * n;
        for (int64_t i = 0; i < n; i++) {
            uint8_t *row = mask + i * stride + prefix;
            int64_t p = -1;
            if (i > 0 && ids[i - 1] >= 0) {
                int64_t q = ids[i - 1] / topk;
                if (q == 0) p = 0;
                else if (q < width && beams[q] >= 0) p = find(ids, i - 1, beams[q]);
            }
            memset(row - prefix, 1, prefix);
            index[base + i] = base + i;
            token[base + i] = sibling[base + i] = -1;
            last[i] = -1;
            parent[i] = p;
            level[i] = i == 0 ? 0 : (p > 0 ? level[p] : 0) + 1;
            if (level[i] - 1 <= limit && p > 0) memcpy(row, row - (i - p) * stride, n);
            else {
                memset(row, 0, n);
                row[0] = 1;
                if (level[i] - 1 > limit) {
                    level[i] = limit + 2;
                    int64_t a = p;
                    for (int64_t s = 0; s < limit && a > 0; s++, a = parent[a]) row[a] = 1;
                }
            }
            row[i] = 1;
            positions[base + i] = seq_lens[b] + (level[i] <= limit ? level[i] : limit + 1);
            if (i == 0) positions[base] = seq_lens[b];
            if (p >= 0) {
                if (last[p] < 0) token[base + p] = i; else sibling[base + last[p]] = i;
                last[p] = i;
            }
        }
        mask += n * stride;
    }
    free(parent); free(level); free(last);
    return 0;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
}

void timed(const int64_t *parent_list, const int64_t *selected_index, const int64_t *seq_lens,
           uint8_t *mask, int64_t numel, int64_t batch, int64_t n, int64_t topk, int64_t depth,
           int full, int64_t *positions, int64_t *index, int64_t *token, int64_t *sibling,
           double *microseconds, int64_t calls) {
    for (int64_t c = 0; c < calls; c++) {
        double begin = now();
        build(parent_list, selected_index, seq_lens, mask, numel, batch, n, topk, depth, full,
              positions, index, token, sibling);
        microseconds[c] = now() - begin;
    }
}
"""


class Case(NamedTuple):
    """One batch of drafts and a mask for it."""

    mode: TreeMaskMode
    n: int
    topk: int
    depth: int
    drafts: DraftCandidates
    seq_lens: Tensor
    """(B,) int64."""
    mask: Tensor
    """1-D bool."""

    def build(self) -> DraftTree:
        """Call the Python function."""
        return build_tree(
            self.drafts.parent_list, self.drafts.selected_index, self.seq_lens, self.mask,
            topk=self.topk, depth=self.depth, num_draft_tokens=self.n, tree_mask_mode=self.mode,
        )  # fmt: skip

    def op(self) -> tuple[Tensor, ...]:
        """Call the op."""
        found: tuple[Tensor, ...] = torch.ops.torchvm.build_tree.default(
            self.drafts.parent_list, self.drafts.selected_index, self.seq_lens, self.mask,
            self.topk, self.depth, self.n, int(self.mode),
        )  # fmt: skip
        return found


class Row(NamedTuple):
    """Medians of one size, in microseconds."""

    mode: str
    bs: int
    num_draft_tokens: int
    op_us: float
    function_us: float
    floor_us: float
    python_loop_us: float

    @property
    def ratio(self) -> float:
        """Time of the op beyond the allowance, per time of the floor."""
        return max(self.op_us - ALLOWANCE_US, 0.0) / self.floor_us


class Selection(NamedTuple):
    """Medians of one selection, in microseconds."""

    bs: int
    num_draft_tokens: int
    function_us: float
    topk_sort_us: float

    @property
    def ratio(self) -> float:
        """Time of the function per time of topk and sort."""
        return self.function_us / self.topk_sort_us


class DisagreementError(Exception):
    """Results that should be equal are not."""


class Floor:
    """The C loop."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder, "floor.c"), Path(folder, "floor.so")
            source.write_text(FLOOR_SOURCE)
            subprocess.run(
                ["cc", "-O3", "-march=native", "-shared", "-fPIC", source, "-o", library],
                check=True,
            )
            self._library = ctypes.CDLL(str(library))

    def _arguments(self, case: Case, mask: Tensor, outputs: DraftTree) -> list[Any]:
        def at(tensor: Tensor) -> ctypes.c_void_p:
            return ctypes.c_void_p(tensor.data_ptr())

        sizes = (mask.numel(), case.seq_lens.shape[0], case.n, case.topk, case.depth)
        return [
            at(case.drafts.parent_list), at(case.drafts.selected_index), at(case.seq_lens),
            at(mask), *map(ctypes.c_int64, sizes), case.mode is TreeMaskMode.FULL_MASK,
            *map(at, outputs),
        ]  # fmt: skip

    def build(self, case: Case, mask: Tensor) -> DraftTree:
        """Return what the loop computes, with the cells written to `mask`."""
        outputs = DraftTree(*(torch.empty_like(part) for part in case.build()))
        if self._library.build(*self._arguments(case, mask, outputs)):
            raise ValueError("mask is too small")
        return outputs

    def sample_us(self, case: Case, calls: int) -> list[float]:
        """Times of single calls, what it takes to call from Python not counted."""
        outputs = case.build()
        times = (ctypes.c_double * calls)()
        arguments = self._arguments(case, case.mask, outputs)
        self._library.timed(*arguments, times, ctypes.c_int64(calls))
        return list(times)


def python_loop(case: Case, mask: Tensor) -> DraftTree:
    """Lay out one request after another, rows as tensors and links as lists.

    This is how engines written in Python do it: a row is its parent's row with one more cell.
    """
    n, batch = case.n, case.seq_lens.shape[0]
    positions, tokens, siblings = [], [], []
    offset = 0
    for b, length in enumerate(case.seq_lens.tolist()):
        beams = case.drafts.parent_list[b].tolist()
        node_of: dict[int, int] = {}
        parents = [-1]
        for node, candidate in enumerate(case.drafts.selected_index[b].tolist(), 1):
            beam = candidate // case.topk
            parents.append(node_of.get(beams[beam], -1) if beam else 0)
            node_of[candidate] = node
        block = torch.eye(n, dtype=torch.int64)
        block[:, 0] = 1
        token, sibling = [-1] * n, [-1] * n
        for node in range(1, n):
            if parents[node] > 0:
                block[node].add_(block[parents[node]])
        for node in range(n - 1, 0, -1):
            sibling[node], token[parents[node]] = token[parents[node]], node
        rows = block.clamp_(max=1)
        positions.append(rows.sum(1) - 1 + length)
        tokens.append(token)
        siblings.append(sibling)
        prefix = length if case.mode is TreeMaskMode.FULL_MASK else 0
        request = mask[offset : offset + n * (prefix + n)].view(n, prefix + n)
        request[:, :prefix] = True
        request[:, prefix:] = rows
        offset += request.numel()
    index = torch.arange(batch * n).view(batch, n)
    return DraftTree(torch.cat(positions), index, torch.tensor(tokens), torch.tensor(siblings))


def sample_us(call: Callable[[], object], calls: int) -> list[float]:
    """Times of single calls."""
    times = []
    for _ in range(calls):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    return times


def calls_within(call: Callable[[], object], budget_us: float) -> int:
    """How many calls a budget allows, between 3 and 1,001."""
    once = min(sample_us(call, 3))
    return max(3, min(1001, int(budget_us / once)))


def median_us(call: Callable[[], object]) -> float:
    """Median time of a call."""
    return statistics.median(sample_us(call, calls_within(call, BUDGET_US)))


def make_case(mode: TreeMaskMode, batch: int, tree: tuple[int, int, int], context: int) -> Case:
    """Draw drafts whose probabilities are random, and a mask of just their size."""
    n, topk, depth = tree
    levels = beam_search(batch, topk, depth, torch.device("cpu"))
    drafts = select_draft_candidates(*levels, num_draft_tokens=n)
    seq_lens = torch.full((batch,), context, dtype=torch.int64)
    numel = int(live_mask_numel(mode, batch, n, batch * context))
    mask = torch.zeros(numel, dtype=torch.bool)
    return Case(mode, n, topk, depth, drafts, seq_lens, mask)


def check_agreement(case: Case, floor: Floor) -> None:
    """Compare outputs and masks of the op, the C loop and the Python loop.

    Raises:
        DisagreementError: when any of them differ.
    """
    wanted = (*case.build(), case.mask.clone())
    others: dict[str, Callable[[Tensor], DraftTree]] = {
        "the C loop": lambda mask: floor.build(case, mask),
        "the Python loop": lambda mask: python_loop(case, mask),
    }
    for name, build in others.items():
        mask = torch.zeros_like(case.mask)
        if not all(map(torch.equal, (*build(mask), mask), wanted)):
            size = f"{case.mode.name}, {case.seq_lens.shape[0]} x {case.n}"
            raise DisagreementError(f"the op and {name} have different results for {size}")


def measure(case: Case, floor: Floor) -> Row:
    """Time one size; op and floor take turns, so that a busy machine slows both."""
    calls = calls_within(case.op, BUDGET_US / 5)
    op: list[float] = []
    loop: list[float] = []
    for _ in range(5):
        op += sample_us(case.op, calls)
        loop += floor.sample_us(case, calls)
    return Row(
        case.mode.name, case.seq_lens.shape[0], case.n, statistics.median(op),
        median_us(case.build), statistics.median(loop),
        median_us(lambda: python_loop(case, case.mask)),
    )  # fmt: skip


def builds(floor: Floor) -> Iterator[Row]:
    """Measure every size.

    Raises:
        DisagreementError: when results differ.
    """
    for mode in MODES:
        for tree in TREES:
            for batch in BATCHES:
                case = make_case(mode, batch, tree, CONTEXT)
                check_agreement(case, floor)
                yield measure(case, floor)


def live_cells() -> dict[str, float]:
    """Time one live request in a buffer for many, and a refill of that buffer."""
    batch, n, context = CAPACITY
    numel, _ = mask_storage(TreeMaskMode.FULL_MASK, batch, n, context)
    case = make_case(TreeMaskMode.FULL_MASK, 1, TREES[0], CONTEXT)
    case = case._replace(mask=torch.empty(int(numel), dtype=torch.bool))
    op_us = median_us(case.op)
    return {
        "capacity_bytes": case.mask.nbytes,
        "live_bytes": int(live_mask_numel(TreeMaskMode.FULL_MASK, 1, n, CONTEXT)),
        "op_us": op_us,
        "refill_us": median_us(lambda: case.mask.fill_(True)),
    }


def selections() -> Iterator[Selection]:
    """Time the selection beside topk and sort of the same scores, without their ties' order."""
    for n, topk, depth in TREES:
        for batch in BATCHES:
            levels = beam_search(batch, topk, depth, torch.device("cpu"))
            scores = torch.cat([level.flatten(1) for level in levels.scores], dim=1)

            def sort(scores: Tensor = scores, n: int = n) -> Tensor:
                return torch.topk(scores, n - 1, dim=1).indices.sort(dim=1).values

            def select(levels: Levels = levels, n: int = n) -> DraftCandidates:
                return select_draft_candidates(*levels, num_draft_tokens=n)

            if not torch.equal(sort(), select().selected_index):
                raise DisagreementError(f"selections differ for {batch} x {n}")
            yield Selection(batch, n, median_us(select), median_us(sort))


def _print(floor: Floor) -> None:
    line = "{:<10} {:>9} {:>9} {:>9} {:>9} {:>14} {:>12} {:>8}"
    print(f"torch {torch.__version__}, 1 thread, medians in microseconds, lengths {CONTEXT}")
    names = ("build_tree", "requests", "op", "function", "C floor", "(op-15)/floor", "Python loop")
    print(line.format(*names, "loop/op"))
    for row in builds(floor):
        print(
            line.format(
                row.mode.removesuffix("_MASK").removesuffix("_ONLY"),
                f"{row.bs} x {row.num_draft_tokens}", f"{row.op_us:.1f}", f"{row.function_us:.1f}",
                f"{row.floor_us:.1f}", f"{row.ratio:.2f}", f"{row.python_loop_us:,.0f}",
                f"{row.python_loop_us / row.op_us:,.0f}",
            ), flush=True,
        )  # fmt: skip
    live = live_cells()
    print(
        f"\none request of {CONTEXT} tokens in a FULL_MASK for {' x '.join(map(str, CAPACITY))}: "
        f"{live['op_us']:.1f} us; a refill of the buffer: {live['refill_us']:,.0f} us\n"
    )
    line = "{:<24} {:>9} {:>9} {:>12} {:>8}"
    print(line.format("select_draft_candidates", "requests", "function", "topk + sort", "ratio"))
    for pick in selections():
        times = (f"{pick.function_us:.1f}", f"{pick.topk_sort_us:.1f}", f"{pick.ratio:.2f}")
        print(line.format("", f"{pick.bs} x {pick.num_draft_tokens}", *times), flush=True)


def _as_json(floor: Floor) -> str:
    found = {
        "torch": torch.__version__,
        "context": CONTEXT,
        "allowance_us": ALLOWANCE_US,
        "build_tree": [row._asdict() | {"ratio": row.ratio} for row in builds(floor)],
        "live_cells": live_cells(),
        "select_draft_candidates": [p._asdict() | {"ratio": p.ratio} for p in selections()],
    }
    return json.dumps(found, indent=1)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; exit code 1 where results differ."""
    parser = argparse.ArgumentParser(prog="python -m torchvm.tools.bench.tree")
    parser.add_argument("--json", action="store_true", help="print JSON")
    as_json = parser.parse_args(arguments).json
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        floor = Floor()
        if as_json:
            print(_as_json(floor))
        else:
            _print(floor)
    except DisagreementError as error:
        print(f"no ratios: {error}", file=sys.stderr)
        return 1
    finally:
        torch.set_num_threads(threads)
    return 0


if __name__ == "__main__":
    sys.exit(main())
