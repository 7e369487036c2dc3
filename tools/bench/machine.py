"""What stands beside figures: the machine, the versions and the commit they are of."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torchvm
from torchvm.tools.env import facts

__all__ = ["machine_facts"]


def machine_facts(core: int | None) -> dict[str, Any]:
    """Describe the run.

    Args:
        core: the one that the process is kept on, if any.
    """
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": os.getloadavg()[0],
        "core": core,
        **facts(),
        **_commit(),
    }


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _commit() -> dict[str, Any]:
    """The commit of torchvm's source and whether it was changed; None where it is no checkout."""
    file = Path(torchvm.__file__).resolve()

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(file.parent), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", file.name) is None:
        return {"commit": None, "dirty": None}
    changed = git("status", "--porcelain", "--untracked-files=no")
    return {"commit": git("rev-parse", "HEAD"), "dirty": changed != ""}
