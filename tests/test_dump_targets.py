"""What `torchvm dump` can be pointed at, at which sizes, and what it says of what it cannot."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import torchvm
from tests import dump_targets
from tests.memory import at_most
from tests.tiny_models import tiny_llama
from torchvm.tools import cli
from torchvm.tools.messages import CommandError

if TYPE_CHECKING:
    from collections.abc import Callable

FILE = str(Path(dump_targets.__file__))
LARGE = ("--max-bs", "256", "--num-draft-tokens", "8", "--max-context-len", "1Mi")
FULL_BYTES = 256 * 8 * ((1 << 20) + 8)


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["dump", *arguments])


def graphs(*arguments: str) -> list[dict[str, Any]]:
    done = invoke(*arguments, "--json")
    assert done.exit_code == 0, (done.exception, done.stderr)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_the_verify_step_of_a_config_class_at_any_size() -> None:
    graphs("hf:LlamaConfig")  # Warm up what tracing itself keeps.
    with at_most(1 << 29):
        (graph,) = graphs("hf:LlamaConfig", *LARGE, "--fake-device", "cuda")
    (report,) = graph["reports"]
    assert (report["declared_bytes"], report["final_bytes"]) == (FULL_BYTES, 256 * 8)
    assert report["verdict"] == "COMPACTED"
    ops = [row["op"] for row in graph["after"]]
    assert ops.count("torchvm::tree_attention") == 2
    assert ops[-4:] == ["torchvm::verify_tree_greedy", "getitem", "getitem", "getitem"]
    assert all(row["output"].endswith("@cuda:0") for row in graph["after"])
    assert graph["findings"] == []


@pytest.mark.parametrize("name", ["Gemma2Config", "GPT2Config"])
def test_other_config_classes(name: str) -> None:
    (graph,) = graphs(f"hf:{name}", "--max-bs", "3")
    assert [r["verdict"] for r in graph["reports"]] == ["COMPACTED"]
    assert [row["output"] for row in graph["after"] if row["op"] == "torchvm::alloc_verify_mask"]


def test_the_config_of_a_folder_is_enough(tmp_path: Path) -> None:
    model = tiny_llama()
    model.config.save_pretrained(tmp_path)
    (graph,) = graphs(f"hf:{tmp_path}", "--num-draft-tokens", "6")
    (report,) = graph["reports"]
    context = model.config.max_position_embeddings
    assert report["declared_bytes"] == 8 * 6 * (context + 6)
    assert [reader["op"] for reader in report["readers"]] == ["torchvm::tree_attention"] * 2


def test_a_function_is_called_on_fakes_at_the_sizes_given() -> None:
    target = f"{FILE}:sized"
    graphs(target, "--fake-device", "cpu")
    with at_most(1 << 29):
        (graph,) = graphs(target, *LARGE, "--fake-device", "cuda")
    with at_most(1 << 29):
        assert "allocate" in str(invoke(target, *LARGE).exception)
    (plan,) = graph["plans"]
    assert (plan["declared_bytes"], plan["final_bytes"]) == (FULL_BYTES, 256 * 8 * 8)
    (mask,) = [row for row in graph["before"] if row["nbytes"] == FULL_BYTES and not row["takes"]]
    assert (mask["role"], mask["output"]) == ("mask", f"bool[{FULL_BYTES}] @cuda:0")


def test_a_function_is_traced_with_symbolic_sizes_and_keyword_arguments() -> None:
    (graph,) = graphs(f"{FILE}:sized", "--dynamic", "--max-bs", "3")
    (report,) = graph["reports"]
    assert report["declared_bytes"].startswith("s")
    (graph,) = graphs(f"{FILE}:sized", "--max-bs", "3")
    assert graph["reports"][0]["declared_bytes"] == 3 * 4 * 68


class _Step(torch.nn.Module):
    def forward(self, parents: Tensor, seq_lens: Tensor) -> Tensor:
        mask = torchvm.alloc_verify_mask(2, 4, 1 << 10, 0)
        tree = torchvm.build_tree_from_parents(
            parents, seq_lens, mask, num_draft_tokens=4, tree_mask_mode=0
        )
        return tree.positions


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
def test_an_exported_program(tmp_path: Path) -> None:
    path = tmp_path / "step.pt2"
    args = torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    torch.export.save(torch.export.export(_Step(), args), path)
    (graph,) = graphs(str(path))
    assert [r["verdict"] for r in graph["reports"]] == ["ELIDED"]
    assert graph["reports"][0]["final_bytes"] == 2 * 4 * 4
    assert graph["findings"] == []
    done = invoke(str(path), "--max-bs", "4")
    assert "sizes and devices of an exported program are its own" in str(done.exception)


def test_modules_that_register_ops_are_imported_before(tmp_path: Path) -> None:
    first = tmp_path / "registers_first.py"
    first.write_text("import sys\nsys.registered = True\n")
    target = tmp_path / "needs_the_first.py"
    target.write_text(
        "import sys, torch\n"
        "def f():\n"
        "    print('not among the results')\n"
        "    return torch.sin, (torch.ones(3) if sys.registered else None,)\n"
    )
    (graph,) = graphs(f"{target}:f", "--import", str(first), "--all")
    assert [row["op"] for row in graph["after"]] == ["placeholder", "aten::sin", "output"]


def test_what_a_target_prints_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "ops.py").write_text("print('imported')\n")
    (tmp_path / "step.py").write_text(
        "import torch\n"
        "print('loaded')\n"
        "def step(x):\n"
        "    print('traced')\n"
        "    return x + 1\n"
        "def make():\n"
        "    print('made')\n"
        "    return step, (torch.ones(2),)\n"
    )
    done = invoke(f"{tmp_path / 'step.py'}:make", "--import", str(tmp_path / "ops.py"), "--json")
    assert json.loads(done.stdout)
    printed = [done.stderr.index(f"{text}\n") for text in ("imported", "loaded", "made", "traced")]
    assert printed == sorted(printed)


def test_a_place_for_the_page_is_checked_before_anything_is_loaded(tmp_path: Path) -> None:
    done = invoke("absent.py:f", "--html", str(tmp_path))
    assert str(done.exception) == f"cannot write {tmp_path}: it is a folder"


def test_a_file_named_as_a_module_does_not_take_its_place(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("import torch\ndef f(): return torch.sin, (torch.ones(3),)")
    assert len(graphs(f"{tmp_path}/json.py:f")) == 1
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nonsense",), "TARGET must be FILE.py:FUNCTION, MODULE:FUNCTION, FILE.pt2, hf:FOLDER"),
        ((":f",), "TARGET must be FILE.py:FUNCTION"),
        (("absent.py:f",), "absent.py is not a file"),
        (("absent.pt2",), "absent.pt2 is not a file"),
        (("no_such_module:f",), "no_such_module cannot be imported: ModuleNotFoundError"),
        ((f"{FILE}:absent",), "has no function 'absent'"),
        ((f"{FILE}:__all__",), "has no function '__all__'"),
        ((f"{FILE}:broken",), "broken raised: RuntimeError: no such weights"),
        ((f"{FILE}:leaves",), "leaves raised: SystemExit: 3"),
        ((f"{FILE}:needs_more",), "needs_more needs the parameter batch: give it a default"),
        ((f"{FILE}:not_a_pair",), "must return (callable, example_args), got int"),
        ((f"{FILE}:wrong_args",), "must return example_args as a tuple, got Tensor"),
        (
            (f"{FILE}:fails_when_traced",),
            "cannot be traced: ValueError: seq_lens must be torch.int64, got torch.float32",
        ),
        (
            (f"{FILE}:a_gib", "--max-context-len", "1Mi"),
            "a_gib must take the parameter max_context_len for --max-context-len",
        ),
        ((f"{FILE}:sized", "--max-bs", "0"), "--max-bs must be >= 1, got 0"),
        ((f"{FILE}:a_gib", "--fake-device", "tpu"), "--fake-device must be cpu, cuda or cuda:N"),
        ((f"{FILE}:a_gib", "--json", "--dot"), "--json and --dot both print: leave one out"),
        ((f"{FILE}:a_gib", "--import", "absent.py"), "absent.py is not a file"),
        ((f"{FILE}:a_gib", "--html", "absent/x.html"), "cannot write absent/x.html"),
        (("hf:",), "hf: must be followed by a folder with a config.json or by a config class"),
        (("hf:NoConfig",), "got 'NoConfig'"),
        (("hf:T5Config",), "hf: must be a causal language model, got a T5Config"),
        (("hf:BertConfig",), "hf: must be a causal language model, got a BertConfig"),
        (("hf:tests",), "tests must hold a config.json"),
        (("hf:LlamaConfig", "--dynamic"), "a verify step has static shapes"),
        (("hf:MambaConfig",), "hf:MambaConfig cannot be traced: "),
        (("hf:LlamaConfig", "--max-bs", "9T", "--max-context-len", "9999T"), "overflow"),
    ],
)
def test_mistakes_are_one_line_on_stderr(
    arguments: tuple[str, ...],
    message: str,
    mistake: Callable[..., str],
) -> None:
    assert message in mistake("dump", *arguments)


@pytest.mark.parametrize("content", [b"", b"\x00\xff" * 999, b"PK\x05\x06" + b"\x00" * 18])
@pytest.mark.parametrize("name", ["x.pt2", "x.py", "config.json"])
def test_files_of_anything_are_mistakes(tmp_path: Path, content: bytes, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    target = {"x.pt2": str(path), "x.py": f"{path}:f", "config.json": f"hf:{tmp_path}"}[name]
    done = invoke(target)
    assert isinstance(done.exception, CommandError)
    assert "\n" not in str(done.exception)
    assert done.stdout == ""


def test_debug_shows_what_was_raised() -> None:
    done = invoke(f"{FILE}:broken", "--debug")
    assert isinstance(done.exception, RuntimeError)
    assert str(done.exception) == "no such weights"
