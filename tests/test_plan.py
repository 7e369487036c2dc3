"""torchvm plan: bytes of every layout, as a table, as JSON and as bars."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from torchvm.ops.layout import TreeMaskMode, mask_storage, packed_bits_numel
from torchvm.tools.cli import app
from torchvm.tools.messages import CommandError
from torchvm.tools.plan import layouts

if TYPE_CHECKING:
    from pathlib import Path

LARGE = ("--max-bs", "256", "--num-draft-tokens", "4", "--max-context-len", "1Mi")
ASKED = ("--ranks", "8", "--kv-cache", "80Gi", "--bandwidth", "4.8T")


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["plan", *arguments])


def test_table_of_a_large_deployment() -> None:
    assert invoke(*LARGE, *ASKED).stdout == (
        "256 requests x 4 draft tokens x 1 Mi context, 8 ranks\n"
        "\n"
        "layout                        bytes            all ranks       of KV   refill\n"
        "FULL_MASK             1,073,745,920  1.00 GiB   8.00 GiB      1.25 %   224 us\n"
        "FULL_MASK as bits       134,218,240   128 MiB   1.00 GiB     0.156 %  28.0 us\n"
        "QLEN_ONLY                     4,096  4.00 KiB   32.0 KiB  4.77e-06 %  0.85 ns\n"
        "QLEN_ONLY_BITPACKING          1,024  1.00 KiB   8.00 KiB  1.19e-06 %  0.21 ns\n"
    )


def test_help_says_what_a_column_is_line_by_line() -> None:
    assert "\n    bytes      of one rank's buffer, a byte a cell unless bits\n" in (
        invoke("--help").stdout
    )


def test_columns_are_those_that_were_asked_for() -> None:
    assert invoke("--max-bs=1", "--num-draft-tokens=33", "--max-context-len=1").stdout == (
        "1 request x 33 draft tokens x 1 context\n"
        "\n"
        "layout                bytes\n"
        "FULL_MASK             1,122  1.10 KiB\n"
        "FULL_MASK as bits       141     141 B\n"
        "QLEN_ONLY             1,089  1.06 KiB\n"
        "QLEN_ONLY_BITPACKING    264     264 B\n"
    )
    header = invoke(*LARGE, "--kv-cache", "1Ki").stdout.splitlines()
    assert header[2].split() == ["layout", "bytes", "of", "KV"]
    assert header[3].endswith("104,858,000 %")


def test_json() -> None:
    found = json.loads(invoke(*LARGE, *ASKED, "--json").stdout)
    rows = found.pop("layouts")
    assert found == {
        "max_bs": 256,
        "num_draft_tokens": 4,
        "max_context_len": 1 << 20,
        "ranks": 8,
        "kv_cache_bytes": 80 << 30,
        "bandwidth_bytes_per_second": 4_800_000_000_000,
    }
    assert [row["bytes"] for row in rows] == [1_073_745_920, 134_218_240, 4096, 1024]
    assert rows[0] == {
        "layout": "FULL_MASK",
        "formula": "b n (c + n)",
        "bytes": 1_073_745_920,
        "bytes_all_ranks": 8_589_967_360,
        "kv_cache_share": 1_073_745_920 / (80 << 30),
        "refill_seconds": 1_073_745_920 / 4.8e12,
    }
    plain = json.loads(invoke(*LARGE, "--json").stdout)["layouts"][0]
    assert plain["kv_cache_share"] is plain["refill_seconds"] is None


def test_sizes_are_those_of_the_buffers() -> None:
    for sizes in ((1, 1, 1), (3, 9, 5), (2, 65, 1000)):
        full, bits, qlen, packed = (layout.bytes for layout in layouts(*sizes))
        stored = [mask_storage(mode, *sizes) for mode in TreeMaskMode]
        assert [full, qlen, packed] == [numel * dtype.itemsize for numel, dtype in stored]
        assert bits == packed_bits_numel(*sizes)


def test_runs_without_torch_and_without_matplotlib() -> None:
    code = (
        "import sys; from torchvm.tools.cli import app\n"
        f"try: app({['plan', *LARGE]!r})\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    command = [sys.executable, "-c", f"import sys; sys.argv[0] = 'torchvm'\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    assert "1,073,745,920" in done.stdout


@pytest.mark.parametrize(
    "value",
    ["0", "-1", "nan", "1.5", "", "1e9", "9" * 5000, "9223372036854775808", "many", "[red]1"],
)
def test_odd_counts_are_wrong_usage(value: str) -> None:
    done = invoke("--max-bs", value, "--num-draft-tokens", "4", "--max-context-len", "1Mi")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "'--max-bs'" in done.stderr
    assert "Traceback" not in done.stderr


def test_masks_that_no_memory_holds_are_a_mistake() -> None:
    done = invoke("--max-bs=1Ti", "--num-draft-tokens=1", "--max-context-len=1Ti")
    assert isinstance(done.exception, CommandError)
    assert str(done.exception).startswith("the masks must fit into 8,388,608 TiB, got 1,208,")


@pytest.mark.parametrize("options", [(), ASKED])
def test_svg_has_every_label(tmp_path: Path, options: tuple[str, ...]) -> None:
    path = tmp_path / "plan.svg"
    done = invoke(*LARGE, *options, "--plot", str(path))
    assert done.exit_code == 0, done
    svg = path.read_text()
    for text in ("FULL_MASK as bits", "QLEN_ONLY_BITPACKING", "1.00 GiB", "log scale"):
        assert f">{text}<" in svg or text in svg
    assert ("KV cache of a rank, 80.0 GiB" in svg, ">8 ranks<" in svg) == (bool(options),) * 2
    invoke(*LARGE, *options, "--plot", str(path))
    assert path.read_text() == svg


def test_png_and_other_names(tmp_path: Path) -> None:
    invoke(*LARGE, "--plot", str(tmp_path / "plan.PNG"), "--json")
    assert (tmp_path / "plan.PNG").read_bytes().startswith(b"\x89PNG")
    done = invoke(*LARGE, "--plot", str(tmp_path / "plan.pdf"))
    assert str(done.exception).startswith("--plot must end in .svg or .png, got ")
    done = invoke(*LARGE, "--plot", str(tmp_path / "absent" / "plan.svg"))
    assert str(done.exception).startswith("cannot write ")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.PNG"]


def test_missing_matplotlib_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = invoke(*LARGE, "--plot", str(tmp_path / "plan.svg"))
    assert isinstance(done.exception, CommandError)
    assert str(done.exception).endswith("pip install 'torchvm[plot]'")
    assert "\n" not in str(done.exception)
    assert done.stdout == ""
