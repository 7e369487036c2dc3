"""torchvm bench: what it measures, prints and draws, and what it refuses to say."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner

from torchvm.tools import cli
from torchvm.tools.bars import write_chart
from torchvm.tools.bench import attention, gpu, mask, report
from torchvm.tools.bench.machine import machine_facts
from torchvm.tools.bench.measure import (
    QUICK,
    Case,
    Contender,
    Row,
    Spread,
    identical,
    measure,
    pinned,
)
from torchvm.tools.bench.report import Measured
from torchvm.tools.bench.session import Settings, gpu_rows, run
from torchvm.tools.messages import CommandError

if TYPE_CHECKING:
    from pathlib import Path

SIZES = ("1 x 4", "32 x 4", "256 x 4")
TIMES = {
    "op": Spread(14.25, 14.0, 14.5, 9),
    "loop": Spread(4660.0, 4600.0, 4700.0, 9),
    "C": Spread(0.07, None, None, 1),
}
FACTS = {
    "cpu": "A CPU", "cores": 2, "memory_bytes": 24 << 30, "load_average": 0.5, "core": 1,
    "torchvm": "0.1.0", "torch": "2.13.0", "numba": "0.68", "numpy": None, "python": "3.11.7",
    "commit": "0123456789abcdef", "dirty": True,
}  # fmt: skip


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["bench", *arguments])


def group(*sizes: str, differing: tuple[str, ...] = ()) -> Measured:
    times = {name: spread for name, spread in TIMES.items() if name not in differing}
    facts = {"accepted a step": 2.5} if len(sizes) == 1 else {}
    rows = [
        Row("a build", size, "us a call", "op", "a walk", times, differing, facts)
        for size in sizes
    ]
    return Measured("tree", "tree: some builds", ("C: a loop in C",), tuple(rows))


def test_table_with_more_sizes_than_contenders() -> None:
    assert report.group_text(group(*SIZES)) == (
        "tree: some builds\n"
        "\n"
        "a build: microseconds a call (x: in multiples of op)\n"
        "                    op                 loop                C\n"
        "  1 x 4     14.2  ±2 %   4,660  ±1 %  327 x   0.07  0.0049 x\n"
        "  32 x 4    14.2  ±2 %   4,660  ±1 %  327 x   0.07  0.0049 x\n"
        "  256 x 4   14.2  ±2 %   4,660  ±1 %  327 x   0.07  0.0049 x\n"
        "\n"
        "  C: a loop in C"
    )


def test_table_with_fewer_sizes_than_contenders_and_a_wrong_one() -> None:
    measured = group("1 x 4", differing=("C",))
    assert report.group_text(measured) == (
        "tree: some builds\n"
        "\n"
        "a build: microseconds a call (x: in multiples of op)\n"
        "                        1 x 4\n"
        "  op        14.2  ±2 %\n"
        "  loop     4,660  ±1 %  327 x\n"
        "  C      differs\n"
        "  1 x 4: accepted a step 2.50\n"
        "\n"
        "  C: a loop in C"
    )
    assert report.differences(measured) == [
        "no ratio: C differs from a walk in a build, 1 x 4",
    ]


def test_nothing_is_a_multiple_of_a_wrong_base() -> None:
    measured = group("1 x 4", differing=("op",))
    assert " x\n" not in report.group_text(measured).replace("1 x 4", "")
    times = report.as_dict(measured)["rows"][0]["times"]
    assert {name: entry["ratio"] for name, entry in times.items()} == {"loop": None, "C": None}


def test_machine_is_told() -> None:
    assert report.machine_text(FACTS) == (
        "A CPU, 2 cores, 24.0 GiB, load 0.50; 1 thread, kept on core 1\n"
        "torchvm 0.1.0 (commit 0123456789ab, changed since), torch 2.13.0, numba 0.68, "
        "python 3.11.7"
    )
    assert "1 thread, on any core" in report.machine_text(FACTS | {"core": None})
    assert "(no checkout)" in report.machine_text(FACTS | {"commit": None, "dirty": None})
    found = machine_facts(None)
    assert set(FACTS) <= set(found)
    json.dumps(found)


def test_chart_has_every_number(tmp_path: Path) -> None:
    path = tmp_path / "tree.svg"
    write_chart(path, report.panels(group(*SIZES)), title="a & <title>", footer="A $CPU$")
    svg = path.read_text()
    for text in ("a &amp; &lt;title&gt;", "256 x 4", "4,660  (327 x)", "A $CPU$", "loop"):
        assert f">{text}<" in svg
    assert ">a build (x: in multiples of op)<" in svg
    assert svg.count(">14.2<") == 3


def test_quick_run_as_text_and_charts(tmp_path: Path) -> None:
    done = invoke("tree", "mask", "attention", "--quick", "--plot", str(tmp_path / "charts"))
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert "1 thread" in lines[0]
    for head in ("build_tree FULL_MASK: ", "verify_tree_greedy: ", "verify mask: ", "attention: "):
        assert any(line.startswith(head) for line in lines)
    assert max(map(len, lines)) < 120
    names = ["attention.svg", "mask.svg", "tree.svg"]
    assert sorted(path.name for path in (tmp_path / "charts").iterdir()) == names


def test_quick_run_as_json() -> None:
    done = invoke("mask", "generate", "--quick", "--json", "--model", "small")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert set(found) == {"machine", "groups", "absent_peers"}
    assert {"cpu", "cores", "memory_bytes", "torch", "commit", "dirty"} <= set(found["machine"])
    assert found["machine"]["threads"] == 1
    assert list(found["groups"]) == ["mask", "generate"]
    for measured in found["groups"].values():
        for row in measured["rows"]:
            assert row["differing"] == []
            assert row["times"][row["base"]]["ratio"] == 1.0
            for entry in row["times"].values():
                assert 0 < entry["low"] <= entry["median"] <= entry["high"]
    (decoding,) = found["groups"]["generate"]["rows"]
    assert (decoding["what"], decoding["unit"]) == ("small model", "us a token")
    assert "accepted a step" in decoding["facts"]
    rate = decoding["facts"]["tokens/s by plain decoding"]
    assert rate == pytest.approx(1e6 / decoding["times"]["plain decoding"]["median"])


def _planted(case: Case, change: Any) -> Case:
    """The same with a contender whose results are changed."""
    results = case.contenders[0].results
    assert results is not None
    planted = Contender("planted", case.contenders[0].run, lambda: change(results()))
    return case._replace(contenders=(*case.contenders, planted))


def test_wrong_results_get_no_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    case = next(mask.cases(mask.QUICK))
    planted = _planted(case, lambda found: [found[0] + 1, *found[1:]])
    settings = Settings(("mask",), quick=True, model="small", as_json=False, folder=None)
    assert run(settings, {"mask": [case]})
    capsys.readouterr()
    assert not run(settings, {"mask": [planted]})
    out, err = capsys.readouterr()
    (line,) = [line for line in out.splitlines() if "planted" in line]
    assert line.split() == ["planted", "differs"]
    assert err == (
        "torchvm: no ratio: planted differs from a walk in Python in verify mask, 2 x 8 x 40\n"
    )


def test_rounding_is_no_difference_and_more_is() -> None:
    (case, *_) = attention.cases(attention.QUICK)
    assert measure(_planted(case, lambda out: out + 1e-7), QUICK).differing == ()
    assert measure(_planted(case, lambda out: out + 1e-3), QUICK).differing == ("planted",)
    row = measure(_planted(case, torch.zeros_like), QUICK)
    assert row.differing == ("planted",)
    assert list(row.times) == [contender.name for contender in case.contenders]


def test_identical() -> None:
    one = torch.tensor([1, 2])
    assert identical((one, [3]), [one.clone(), [3]])
    assert not identical((one, [3]), [one, [4]])
    assert not identical((one,), [one, one])
    assert not identical([1, 2], one)


def test_wrong_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchvm.tools.bench.session.run", lambda _: False)
    assert invoke("mask", "--quick").exit_code == 1


def test_an_interrupt_leaves_whole_files_and_the_process_as_it_was(tmp_path: Path) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    case = Case("a", "b", (Contender("c", interrupted),), lambda: None, "d")
    settings = Settings(
        ("mask", "tree"), quick=True, model="small", as_json=False, folder=tmp_path
    )
    before = torch.get_num_threads(), os.sched_getaffinity(0)
    with pytest.raises(KeyboardInterrupt):
        run(settings, {"tree": [case]})
    assert (torch.get_num_threads(), os.sched_getaffinity(0)) == before
    assert [path.name for path in tmp_path.iterdir()] == ["mask.svg"]
    assert (tmp_path / "mask.svg").read_text().rstrip().endswith("</svg>")


def test_one_thread_on_one_core() -> None:
    with pinned() as core:
        assert torch.get_num_threads() == 1
        assert core is None or os.sched_getaffinity(0) == {core}


def test_help_says_what_a_group_is_line_by_line() -> None:
    assert "\n  tree       build, select and verify beside C" in invoke("--help").stdout


def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = invoke("nonsense")
    assert (done.exit_code, done.stdout) == (2, "")
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "absent" / "charts"):
        done = invoke("mask", "--quick", "--plot", str(folder))
        assert isinstance(done.exception, CommandError)
        assert str(done.exception).startswith(f"cannot make the folder {folder}: ")
    done = invoke("mask", "generate", "--quick", "--model", "no/such")
    assert done.stdout == ""
    assert str(done.exception).startswith("--model must be 'packaged', 'small' or a folder")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = invoke("mask", "--quick", "--plot", str(tmp_path / "charts"))
    assert str(done.exception).endswith("pip install 'torchvm[plot]'")
    assert not (tmp_path / "charts").exists()


def test_rows_of_a_gpu() -> None:
    """Grouped by op, though they come size by size."""
    sizes = gpu.Sizes(batches=(1, 3), trees=((4, 2, 2),), context=40, large=(2, 4, 5000))
    found = gpu.rows(sizes, lambda call: (call() is None, 20.0, 2.0)[1:], torch.device("cpu"))
    rows = tuple(gpu_rows(found))
    text = report.group_text(Measured("gpu", "gpu: ops", (), rows))
    lines = text.splitlines()
    heads = [line for line in lines if line.startswith("verify_tree_greedy: ")]
    assert heads == ["verify_tree_greedy: microseconds a call (x: in multiples of replayed)"]
    at = lines.index(heads[0])
    assert [line.split() for line in lines[at + 1 : at + 4]] == [
        ["replayed", "eager"], ["1", "x", "4", "2.00", "20.0", "10.0", "x"],
        ["3", "x", "4", "2.00", "20.0", "10.0", "x"],
    ]  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_needs_one() -> None:
    assert str(invoke("gpu").exception).startswith("gpu needs a GPU that this PyTorch build can")
