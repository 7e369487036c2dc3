"""torchvm generate on back ends, on small models, with stop strings, and as a stream."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner

from torchvm.backends.registry import BACKENDS
from torchvm.tools.cli import app
from torchvm.tools.messages import CommandError, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SMALL = ("--model", "small", "--inner", "aot_eager", "--max-new-tokens", "12")
PROMPT = "abcabcab"


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def generated(*options: str) -> Any:
    return run(PROMPT, *options)


def run(*arguments: str) -> Any:
    done = CliRunner().invoke(app, ["generate", *SMALL, *arguments])
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


def test_the_whole_output() -> None:
    """Word for word, but for times and what a random model says."""
    torch._dynamo.reset()
    shown = generated("--check", "--backend", "cpu", "--threads", "1", "--topk", "1")
    text, facts = shown.split("\n\n", 1)
    assert text
    steady = re.sub(r"\d+\.\d+( s | tokens/s|$| x )", r"#\1", re.sub(r"is \S+ x", "is # x", facts))
    assert (
        steady
        == """\
tokens          8 in the prompt, 12 generated
drafts          prompt lookup: topk 1, depth 4, 8 nodes a tree
steps           11, accepting 0.09 drafts each on average
speed           # tokens/s on 1 thread (aot_eager)
plain decoding  # tokens/s; speculation is # x that
compiling       # s for verification, # s for plain decoding; once, and not in the speeds
back end        cpu, which declares that it does not read its mask
verify mask     declared FULL_MASK, 2,112 bytes -> QLEN_ONLY, 64 bytes (ELIDED)
mask read by    torchvm::tree_attention x 2 (NOTHING)
on paper        256 requests x 1 Mi context: 2,147,500,032 bytes -> 16,384 bytes
buffers         TARGET_VERIFY, 464 bytes: runner 400 (8 slots), cpu 64 (tree_mask)
check           the tokens equal those of plain decoding
"""
    )


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


def test_prompts_of_a_file_decode_together_as_they_do_alone(tmp_path: Path) -> None:
    prompts = ["abcabcab", "zyx zyx\nzyx", "hello"]
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        "\n".join(
            [
                json.dumps(prompts[0]),
                "",
                json.dumps({"prompt": prompts[1], "id": 7}),
                json.dumps(prompts[2]),
            ]
        )
    )
    options = ("--prompts-file", str(file), "--batch-size", "2", "--check")
    found = json.loads(run(*options, "--json"))
    assert (found["batch_size"], len(found["requests"])) == (2, 3)
    for prompt, request in zip(prompts, found["requests"], strict=True):
        alone = json.loads(run(prompt, "--no-compare", "--json"))
        assert request["equals_plain"] is True
        assert {name: alone[name] for name in ("tokens", "text", "prompt_tokens")} == {
            name: request[name] for name in ("tokens", "text", "prompt_tokens")
        }
    shown = run(*options)
    assert "--- 2 of 3 ---\n" in shown
    assert "tokens          24 in 3 prompts, 36 generated, 2 requests at a time\n" in shown
    file = file.rename(tmp_path / "prompts.JSONL")
    limits = ("--max-context-len", "11", "--batch-size", "1")
    done = CliRunner().invoke(app, ["generate", "--prompts-file", str(file), *SMALL, *limits])
    assert "prompt 2 must have 1 to 10 tokens" in str(done.exception)
    file = tmp_path / "prompts.txt"
    file.write_text("abcabcab\r\n\r\nhello\n", newline="")
    (first, second) = json.loads(run("--prompts-file", str(file), "--json"))["requests"]
    assert first["tokens"] == found["requests"][0]["tokens"]
    assert second["tokens"] == found["requests"][2]["tokens"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\n \n", "must hold at least one prompt, got none"),
        ("a.txt", b"\xff\xfe\x00", "cannot read prompts from {file}: it is not UTF-8"),
        ("a.jsonl", b'"x"\n{"text": "y"}', "line 2 of {file} must be a JSON string or an object"),
        ("a.jsonl", b'"x"\n\n""', "the prompt in line 3 of {file} must be a text, got"),
        ("a.jsonl", b"x", "line 1 of {file} must be a JSON string"),
        ("a.txt", None, "cannot read prompts from {file}: No such file"),
    ],
)
def test_a_file_without_prompts_is_a_mistake(
    name: str, content: bytes | None, message: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    done = CliRunner().invoke(app, ["generate", "--prompts-file", str(file), *SMALL])
    assert isinstance(done.exception, CommandError)
    assert message.format(file=file) in str(done.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a PROMPT or a --prompts-file, and not both"),
        (("x", "--prompts-file", "f"), "give a PROMPT or a --prompts-file, and not both"),
        (("x", "--batch-size", "2"), "--batch-size is for prompts of a file"),
        (("--prompts-file", "f", "--stream"), "--stream shows one text"),
    ],
)
def test_prompts_come_from_one_place(arguments: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(app, ["generate", *SMALL, *arguments])
    assert message in done.stderr + str(done.exception)


def test_the_buffers_of_a_run() -> None:
    found = json.loads(generated("--no-compare", "--json", "--backend", "flashinfer"))
    rows = {row["name"]: (row["owner"], row["nbytes"]) for row in found["ledger"]}
    assert rows["tree_mask"] == ("flashinfer", 2112)
    assert rows["tokens"] == ("runner", 64)
    shown = generated("--no-compare", "--backend", "flashinfer")
    total = sum(nbytes for _, nbytes in rows.values())
    assert f"  TARGET_VERIFY, {total:,} bytes: runner {total - 2112:,} (8 slots), " in shown
    assert "flashinfer 2,112 (tree_mask)" in shown


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
    assert shown.startswith(f"{printable(text)}\n\ntokens ")
    assert shown.count(printable(text)) == 1
    stopped = generated("--stream", "--no-compare", "--stop", text[3:5])
    assert stopped.startswith(f"{printable(text[:3])}\n\ntokens ")


def test_samples_follow_the_seed(tmp_path: Path) -> None:
    texts = []
    for seed in ("2", "1", "1"):
        options = ("--temperature", "2", "--top-k", "50", "--seed", seed)
        found = json.loads(generated("--json", *options))
        assert found["sampling"]["temperature"] == 2
        assert found["equals_plain"] is None
        texts.append(found["tokens"])
    assert texts[0] != texts[1] == texts[2]
    file = tmp_path / "prompts.txt"
    file.write_text(f"{PROMPT}\n" * 3)
    for size in ("1", "2"):
        together = ("--prompts-file", str(file), "--batch-size", size)
        requests = json.loads(run(*together, *options, "--json"))["requests"]
        sampled = [request["tokens"] for request in requests]
        assert sampled[0] == texts[2]
        assert len(set(map(tuple, sampled))) == 3
    shown = generated("--temperature", "0.5", "--top-p", "0.9", "--seed", "7")
    assert "temperature 0.5, top-p 0.9, top-k 0, seed 7\n" in shown


def test_the_models_own_layers_draft() -> None:
    found = json.loads(generated("--json", "--check", "--draft-layers", "2"))
    assert found["draft_layers"] == 2
    assert found["equals_plain"] is True
    # The small model has two layers: all of it drafts what it accepts.
    assert found["accepted_per_step"] > 1.5
    assert "the first 1 layer: topk 2" in generated("--no-compare", "--draft-layers", "1")


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
        (("--temperature", "inf"), "--temperature must be finite, got inf"),
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
    mistake: Callable[..., str],
) -> None:
    assert message in mistake("generate", "x", *SMALL, *arguments)
