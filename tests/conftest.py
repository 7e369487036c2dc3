"""How the tests are spread over processes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Processes share the cores; torch and numba read this when they are imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("NUMBA_NUM_THREADS", "1")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two processes for the whole suite; some files or tests alone run in this one."""
    return 2 if config.args == config.getini("testpaths") else 0
