"""docs/LAYOUTS.md is what its own commands print and draw."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from typer.testing import CliRunner

from torchvm.ops.layout import packed_row_bytes
from torchvm.tools.cli import app

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_the_page(
    pytestconfig: pytest.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = pytestconfig.rootpath / "docs"
    text = (docs / "LAYOUTS.md").read_text()
    blocks = re.findall(r"```console\n\$ torchvm ([^\n]*)\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) >= 8
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    for command, shown in blocks:
        done = CliRunner().invoke(app, shlex.split(command))
        assert done.exit_code == 0, (command, done.stderr)
        assert done.stdout == shown, command
    pictures = sorted(path.name for path in (tmp_path / "docs").iterdir())
    assert pictures == sorted(re.findall(r"!\[.*\]\((.*)\)", text))
    for name in pictures:
        assert (docs / name).read_text() == (tmp_path / "docs" / name).read_text(), name


def test_the_table_of_packed_rows(pytestconfig: pytest.Config) -> None:
    text = (pytestconfig.rootpath / "docs" / "LAYOUTS.md").read_text()
    rows = [tuple(map(int, row)) for row in re.findall(r"\| (\d+) to (\d+) \| (\d+) \|", text)]
    assert [first for first, _, _ in rows] == [1, *(last + 1 for _, last, _ in rows[:-1])]
    for first, last, width in rows:
        assert packed_row_bytes(first) == packed_row_bytes(last) == width
        assert packed_row_bytes(last + 1) > width
    assert packed_row_bytes(129) == 8 * 3
