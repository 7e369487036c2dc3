"""Every environment variable that torchvm reads, in one table."""

from __future__ import annotations

import os

__all__ = ["VARIABLES", "flag", "text"]

VARIABLES = {
    "TORCHVM_DISABLE": "1 switches graph rewriting off (reports say so); part of the cache key",
    "TORCHVM_DUMP": "folder for graphs before and after the passes; goes without compile caches",
}


def text(name: str) -> str:
    """Return the value of a variable of the table, "" where it is not set."""
    if name not in VARIABLES:
        raise KeyError(name)
    return os.environ.get(name, "")


def flag(name: str) -> bool:
    """Whether a variable of the table is set to anything but empty or 0."""
    return text(name) not in ("", "0")
