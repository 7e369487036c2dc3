"""A bound on what a block may allocate, whether or not it writes to it."""

from __future__ import annotations

import resource
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["at_most"]


@contextmanager
def at_most(nbytes: int) -> Iterator[None]:
    """Let the process grow by so many bytes and no more; peak memory may not grow by them either.

    Args:
        nbytes: of address space, libraries that are loaded inside included.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * 1024 < nbytes
