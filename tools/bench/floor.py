"""The floor of the tree ops: plain C loops, compiled by `cc -O3 -march=native` when first run.

They do the work of the ops: all outputs, the bounds and the rule for malformed trees. Their time
is taken inside C and their outputs are allocated beforehand.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from torchvm.tools.messages import CommandError

__all__ = ["FloorCall", "has_compiler"]

FLOOR_SOURCE = r"""
#include <math.h>
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

static int ascending(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Returns -1, before any write, when the mask is too small. The mask is FULL_MASK with a prefix,
   or QLEN_ONLY. */
int64_t build(const int64_t *parent_list, const int64_t *selected_index, const int64_t *seq_lens,
              uint8_t *mask, int64_t numel, int64_t batch, int64_t n, int64_t topk, int64_t depth,
              int64_t full, int64_t *positions, int64_t *index, int64_t *token, int64_t *sibling) {
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

/* The scores, tokens and parents of all levels lie row by row. Keeps the best in order of score,
   then id; NaN ranks with -inf. */
int64_t select_best(const float *scores, const int64_t *tokens, int64_t batch, int64_t candidates,
                    int64_t wanted, int64_t *selected, int64_t *drafts) {
    float *best = malloc((wanted + 1) * sizeof *best);
    int64_t *ids = malloc((wanted + 1) * sizeof *ids);
    for (int64_t b = 0; b < batch; b++) {
        const float *row = scores + b * candidates;
        int64_t held = 0;
        for (int64_t i = 0; i < candidates; i++) {
            float score = row[i] == row[i] ? row[i] : -INFINITY;
            if (held == wanted && (wanted == 0 || score <= best[held - 1])) continue;
            int64_t low = 0, high = held;
            while (low < high) {
                int64_t middle = (low + high) / 2;
                if (best[middle] >= score) low = middle + 1; else high = middle;
            }
            if (held < wanted) held++;
            memmove(best + low + 1, best + low, (held - 1 - low) * sizeof *best);
            memmove(ids + low + 1, ids + low, (held - 1 - low) * sizeof *ids);
            best[low] = score;
            ids[low] = i;
        }
        qsort(ids, held, sizeof *ids, ascending);
        for (int64_t i = 0; i < held; i++) {
            selected[b * wanted + i] = ids[i];
            drafts[b * wanted + i] = tokens[b * candidates + ids[i]];
        }
    }
    free(best); free(ids);
    return 0;
}

/* Greedy verification, with the bounds of the op on links and places. */
int64_t verify(const int64_t *candidates, const int64_t *index, const int64_t *token,
               const int64_t *sibling, const int64_t *target, int64_t batch, int64_t n,
               int64_t width, int32_t *predicts, int32_t *accept_index, int32_t *accept_num) {
    for (int64_t b = 0; b < batch; b++) {
        int64_t base = b * n, node = 0, count = 0, place = index[base];
        for (int64_t i = 0; i < n; i++) predicts[base + i] = -1;
        for (int64_t i = 0; i < width; i++) accept_index[b * width + i] = -1;
        accept_num[b] = 0;
        if (place < base || place >= base + n) continue;
        accept_index[b * width] = place;
        while (count + 1 < width) {
            int64_t child = token[base + node], wanted = target[place], steps = 0;
            while (child >= 0 && child < n && steps++ < n && candidates[base + child] != wanted)
                child = sibling[base + child];
            if (child < 0 || child >= n || steps > n || candidates[base + child] != wanted) break;
            int64_t next = index[base + child];
            if (next < base || next >= base + n) break;
            predicts[place] = wanted;
            accept_index[b * width + ++count] = next;
            place = next;
            node = child;
        }
        predicts[place] = target[place];
        accept_num[b] = count;
    }
    return 0;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
}

#define TIMED(call) \
    for (int64_t c = 0; c < calls; c++) { \
        double begin = now(); \
        call; \
        microseconds[c] = now() - begin; \
    }

void timed_build(const int64_t *parent_list, const int64_t *selected_index,
                 const int64_t *seq_lens, uint8_t *mask, int64_t numel, int64_t batch, int64_t n,
                 int64_t topk, int64_t depth, int64_t full, int64_t *positions, int64_t *index,
                 int64_t *token, int64_t *sibling, double *microseconds, int64_t calls) {
    TIMED(build(parent_list, selected_index, seq_lens, mask, numel, batch, n, topk, depth, full,
                positions, index, token, sibling))
}

void timed_select_best(const float *scores, const int64_t *tokens, int64_t batch,
                       int64_t candidates, int64_t wanted, int64_t *selected, int64_t *drafts,
                       double *microseconds, int64_t calls) {
    TIMED(select_best(scores, tokens, batch, candidates, wanted, selected, drafts))
}

void timed_verify(const int64_t *candidates, const int64_t *index, const int64_t *token,
                  const int64_t *sibling, const int64_t *target, int64_t batch, int64_t n,
                  int64_t width, int32_t *predicts, int32_t *accept_index, int32_t *accept_num,
                  double *microseconds, int64_t calls) {
    TIMED(verify(candidates, index, token, sibling, target, batch, n, width, predicts,
                 accept_index, accept_num))
}
"""


def has_compiler() -> bool:
    """Whether the floor can be compiled here."""
    return shutil.which("cc") is not None


@cache
def _library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "floor.c"), Path(folder, "floor.so")
        source.write_text(FLOOR_SOURCE)
        flags = ["-O3", "-march=native", "-shared", "-fPIC"]
        command = ["cc", *flags, str(source), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            reason = done.stderr.strip().partition("\n")[0] or f"exit status {done.returncode}"
            raise CommandError(f"cc cannot compile the C loops: {reason}")
        return ctypes.CDLL(str(library))


class FloorCall:
    """A call of one of the loops.

    Args:
        name: "build", "select_best" or "verify".
        arguments: contiguous tensors, and integers of 64 bits, in the order of the C function.
    """

    def __init__(self, name: str, *arguments: torch.Tensor | int) -> None:
        self._name = name
        self._tensors = arguments  # They must live as long as C has their addresses.
        self._arguments: list[Any] = [
            ctypes.c_void_p(one.data_ptr())
            if isinstance(one, torch.Tensor)
            else ctypes.c_int64(one)
            for one in arguments
        ]

    def __call__(self) -> None:
        """Run the loop once.

        Raises:
            ValueError: when a mask is too small.
        """
        if getattr(_library(), self._name)(*self._arguments) == -1:
            raise ValueError("mask is too small")

    def sample_us(self, calls: int) -> list[float]:
        """Times of single calls, what it takes to call from Python not counted."""
        times = (ctypes.c_double * calls)()
        getattr(_library(), f"timed_{self._name}")(*self._arguments, times, ctypes.c_int64(calls))
        return list(times)
