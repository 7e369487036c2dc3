"""What a compile shows of masks: counters, log, trace artifacts, a folder; nothing when off."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import torchvm
from tests.verify_graphs import CASES, batch
from torchvm.compilation import PASSES
from torchvm.ops import environment
from torchvm.passes import visibility
from torchvm.passes.visibility import VisiblePipeline

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TORCHVM_DUMP", raising=False)
    torch._dynamo.reset()
    torchvm.clear_reports()
    counters.clear()
    yield
    torch._dynamo.reset()


def _compile(name: str, inner: str = "aot_eager") -> None:
    function = CASES[name].function
    options: dict[str, Any] = {"inner": inner}
    with torch.no_grad():
        torch.compile(function, backend="torchvm", options=options)(*batch())


def test_verdicts_are_counted() -> None:
    _compile("two_masks_one_read")
    _compile("dead")
    assert dict(counters["torchvm"]) == {"FULL_READ": 1, "ELIDED": 2}


def test_the_log_names_mask_verdict_and_remedy(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="torchvm"):
        _compile("read_without_contract")
    (record,) = [r for r in caplog.records if r.name == "torchvm"]
    assert "NO_CONTRACT" in record.getMessage()
    assert "register_mask_reader says what an op reads" in record.getMessage()


def test_a_compile_from_the_cache_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with fresh_cache(), caplog.at_level(logging.INFO, logger="torchvm"):
        for expected in (1, 2):
            torch._dynamo.reset()
            _compile("dead", "inductor")
            assert counters["torchvm"]["ELIDED"] == expected
            assert sum(r.name == "torchvm" for r in caplog.records) == expected
        assert counters["aot_autograd"]["autograd_cache_hit"] == 1


def test_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "dump"
    monkeypatch.setenv("TORCHVM_DUMP", str(folder))
    _compile("two_masks_one_read")
    torch._dynamo.reset()
    torch.compile(torch.sin, backend="torchvm", options={"inner": "aot_eager"})(torch.ones(2))
    names = {path.name for path in folder.iterdir()} - {".lock"}
    numbered = {f"000{n}_{side}.txt" for n in (0, 1) for side in ("before", "after")}
    assert names == {"index.md", "report.json", *numbered}
    before, after = ((folder / f"0000_{side}.txt").read_text() for side in ("before", "after"))
    assert before.count("tree_mask_mode=0") == 4
    assert after.count("tree_mask_mode=0") == 2
    assert after.count("tree_mask_mode=1") == 2
    assert after.splitlines()[-1].startswith("return")
    first, second = json.loads((folder / "report.json").read_text())
    assert [r["verdict"] for r in first["reports"]] == ["FULL_READ", "ELIDED"]
    assert second == {"number": "0001", "reports": []}
    rows = (folder / "index.md").read_text().splitlines()[4:]
    assert len(rows) == 3
    assert "FULL_MASK 138 B -> QLEN_ONLY 18 B | ELIDED | none needed" in rows[1]
    assert "[before](0001_before.txt)" in rows[2]


def test_dumping_goes_without_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with fresh_cache():
        _compile("dead", "inductor")
        monkeypatch.setenv("TORCHVM_DUMP", str(tmp_path))
        torch._dynamo.reset()
        _compile("dead", "inductor")
    assert counters["aot_autograd"]["autograd_cache_hit"] == 0
    assert (tmp_path / "0000_after.txt").exists()
    assert counters["torchvm"]["ELIDED"] == 2


def test_every_rank_has_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    monkeypatch.setenv("TORCHVM_DUMP", str(folder))
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        _compile("dead")
    finally:
        torch.distributed.destroy_process_group()
    assert [path.name for path in folder.iterdir()] == ["rank0"]
    assert (folder / "rank0" / "index.md").exists()


def test_a_folder_that_cannot_be_written_is_only_logged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHVM_DUMP", str(tmp_path / "file" / "dump"))
    _compile("dead")
    assert "TORCHVM_DUMP: nothing written to" in caplog.text
    assert len(torchvm.reports()) == 1


def test_trace_artifacts(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: dict[str, str] = {}

    def keep(kind: str, metadata_fn: Any, payload_fn: Any, **_: Any) -> None:
        assert kind == "artifact"
        shown[metadata_fn()["name"]] = payload_fn()

    monkeypatch.setattr(visibility, "trace_structured", keep)
    _compile("dead")
    assert list(shown) == ["torchvm_before", "torchvm_after", "torchvm_reports"]
    assert "tree_mask_mode=0" in shown["torchvm_before"]
    assert "tree_mask_mode=0" not in shown["torchvm_after"]
    assert json.loads(shown["torchvm_reports"])[0]["verdict"] == "ELIDED"


def test_torch_is_given_artifacts_that_it_takes() -> None:
    from torch._logging._internal import trace_log

    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler = Keep()
    trace_log.addHandler(handler)
    try:
        _compile("dead")
    finally:
        trace_log.removeHandler(handler)
    metadata = [getattr(r, "metadata", {}).get("artifact", {}) for r in records]
    ours = [m["name"] for m in metadata if m.get("name", "").startswith("torchvm")]
    assert ours == ["torchvm_before", "torchvm_after", "torchvm_reports"]


def test_nothing_is_printed_when_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._logging._internal import trace_log

    def fail(*_: Any, **__: Any) -> str:
        raise AssertionError("a graph was printed")

    monkeypatch.setattr(trace_log, "handlers", [])
    monkeypatch.setattr(visibility, "format_graph", fail)
    _compile("dead")
    assert len(torchvm.reports()) == 1


def test_dumping_is_not_in_the_key_but_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = VisiblePipeline([p() for p in PASSES], lambda _: None)
    assert pipeline.uuid() is not None
    monkeypatch.setenv("TORCHVM_DUMP", "somewhere")
    assert pipeline.uuid() is None


def test_only_variables_of_the_table_are_read() -> None:
    with pytest.raises(KeyError):
        environment.text("HOME")
