"""torchvm generate on back ends, on small models, with stop strings, and as a stream."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner

from torchvm.backends.registry import BACKENDS
from torchvm.tools import cli
from torchvm.tools.cli import app

if TYPE_CHECKING:
    from collections.abc import Iterator

SMALL = ("--model", "small", "--inner", "aot_eager", "--max-new-tokens", "12")
PROMPT = "abcabcab"


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def generated(*options: str) -> Any:
    done = CliRunner().invoke(app, ["generate", PROMPT, *SMALL, *options])
    assert done.exit_code == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize(
    ("options", "claim", "read_by", "layout"),
    [
        (
            ("--backend", "flash-attention"),
            "flash-attention, which declares that it reads its mask",
            "torchvm::expand_tree_pages x 1 (TREE_BLOCK)",
            "FULL_MASK, 2,112 bytes -> QLEN_ONLY_BITPACKING, 8 bytes (COMPACTED)",
        ),
        (
            ("--backend", "flashmla", "--topk", "1"),
            "flashmla, which declares that it does not read its mask",
            "nothing", "FULL_MASK, 2,112 bytes -> QLEN_ONLY, 64 bytes (ELIDED)",
        ),
        (
            ("--backend", "hybrid-linear", "--max-context-len", "8192"),
            "hybrid-linear(cpu, linear), which declares that it reads its mask",
            "torchvm::tree_attention x 2 (TREE_BLOCK)",
            "FULL_MASK, 65,600 bytes -> QLEN_ONLY_BITPACKING, 8 bytes (COMPACTED)",
        ),
    ],
)  # fmt: skip
def test_the_ledger_of_a_back_end(
    options: tuple[str, ...], claim: str, read_by: str, layout: str
) -> None:
    shown = generated("--check", *options)
    assert f"back end        {claim}\n" in shown
    assert f"mask read by    {read_by}\n" in shown
    assert f"verify mask     declared {layout}\n" in shown
    assert "the tokens equal those of plain decoding" in shown


def test_the_ledger_as_json() -> None:
    found = json.loads(generated("--backend", "flashinfer", "--json", "--no-compare"))
    assert (found["backend"], found["declares_read"]) == ("flashinfer", True)
    (mask,) = found["masks"]
    assert (mask["final_mode"], mask["verdict"]) == ("FULL_MASK", "FULL_READ")
    assert [(r["op"], r["reads"]) for r in mask["readers"]] == [
        ("torchvm::pack_mask_bits", "FULL")
    ]
    by_step = json.loads(generated("--json", "--no-compare"))
    assert (by_step["backend"], by_step["declares_read"]) == ("cpu", None)


def test_help_names_every_back_end() -> None:
    shown = CliRunner().invoke(app, ["generate", "--help"]).stdout
    assert ",".join(sorted(BACKENDS)) in "".join(shown.split()).replace("│", "")


def test_a_stop_string_ends_the_text_before_it() -> None:
    whole = json.loads(generated("--json", "--no-compare"))
    text = whole["text"]
    stop = text[3:5]
    assert text.index(stop) == 3
    cut = json.loads(generated("--json", "--check", "--stop", stop, "--stop", "never"))
    assert cut["text"] == text[:3]
    assert cut["equals_plain"] is True
    assert cut["new_tokens"] < whole["new_tokens"]
    assert whole["tokens"][: cut["new_tokens"]] == cut["tokens"]


def test_a_stream_shows_the_text_once() -> None:
    text = json.loads(generated("--json", "--no-compare"))["text"]
    shown = generated("--stream", "--no-compare")
    assert shown.startswith(f"{text}\n\ntokens ")
    assert shown.count(text) == 1
    stopped = generated("--stream", "--no-compare", "--stop", text[3:5])
    assert stopped.startswith(f"{text[:3]}\n\ntokens ")


def test_samples_follow_the_seed() -> None:
    texts = []
    for seed in ("1", "1", "2"):
        options = ("--temperature", "2", "--top-k", "50", "--seed", seed)
        found = json.loads(generated("--json", *options))
        assert found["sampling"]["temperature"] == 2
        assert found["equals_plain"] is None
        texts.append(found["tokens"])
    assert texts[0] == texts[1] != texts[2]
    shown = generated("--temperature", "0.5", "--top-p", "0.9", "--seed", "7")
    assert "temperature 0.5, top-p 0.9, top-k 0, seed 7\n" in shown


def test_the_models_own_layers_draft() -> None:
    found = json.loads(generated("--json", "--check", "--draft-layers", "2"))
    assert found["draft_layers"] == 2
    assert found["equals_plain"] is True
    # The small model has two layers: all of it drafts what it accepts.
    assert found["accepted_per_step"] > 1.5
    assert "the first 1 layers: topk 2" in generated("--no-compare", "--draft-layers", "1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--backend", "cuda"), "backend must be one of cpu, triton, triton-unified"),
        (("--backend", "flashmla"), "topk must be 1 for the back end 'flashmla'"),
        (("--stream", "--json"), "--stream prints text: leave --json out"),
        (
            ("--backend", "cpu", "--mask-mode", "qlen"),
            "--mask-mode is for the step's own mask: leave it or --backend out",
        ),
        (("--top-p", "0.5"), "--top-p and --top-k need --temperature"),
        (("--temperature", "1", "--check"), "--check compares greedy tokens"),
        (("--temperature", "1", "--top-p", "0"), "top_p must be in (0, 1], got 0.0"),
        (("--draft-layers", "3"), "num_layers must be 1 to the model's 2, got 3"),
        (("--stop", ""), "--stop must be a text, got an empty one"),
        (("--max-context-len", "9000"), "max_context_len must be at most the model's 8192"),
        (("--chat",), "--chat needs a model with a chat template: use --raw"),
        (
            ("--backend", "deepseek-v4", "--topk", "1", "--num-draft-tokens", "17"),
            "num_draft_tokens must be at most the sliding window of 16, got 17",
        ),
    ],
)
def test_mistakes_are_one_line_on_stderr(
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["torchvm", "generate", "x", *SMALL, *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
