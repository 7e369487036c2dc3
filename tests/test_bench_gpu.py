"""The GPU bench: what it says with no GPU, and that its calls and byte counts are right."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch

from torchvm.tools.bench import gpu

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

SMALL = gpu.Sizes(batches=(1, 3), trees=((4, 2, 2), (16, 4, 3)), context=40, large=(5, 4, 5000))


def _clock(call: Callable[[], object]) -> tuple[float, float]:
    call()
    return 20.0, 2.0


def test_says_in_one_line_that_there_is_no_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == gpu.main(["--json"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "no GPU that this PyTorch build can use: nothing was measured\n" * 2


def test_times_every_op_at_every_size() -> None:
    measured = list(gpu.rows(SMALL, _clock, torch.device("cpu")))
    written = {(row.op, row.size): row.written for row in measured}
    assert len(written) == len(measured) == 4 * 6 + 4 + 2
    outputs = 3 * 16 * 4 * 8
    assert written["build_tree QLEN_ONLY", "3 x 16"] == 3 * 16 * 16 + outputs
    assert written["build_tree QLEN_ONLY_BITPACKING", "3 x 16"] == 3 * 16 * 2 + outputs
    assert written["build_tree FULL_MASK, tree only", "3 x 16"] == 3 * 16 * 16 + outputs
    assert written["build_tree FULL_MASK", "3 x 16"] == 3 * 16 * (40 + 16) + outputs
    assert written["verify_tree_greedy", "3 x 16"] == 4 * (3 * 16 + 3 * 4 + 3)
    assert written["FULL_MASK, every cell live", "5 x 4 x 5,000"] == 5 * 4 * 5004
    assert written["FULL_MASK, one request of 4,096 live", "5 x 4 x 5,000"] == 4 * 4096 + 5 * 16
    assert written["refill: mask.fill_(True)", "5 x 4 x 5,000"] == 5 * 4 * 5004
    results = 5 * 4 * 8 + 5 * 4 * 4 * 2 + 5 * 4
    assert written["step, mask as declared", "5 x 4 x 5,000"] == 5 * 4 * 5004 + results
    assert written["step, mask as the passes lay it out", "5 x 4 x 5,000"] == 5 * 4 * 4 + results


def test_prints_a_table_or_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = [
        gpu.Row("FULL_MASK, every cell live", "large", 3000, 4.0, 3.0),
        gpu.Row("FULL_MASK, one request", "large", 30, 4.0, 1.0),
        gpu.Row("refill", "large", 3000, 4.0, 2.0),
        gpu.Row("copy", "large", 3000, 4.0, 1.5),
        gpu.Row("kept", "large", 3100, 9.0, 8.0),
        gpu.Row("elided", "large", 100, 3.0, 2.0),
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a device")
    monkeypatch.setattr(gpu, "rows", lambda *_: iter(measured))
    assert gpu.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("a device, torch ")
    assert lines[2].split() == [
        "FULL_MASK,", "every", "cell", "live", "large", "3,000", "4.0", "3.00", "1.0",
    ]  # fmt: skip
    assert "0.67 of the refill's rate; a copy moves 4 GB/s" in lines[-1]
    assert lines[-2] == "step large: 8.0 us with the FULL mask, 2.0 us without it, 4.00 x"
    assert lines[-1].endswith("the FULL write reaches 0.25")
    assert gpu.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"] == "a device"
    assert found["rows"][0] == measured[0]._asdict() | {"gb_per_s": 1.0}
