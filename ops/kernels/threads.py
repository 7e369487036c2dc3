"""Splitting a kernel's tasks over as many threads as torch may use."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["run_parts", "split"]


def split(costs: Sequence[int], units: int, parts: int) -> list[int]:
    """Bounds of contiguous parts of about equal cost.

    Args:
        costs: of each group; a group is `units` tasks of equal cost.
        units: tasks in a group.
        parts: how many to make; fewer when there are fewer tasks.

    Returns:
        Ascending task numbers from 0 to `len(costs) * units`, without repeats.
    """
    totals = [0, *accumulate(cost * units for cost in costs)]
    bounds = {0, len(costs) * units}
    group = 0
    for part in range(1, parts):
        wanted = totals[-1] * part // parts
        while totals[group + 1] <= wanted and group + 1 < len(costs):
            group += 1
        bounds.add(group * units + min(units, (wanted - totals[group]) // max(costs[group], 1)))
    return sorted(bounds)


def run_parts(run: Callable[[int, int], object], bounds: Sequence[int]) -> None:
    """Call `run(first, last)` for each part, all but the first on other threads.

    Worth it only for functions that release the interpreter's lock.
    """
    (first, *others) = pairwise(bounds)
    pool = _pool(len(others), os.getpid())
    waiting = [pool.submit(run, begin, end) for begin, end in others]
    run(*first)
    for future in waiting:
        future.result()


@cache
def _pool(threads: int, _pid: int) -> ThreadPoolExecutor:
    """One pool per size and process: after a fork the parent's threads are gone."""
    return ThreadPoolExecutor(threads, thread_name_prefix="torchvm")
