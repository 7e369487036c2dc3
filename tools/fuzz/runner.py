"""Checks random programs by the thousand and cuts down those that fail."""

from __future__ import annotations

import gc
import time
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from torch._subclasses.fake_tensor import FakeTensorMode

import torchvm
from torchvm.tools.fuzz.author import write_program
from torchvm.tools.fuzz.checking import check

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchvm.tools.fuzz.checking import Failure
    from torchvm.tools.fuzz.programs import Program

__all__ = ["Summary", "describe", "fuzz", "shrink"]


class Summary(NamedTuple):
    """What became of many programs."""

    counts: Counter[str]
    verdicts: Counter[str]
    missed: Counter[str]
    """By verdict."""
    failures: list[tuple[Program, Failure]]
    seconds: float


def fuzz(
    seed: int,
    graphs: int,
    *,
    inner: str = "aot_eager",
    stop_at: int = 0,
    report: Callable[[int, Summary], None] | None = None,
) -> Summary:
    """Check the programs of consecutive seeds.

    Args:
        seed: the first program's.
        graphs: how many programs.
        inner: the inner compiler, as in `torchvm_backend`.
        stop_at: stop after this many failures; 0 never does.
        report: called after every program with how many there were.
    """
    start = time.perf_counter()
    summary = Summary(Counter(), Counter(), Counter(), [], 0.0)
    for done in range(graphs):
        program = write_program(seed + done)
        torchvm.clear_reports()
        outcome = check(program, inner=inner)
        summary.verdicts.update(str(r.verdict) for r in torchvm.reports())
        summary.counts.update(
            graphs=1,
            refused=outcome.refused,
            shrunk=outcome.shrunk,
            missed=len(outcome.missed),
            torch_fails=outcome.torch_fails,
        )
        summary.missed.update(outcome.missed)
        if outcome.failure is not None:
            summary.failures.append((program, outcome.failure))
        summary = summary._replace(seconds=time.perf_counter() - start)
        if done % 50 == 49:  # Compilers leave cycles and caches behind.
            FakeTensorMode.cache_clear()
            gc.collect()
        if report is not None:
            report(done + 1, summary)
        if stop_at and len(summary.failures) >= stop_at:
            break
    return summary


def shrink(program: Program, kind: str, *, inner: str = "aot_eager") -> Program:
    """Take lines and settings away as long as the program fails in the same way."""

    def fails(candidate: Program) -> bool:
        failure = check(candidate, inner=inner).failure
        return failure is not None and failure.kind == kind

    for change in ({"dynamic": False}, {"v2": True}, {"passes": None}, {"aliased": False}):
        candidate = program._replace(setting=program.setting._replace(**change))
        program = candidate if fails(candidate) else program
    index = len(program.lines) - 1
    while index >= 0:
        candidate = program.without(index)
        program = candidate if fails(candidate) else program
        index = min(index, len(program.lines)) - 1
    for name in program.returned:
        kept = tuple(other for other in program.returned if other != name)
        candidate = program._replace(returned=kept)
        program = candidate if fails(candidate) else program
    return program


def describe(program: Program, failure: Failure, *, inner: str = "aot_eager") -> str:
    """Write a failing program as Python that shows the failure when it is run."""
    return f'''\
# {failure.kind}: {failure.message.strip().splitlines()[-1]}
from torchvm.tools.fuzz.programs import Setting
from torchvm.tools.fuzz.checking import check_source

SOURCE = """
{program.source}"""
setting = {program.setting!r}
print(check_source(SOURCE, setting, inner="{inner}"))
'''
