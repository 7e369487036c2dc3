"""One run of torchvm bench: groups measured one after another, printed and drawn as they end."""

from __future__ import annotations

import json
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import typer

from torchvm.tools.bars import write_chart
from torchvm.tools.bench import generation, gpu, peers, report
from torchvm.tools.bench.machine import machine_facts
from torchvm.tools.bench.measure import QUICK, THOROUGH, Row, Spread, measure, pinned
from torchvm.tools.bench.report import Measured
from torchvm.tools.messages import CommandError, progress
from torchvm.tools.models import SMALL, locate_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from torchvm.tools.bench.measure import Case, Effort

__all__ = ["Settings", "gpu_rows", "groups_here", "run"]

_QUICK_GPU = gpu.Sizes(batches=(2,), trees=((4, 2, 2),), context=40, large=(2, 4, 5000))
_MODULES = ("tree", "mask", "passes", "attention", "generate", "peers")


class Settings(NamedTuple):
    """The options of one run."""

    groups: tuple[str, ...]
    quick: bool
    model: str
    as_json: bool
    folder: Path | None
    """Where charts go."""


def groups_here() -> tuple[str, ...]:
    """The groups that this machine can run, peers aside."""
    return (*_MODULES[:-1], *(("gpu",) if torch.cuda.is_available() else ()))


def run(settings: Settings, cases: Mapping[str, Iterable[Case]] | None = None) -> bool:
    """Measure, print and draw; return whether all results were right.

    Args:
        settings: the command's options.
        cases: what to measure of a group, in place of its own cases.

    Raises:
        CommandError: for a group that cannot run here, and for what cannot be written.
    """
    if "gpu" in settings.groups and not torch.cuda.is_available():
        raise CommandError("gpu needs a GPU that this PyTorch build can use, and there is none")
    if "generate" in settings.groups and settings.model != SMALL:
        locate_model(settings.model)  # Before anything else is measured.
    wrong: list[str] = []
    found: dict[str, Any] = {}
    absent = peers.missing() if "peers" in settings.groups else []
    with pinned() as core:
        facts = machine_facts(core)
        if not settings.as_json:
            typer.echo(report.machine_text(facts))
        for name in settings.groups:
            if name == "peers" and len(absent) == len(peers.PEERS):
                continue
            group = _measured(name, settings, (cases or {}).get(name))
            wrong += report.differences(group)
            found[name] = report.as_dict(group)
            if not settings.as_json:
                typer.echo("\n" + report.group_text(group))
            if settings.folder is not None and (panels := report.panels(group)):
                write_chart(
                    settings.folder / f"{name}.svg", panels, title=group.title,
                    footer=report.machine_text(facts),
                )  # fmt: skip
    if settings.as_json:
        typer.echo(json.dumps({"machine": facts, "groups": found, "absent_peers": absent}))
    elif absent:
        typer.echo("\n" + "\n".join(absent))
    for line in wrong:
        typer.echo(f"torchvm: {line}", err=True)
    return not wrong


def _measured(name: str, settings: Settings, cases: Iterable[Case] | None) -> Measured:
    if name == "gpu":
        device = torch.device("cuda", torch.cuda.current_device())
        sizes = _QUICK_GPU if settings.quick else gpu.Sizes()
        title = f"gpu: the ops on one {torch.cuda.get_device_name(device)}"
        found = gpu_rows(gpu.rows(sizes, gpu.cuda_clock, device))
        note = "replayed: from a CUDA graph, as engines do; medians of a clock of its own"
        return Measured(name, title, (note,), tuple(found))
    module: Any = (
        generation if name == "generate" else import_module(f"torchvm.tools.bench.{name}")
    )
    if cases is None:
        arguments = [module.QUICK] if settings.quick else []
        options = {"model": settings.model} if name == "generate" else {}
        cases = module.cases(*arguments, **options)
    rows = _measure_cases(name, cases, QUICK if settings.quick else THOROUGH)
    return Measured(name, module.TITLE, module.NOTES, tuple(rows))


def _measure_cases(name: str, cases: Iterable[Case], effort: Effort) -> Iterator[Row]:
    """Measure one case after another, saying on a terminal which."""
    for case in cases:
        with progress(f"{name}: {case.what}, {case.size}"):
            row = measure(case, effort)
        yield row


def gpu_rows(found: Iterable[gpu.Row]) -> Iterator[Row]:
    """The rows of the GPU benchmark, whose clock tells medians alone."""
    for row in found:
        times = {
            name: Spread(value, None, None, 1)
            for name, value in (("replayed", row.replay_us), ("eager", row.eager_us))
        }
        facts = {"MB written": row.written / 1e6, "GB/s replayed": row.gb_per_s}
        yield Row(row.op, row.size, "us a call", "replayed", "", times, (), facts)
