"""How the tests are spread over processes, and what tests of commands share."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

if "PYTEST_XDIST_WORKER" in os.environ:
    # Processes share the cores; torch and numba read this when they are imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("NUMBA_NUM_THREADS", "1")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two processes for the whole suite; some files or tests alone run in this one."""
    return 2 if config.args == config.getini("testpaths") else 0


@pytest.fixture
def mistake(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Run the command with arguments that it must refuse, in one line on stderr: that line."""
    from torchvm.tools import cli

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["torchvm", *arguments])
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert left.value.code == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        return err

    return run
