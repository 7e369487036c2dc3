"""The script that tries another torch: what it copies, installs and runs."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from torchvm.tools import try_torch

if TYPE_CHECKING:
    from pathlib import Path


def _checkout(root: Path) -> Path:
    """Make a checkout with a link, an ignored file and one that is not added yet."""
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    (root / "package").mkdir()
    (root / "ops").mkdir()
    (root / "ops" / "a.py").write_text("1\n")
    (root / "package" / "ops").symlink_to("../ops")
    (root / ".gitignore").write_text("ignored\n")
    (root / "ignored").touch()
    subprocess.run(["git", "-C", str(root), "add", "."], check=True)
    (root / "ops" / "gone.py").touch()
    subprocess.run(["git", "-C", str(root), "add", "ops/gone.py"], check=True)
    (root / "ops" / "gone.py").unlink()
    (root / "new file.py").touch()
    return root


def test_the_copy_holds_what_git_would(tmp_path: Path) -> None:
    root, target = _checkout(tmp_path / "root"), tmp_path / "target"
    target.mkdir()
    (target / "old").touch()
    try_torch.copy_checkout(root, target)
    names = {str(p.relative_to(target)) for p in target.rglob("*")}
    assert names >= {".gitignore", "new file.py", "ops/a.py", "package/ops"}
    assert not names & {"ignored", "old", "ops/gone.py"}
    assert (target / "package" / "ops").readlink().as_posix() == "../ops"


def test_it_installs_once_and_returns_pytests_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, folder = _checkout(tmp_path / "root"), tmp_path / "folder"
    commands: list[list[str]] = []
    run = subprocess.run

    def record(command: list[str], **options: Any) -> Any:
        if command[0] == "git":
            return run(command, **options)
        commands.append(command)
        if command[1:3] == ["-m", "venv"]:
            (folder / "venv").mkdir()
        if "pytest" in command:
            assert options["cwd"] == folder / "checkout"
            assert "PYTHONPATH" not in options["env"]
        return SimpleNamespace(returncode=3)

    monkeypatch.setattr(subprocess, "run", record)
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    for _ in range(2):
        assert try_torch.run_suite("2.11.0", folder, ["tests/test_graph.py"], root) == 3
    installs = [c for c in commands if "install" in c]
    assert installs[0][-3:] == ["torch==2.11.0", "-e", f"{folder}/checkout[test]"]
    assert len(installs) == 2
    tests = [c for c in commands if "pytest" in c]
    assert [c[-1] for c in tests] == ["tests/test_graph.py"] * 2


def test_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[str, Path, list[str]]] = []

    def record(version: str, folder: Path, arguments: list[str]) -> int:
        calls.append((version, folder, arguments))
        assert folder.is_dir()
        return 5

    monkeypatch.setattr(try_torch, "run_suite", record)
    keep = tmp_path / "new" / "keep"
    for extra in ([], ["--keep", str(keep)]):
        monkeypatch.setattr(sys, "argv", ["try_torch", "2.14.1", *extra, "-x", "tests"])
        with pytest.raises(SystemExit, match="5"):
            try_torch.main()
    (first, second) = calls
    assert first[0] == "2.14.1"
    assert first[2] == second[2] == ["-x", "tests"]
    assert not first[1].exists()
    assert second[1] == keep
    assert keep.is_dir()
