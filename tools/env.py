"""torchvm env: the versions and the machine that a report of a problem should name."""

from __future__ import annotations

import json
import platform
from importlib import metadata
from typing import Annotated, Any

import typer

from torchvm.ops.version import __version__
from torchvm.tools.models import packaged_model

__all__ = ["env", "facts"]

_PACKAGES = ("torch", "triton", "numba", "numpy", "transformers")


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show versions, threads, devices and whether the packaged model is there."""
    found = facts()
    if as_json:
        typer.echo(json.dumps(found))
        return
    width = max(map(len, found))
    for name, value in found.items():
        typer.echo(f"{name.replace('_', ' '):<{width}}  {_shown(value)}")


def facts() -> dict[str, Any]:
    """Name versions, threads and devices; None is what is not installed."""
    import torch

    model = packaged_model()
    return {
        "torchvm": __version__,
        **{name: _version(name) for name in _PACKAGES},
        "torch": torch.__version__,  # Names the build, as installed metadata may not.
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "cuda": torch.cuda.is_available(),
        "packaged_model": None if model is None else str(model),
    }


def _shown(value: str | int | None) -> str:
    """Write a fact; a thread is the number 1, which equals True."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "not installed" if value is None else str(value)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
