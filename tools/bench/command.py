"""torchvm bench: every measurement of this repository, at whatever commit is installed."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import Annotated

import typer

from torchvm.tools.bars import check_plots
from torchvm.tools.messages import CommandError
from torchvm.tools.models import PACKAGED, SMALL, packaged_model

__all__ = ["bench"]


class Group(StrEnum):
    """Values of GROUP."""

    tree = "tree"
    mask = "mask"
    passes = "passes"
    attention = "attention"
    generate = "generate"
    gpu = "gpu"


def bench(
    groups: Annotated[
        list[Group] | None,
        typer.Argument(metavar="GROUP", help="What to measure; all that can run here."),
    ] = None,
    peers: Annotated[
        bool,
        typer.Option("--peers", help="Lay out trees by the packages of others too."),
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes and few calls: to see that it works.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            help=f"What generate decodes with: {PACKAGED!r} (the default where it is installed), "
            f"{SMALL!r}, random weights (else, and with --quick), or a folder with a model."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Draw a .svg a group into a folder (matplotlib)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure on one pinned thread, beside floors and peers whose results are the same.

    \b
    tree       build, select and verify beside C loops and Python loops
    mask       a step's mask in every layout, and in the ways engines fill it
    passes     the graph passes on graphs of 1,000 to 100,000 nodes
    attention  tree_attention beside scaled_dot_product_attention with a mask
    generate   decoding with draft trees beside plain decoding
    gpu        the ops on a GPU, eagerly and replayed

    Contenders take turns. A median has half the distance of its quartiles behind it, in percent,
    and then its ratio to the first contender. What has other results than the reference gets no
    time and no ratio, and the exit status is 1.
    """  # noqa: D301 - \b keeps the lines of a paragraph of the help.
    if plot is not None:
        check_plots("--plot")
        _make_folder(plot)
    from torchvm.tools.bench.session import Settings, groups_here, run

    chosen = tuple(dict.fromkeys(str(group) for group in groups or ())) or groups_here()
    if model is None:
        model = SMALL if quick or packaged_model() is None else PACKAGED
    settings = Settings((*chosen, *(("peers",) * peers)), quick, model, as_json, plot)
    if not run(settings):
        raise typer.Exit(1)


def _make_folder(folder: Path) -> None:
    """Make the folder of the charts before anything is measured."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise CommandError(f"cannot make the folder {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CommandError(f"cannot write into the folder {folder}")
