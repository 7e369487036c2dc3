"""`python -m torchvm.tools.fuzz`: compile random verify graphs until one is wrong."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import torch
import typer

from torchvm.tools.fuzz.runner import Summary, describe, fuzz, shrink


def _progress(done: int, summary: Summary) -> None:
    if done % 100 == 0:
        rate = done / summary.seconds
        typer.echo(f"{done} graphs, {rate:.1f} a second, {len(summary.failures)} wrong", err=True)


def main(
    graphs: Annotated[int, typer.Option(min=1, help="How many programs.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first; each adds one.")] = 0,
    inner: Annotated[
        Literal["aot_eager", "inductor"], typer.Option(help="The inner compiler.")
    ] = "aot_eager",
    stop_at: Annotated[
        int, typer.Option(min=0, help="Stop after so many failures; 0: never.")
    ] = 1,
) -> None:
    """Hold compiled random programs against eager ones; print a small program for a failure.

    Exit status 1 when a program is wrong.
    """
    torch.set_num_threads(1)
    summary = fuzz(seed, graphs, inner=inner, stop_at=stop_at, report=_progress)
    for program, failure in summary.failures:
        small = shrink(program, failure.kind, inner=inner)
        typer.echo(describe(small, failure, inner=inner))
    counts = ", ".join(f"{name} {count}" for name, count in summary.counts.items())
    typer.echo(f"{counts} in {summary.seconds:.0f} s")
    typer.echo(f"verdicts: {dict(summary.verdicts.most_common())}")
    typer.echo(f"missed, by verdict: {dict(summary.missed.most_common())}")
    sys.exit(bool(summary.failures))


if __name__ == "__main__":
    typer.run(main)
