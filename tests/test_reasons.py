"""torchvm reasons: codes of reports, from the tables of the passes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from torchvm.passes.capture_check import CAPTURE_CODES, CaptureCode
from torchvm.passes.clone_check import COPY_CODES, CopyCode
from torchvm.passes.report import REASONS, Reason
from torchvm.tools.cli import app
from torchvm.tools.messages import CommandError


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["reasons", *arguments])


def test_every_code_has_one_text() -> None:
    assert set(REASONS) == set(Reason)
    assert set(CAPTURE_CODES) == set(CaptureCode)
    assert set(COPY_CODES) == set(CopyCode)
    names = [str(code) for table in (Reason, CaptureCode, CopyCode) for code in table]
    assert len(set(names)) == len(names)


def test_all() -> None:
    found = json.loads(invoke("--json").stdout)
    assert [entry["code"] for entry in found] == [*REASONS, *CAPTURE_CODES, *COPY_CODES]
    text = invoke().stdout
    assert max(map(len, text.splitlines())) <= 99
    assert text.startswith(
        "verdicts on masks:\n"
        "\n"
        "  ELIDED\n"
        "    nothing reads the mask: the allocation and every build of it are QLEN_ONLY\n"
        "    to do: none needed\n"
        "\n"
        "  COMPACTED\n"
    )
    flat = " ".join(text.split())
    for entry in found:
        assert f"{entry['code']} {entry['meaning']} to do: {entry['remedy']}" in flat


@pytest.mark.parametrize("code", ["NO_CONTRACT", "no_contract", "No-Contract"])
def test_one(code: str) -> None:
    assert invoke(code).stdout == (
        "NO_CONTRACT (verdicts on masks)\n"
        "  means  an op without a contract uses the mask, so all of it counts as read\n"
        "  to do  register_mask_reader says what an op reads\n"
    )


def test_one_as_json() -> None:
    assert json.loads(invoke("copied", "--json").stdout) == {
        "code": "COPIED",
        "source": "verify_no_clone",
        "meaning": COPY_CODES[CopyCode.COPIED].meaning,
        "remedy": COPY_CODES[CopyCode.COPIED].remedy,
    }


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        ("NO_CONTRAKT", "near ones: NO_CONTRACT"),
        ("build", "near ones: BUILDS_DIFFER"),
        ("mode", "near ones: NO_MODE_ARG, MODE_NOT_TAKEN, MODE_SHARED, MODE_MISMATCH"),
        ("zzz", "`torchvm reasons` lists them all"),
        ("", "`torchvm reasons` lists them all"),
        ("\x1b[31m\n", r"got '\x1b[31m\n': `torchvm reasons` lists them all"),
    ],
)
def test_unknown_codes_are_told_near_ones(code: str, hint: str) -> None:
    done = invoke(code)
    assert isinstance(done.exception, CommandError)
    assert hint in str(done.exception)
    assert str(done.exception).isprintable()
    assert done.stdout == ""
