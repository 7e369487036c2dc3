"""What is timed and how: contenders of equal results take turns on one pinned thread."""

from __future__ import annotations

import gc
import os
import statistics
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "QUICK", "THOROUGH", "Case", "Contender", "Effort", "Row", "Spread",
    "identical", "measure", "pinned", "sample_us",
]  # fmt: skip


class Effort(NamedTuple):
    """How long a contender of a case is measured."""

    budget_us: float
    rounds: int
    """In each of which every contender has its turn."""


THOROUGH = Effort(3e5, 5)
QUICK = Effort(1e3, 3)


class Contender(NamedTuple):
    """One way of doing the work."""

    name: str
    run: Callable[[], object]
    """What is timed."""
    results: Callable[[], Any] | None = None
    """What comes out of it, to be compared; None for a part that has no result of its own."""
    sample: Callable[[int], list[float]] | None = None
    """Microseconds of so many calls, by a clock of its own; None times `run`."""


def identical(actual: Any, expected: Any) -> bool:
    """Whether nested sequences hold equal tensors and values."""
    if isinstance(expected, torch.Tensor):
        return isinstance(actual, torch.Tensor) and torch.equal(actual, expected)
    if isinstance(expected, tuple | list):
        return len(actual) == len(expected) and all(map(identical, actual, expected))
    return bool(actual == expected)


class Case(NamedTuple):
    """Contenders for one piece of work of one size."""

    what: str
    size: str
    contenders: tuple[Contender, ...]
    """The first is what the others' times are divided by."""
    expected: Callable[[], Any]
    """The results that every contender must have."""
    reference: str
    """Where those come from."""
    equal: Callable[[Any, Any], bool] = identical
    unit: str = "us a call"
    facts: Callable[[dict[str, Spread]], dict[str, float]] | None = None
    """Figures beside the times, which it is given."""


class Spread(NamedTuple):
    """Microseconds of a call."""

    median: float
    low: float | None
    """The quartiles; None where a clock of its own tells but a median."""
    high: float | None
    calls: int


class Row(NamedTuple):
    """What was measured of a case."""

    what: str
    size: str
    unit: str
    base: str
    """The contender whose time the ratios are of."""
    reference: str
    times: dict[str, Spread]
    """Of the contenders whose results are right."""
    differing: tuple[str, ...]
    """The contenders whose results are not: nothing is said of their speed."""
    facts: dict[str, float]

    def ratio(self, name: str) -> float | None:
        """Time of a contender per time of the base; None where either is wrong."""
        if name not in self.times or self.base not in self.times:
            return None
        return self.times[name].median / self.times[self.base].median


def measure(case: Case, effort: Effort) -> Row:
    """Compare all results, then time those that are right, in turns.

    A busy machine so slows all of them alike, and ratios hold where times do not.
    """
    expected = case.expected()
    wrong = tuple(
        contender.name
        for contender in case.contenders
        if contender.results is not None and not case.equal(contender.results(), expected)
    )
    times = _times([one for one in case.contenders if one.name not in wrong], effort)
    facts = case.facts(times) if case.facts is not None and not wrong else {}
    return Row(
        case.what, case.size, case.unit, case.contenders[0].name, case.reference, times, wrong,
        facts,
    )  # fmt: skip


def _times(contenders: list[Contender], effort: Effort) -> dict[str, Spread]:
    samples: dict[str, list[float]] = {one.name: [] for one in contenders}
    calls = {one.name: _calls(one, effort) for one in contenders}
    for number in range(effort.rounds):
        for one in contenders:
            # What takes more than its share in one call has its turn three times.
            if number < 3 or calls[one.name] > 1:
                samples[one.name] += _sample(one, calls[one.name])
    return {name: _spread(values) for name, values in samples.items()}


def _calls(contender: Contender, effort: Effort) -> int:
    """Warm up; return how many calls a round allows, with all that they take."""
    budget_us = effort.budget_us / effort.rounds
    once = budget_us
    for _ in range(2):
        begin = time.perf_counter()
        _sample(contender, 1)
        once = (time.perf_counter() - begin) * 1e6
        if once > budget_us:
            break
    return max(1, min(1000, int(budget_us / once)))


def _sample(contender: Contender, calls: int) -> list[float]:
    if contender.sample is not None:
        return contender.sample(calls)
    return sample_us(contender.run, calls)


def sample_us(run: Callable[[], object], calls: int) -> list[float]:
    """Microseconds of single calls; garbage is not collected meanwhile."""
    times = []
    enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(calls):
            begin = time.perf_counter()
            run()
            times.append((time.perf_counter() - begin) * 1e6)
    finally:
        if enabled:
            gc.enable()
    return times


def _spread(values: list[float]) -> Spread:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high, len(values))


@contextmanager
def pinned() -> Iterator[int | None]:
    """Run the block on one thread of torch and on one core.

    Yields:
        The core; None where the system does not let a process choose.
    """
    threads = torch.get_num_threads()
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    core: int | None = None
    torch.set_num_threads(1)
    try:
        if cores:
            try:
                # The last: interrupts tend to be served by the first.
                os.sched_setaffinity(0, {max(cores)})
                core = max(cores)
            except OSError:
                core = None
        yield core
    finally:
        torch.set_num_threads(threads)
        if core is not None:
            os.sched_setaffinity(0, cores)
