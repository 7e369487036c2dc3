"""Every environment variable that torchvm reads, in one table."""

from __future__ import annotations

import os

__all__ = ["VARIABLES", "flag"]

VARIABLES = {
    "TORCHVM_DISABLE": "1 switches graph rewriting off (reports say so); part of the cache key",
}


def flag(name: str) -> bool:
    """Whether a variable of the table is set to anything but empty or 0."""
    if name not in VARIABLES:
        raise KeyError(name)
    return os.environ.get(name, "") not in ("", "0")
