"""Files of commands are written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchvm.tools.files import write_file
from torchvm.tools.messages import CommandError


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    write_file(path, "é\n")
    assert path.read_bytes() == "é\n".encode()
    write_file(path, b"\x00")
    assert path.read_bytes() == b"\x00"
    plain = tmp_path / "plain"
    plain.write_text("")
    assert path.stat().st_mode == plain.stat().st_mode
    assert sorted(tmp_path.iterdir()) == [path, plain]


def test_an_interrupt_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.txt"
    path.write_text("old")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_file(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_is_a_mistake(tmp_path: Path) -> None:
    for path in (tmp_path / "absent" / "x", tmp_path, Path("/proc/x")):
        with pytest.raises(CommandError, match="cannot write"):
            write_file(path, "x")
    assert not list(tmp_path.iterdir())


def test_a_device_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    link = tmp_path / "link"
    link.symlink_to(pipe)
    for path in (pipe, link):
        with pytest.raises(CommandError, match="it is no regular file"):
            write_file(path, "x")
    assert pipe.is_fifo()
    assert sorted(tmp_path.iterdir()) == [link, pipe]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    path = tmp_path / "folder" / "out.txt"
    link = tmp_path / "link"
    link.symlink_to(path)
    for text in ("one", "two"):
        write_file(link, text)
        assert path.read_text() == text
        assert link.is_symlink()
