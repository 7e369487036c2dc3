"""generate --record keeps what each step was given and accepted; torchvm tree draws it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from torchvm.engine.runner import Verified, VerifiedStep
from torchvm.ops.version import __version__
from torchvm.tools.cli import app
from torchvm.tools.messages import CommandError
from torchvm.tools.step_record import Header, Recorder, Recording, read_recording

if TYPE_CHECKING:
    from collections.abc import Iterator

SMALL = ("--model", "small", "--inner", "aot_eager", "--no-compare", "--json")
HEADER = Header(
    model="tiny", backend="cpu", num_draft_tokens=3, topk=2, depth=2, sampling=None
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(scope="module")
def greedy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Three prompts, two at a time: what generate said, and its recording."""
    folder = tmp_path_factory.mktemp("greedy")
    prompts, file = folder / "prompts.txt", folder / "steps.jsonl"
    prompts.write_text("abcabcab\nxyxyxyxyxy\nhello hello\n")
    done = invoke(
        "generate", *SMALL, "--prompts-file", str(prompts), "--batch-size", "2",
        "--max-new-tokens", "10", "--record", str(file),
    )  # fmt: skip
    assert done.exit_code == 0, (done.stderr, done.exception)
    return json.loads(done.stdout), file


def _check_request(recording: Recording, request: int, tokens: list[int]) -> None:
    """A request's steps follow one another and give its tokens."""
    steps = [step for step in recording.steps if step.request == request]
    assert [step.step for step in steps] == list(range(len(steps)))
    found = [token for step in steps for token in step.next_tokens]
    assert found[: len(tokens)] == tokens
    assert len(found) - len(tokens) < recording.header.num_draft_tokens
    for step, after in itertools.pairwise(steps):
        assert after.seq_len == step.seq_len + len(step.accepted)
        assert after.tokens[0] == step.next_tokens[-1]
    for step in steps:
        assert step.accepted[0] == 0
        for above, node in itertools.pairwise(step.accepted):
            assert step.parents[node] == above
        # What was accepted is what the target said before it.
        assert [step.tokens[node] for node in step.accepted[1:]] == step.next_tokens[:-1]


def test_a_greedy_run_of_several_batches(greedy: tuple[Any, Path]) -> None:
    said, file = greedy
    recording = read_recording(file)
    header = recording.header
    assert header == Header(
        model="small", backend="cpu", num_draft_tokens=8, topk=2, depth=4, sampling=None,
        lines=len(recording.steps),
    )  # fmt: skip
    assert len(said["requests"]) == 3
    for request, one in enumerate(said["requests"]):
        _check_request(recording, request, one["tokens"])
    assert any(len(step.accepted) > 1 for step in recording.steps)


def test_a_greedy_path_takes_the_first_child_that_the_target_said(
    greedy: tuple[Any, Path],
) -> None:
    """Also drawn from the recording, where the ops make the links anew."""
    _, file = greedy
    for step in read_recording(file).steps:
        for node, said in zip(step.accepted, step.next_tokens, strict=True):
            children = [i for i, parent in enumerate(step.parents) if parent == node and i > 0]
            matching = [child for child in children if step.tokens[child] == said]
            taken = step.accepted[step.accepted.index(node) + 1 :][:1]
            assert taken == matching[:1]
    options = ("--record", str(file), "--request", "1", "--step", "0", "--json")
    drawn = json.loads(invoke("tree", *options).stdout)
    assert drawn["accepted_by"] == "recorded"
    first = next(step for step in read_recording(file).steps if step.request == 1)
    assert [node["token"] for node in drawn["nodes"]] == first.text
    assert (drawn["accepted"], drawn["seq_len"]) == (first.accepted, first.seq_len)


def test_a_sampled_run(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    done = invoke(
        "generate", "abcabcabcabcab", *SMALL, "--max-new-tokens", "12", "--record", str(file),
        "--temperature", "0.7", "--seed", "3", "--backend", "flash-attention",
    )  # fmt: skip
    assert done.exit_code == 0, (done.stderr, done.exception)
    recording = read_recording(file)
    assert recording.header.sampling is not None
    assert msgspec.to_builtins(recording.header.sampling) == {
        "temperature": 0.7, "top_p": 1.0, "top_k": 0, "seed": 3,
    }  # fmt: skip
    assert recording.header.backend == "flash-attention"
    _check_request(recording, 0, json.loads(done.stdout)["tokens"])
    shown = invoke("tree", "--record", str(file)).stdout
    assert "model 'small', back end 'flash-attention', topk 2, depth 4, sampled\n" in shown


def _recorded() -> bytes:
    texts = {7: "a", 8: "\n", 9: "c"}
    recorder = Recorder(lambda tokens: "".join(texts[token] for token in tokens))
    take = recorder.batch(4)
    take(VerifiedStep([[7, 8, 9]], [[-1, 0, -1]], [5], [1], Verified([[8, 9]], [[1]])))
    take(
        VerifiedStep(
            [[9, 7, 7], [7, 8, 8]], [[-1, -1, -1], [-1, 0, 0]], [7, 3], [1, 0],
            Verified([[8], [8, 7]], [[], [1]]),
        )
    )  # fmt: skip
    return recorder.content(HEADER)


def test_the_format() -> None:
    assert _recorded().decode() == (
        '{"format":"torchvm.steps","version":1,"torchvm":"' + __version__ + '","model":"tiny",'
        '"backend":"cpu","num_draft_tokens":3,"topk":2,"depth":2,"sampling":null,"lines":3}\n'
        '{"step":0,"request":5,"seq_len":5,"tokens":[7,8,9],"parents":[-1,0,-1],'
        '"accepted":[0,1],"next_tokens":[8,9],"text":["a","\\n","c"],"next_text":["\\n","c"]}\n'
        '{"step":1,"request":5,"seq_len":7,"tokens":[9,7,7],"parents":[-1,-1,-1],'
        '"accepted":[0],"next_tokens":[8],"text":["c","a","a"],"next_text":["\\n"]}\n'
        '{"step":1,"request":4,"seq_len":3,"tokens":[7,8,8],"parents":[-1,0,0],'
        '"accepted":[0,1],"next_tokens":[8,7],"text":["a","\\n","\\n"],"next_text":["\\n","a"]}\n'
    )


def test_a_recorded_step_as_text(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    file.write_bytes(_recorded())
    options = ("--request", "5", "--only", "tree", "--only", "walk", "--only", "notes")
    assert invoke("tree", "--record", str(file), *options).stdout == (
        "3 nodes, node 0 the root, behind 5 committed tokens: n = 3, L = 5\n"
        "request 5, step 0 (0 to 1): model 'tiny', back end 'cpu', topk 2, depth 2, greedy\n"
        "\n"
        "0 'a' *\n"
        "└─ 1 '\\n' *\n"
        "\n"
        "hanging from nobody:\n"
        "2 'c'\n"
        "\n"
        "* accepted\n"
        "\n"
        "accepted: 0 1 (recorded)\n"
        "  at node 0 the target's token is '\\n'\n"
        "    retrieve_next_token 1 '\\n': accepted\n"
        "  at node 1 the target's token is 'c'\n"
        "    retrieve_next_token -1: the end\n"
        "  the step yields 1 draft token and the bonus token 'c'\n"
        "\n"
        "note: node 2: parent -1 is no node, so it is not found: it hangs from nobody, attends "
        "the root and itself alone, and no list of children has it\n"
        "note: a drafter's nodes are filled up to n with nodes whose parent is -1\n"
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda text: b"", "must be a file of `torchvm generate --record`"),
        (lambda text: b"\xff\x00", "must be a file of `torchvm generate --record`"),
        (lambda text: b"[" * 100_000, "must be a file of `torchvm generate --record`"),
        (lambda text: b'{"prompt":"x"}\n', "must be a file of `torchvm generate --record`"),
        (
            lambda text: text.replace(b'"version":1', b'"version":2'),
            "format 'torchvm.steps' version 1, got 'torchvm.steps' version 2: record it anew",
        ),
        (
            lambda text: b"\n".join(text.splitlines()[:-1]) + b"\n",
            "must hold 3 steps as its header says, got 2",
        ),
        (lambda text: text[:-20], "line 4: Input data was truncated"),
        (lambda text: text.replace(b'"topk":2,', b""), "line 1: Object missing required field"),
        (
            lambda text: text.replace(b'"seq_len":7', b'"seq_len":-7'),
            "line 3: Expected `int` >= 0 - at `$.seq_len`",
        ),
        (
            lambda text: text.replace(b'"parents":[-1,0,-1]', b'"parents":[-1,1e300,-1]'),
            "line 2: Expected `int`, got `float` - at `$.parents[1]`",
        ),
        (
            lambda text: text.replace(b"[7,8,8]", b"[7,8]"),
            "line 4: tokens must be 3, got 2",
        ),
        (
            lambda text: text.replace(b'"accepted":[0]', b'"accepted":[]'),
            "line 3: next_tokens must be one for each of the 0 accepted nodes, got 1",
        ),
    ],
)  # fmt: skip
def test_other_files_are_refused(wrong: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    file.write_bytes(wrong(_recorded()))
    with pytest.raises(CommandError) as told:
        read_recording(file)
    assert message in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--step", "2"), "--step must be 0 to 1 for request 5"),
        (("--step", "0", "--request", "4"), "--step must be 1 for request 4"),
        (("--request", "0"), "--request must be 4 to 5 for"),
        (("--seq-len", "3"), "--seq-len is in the recording: leave it out"),
        (("--tokens", "a,b,c"), "--tokens is in the recording: leave it out"),
    ],
)
def test_steps_that_are_not_there(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    file.write_bytes(_recorded())
    given = options if "--request" in options else ("--request", "5", *options)
    done = invoke("tree", "--record", str(file), *given)
    assert isinstance(done.exception, CommandError)
    assert message in str(done.exception)


def test_a_recording_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CommandError, match="cannot read"):
            read_recording(path)
    for path in (tmp_path, tmp_path / "absent" / "x", Path("/proc/x")):
        done = invoke("generate", "x", "--model", "no/such/model", "--record", str(path))
        # It is told before the model is looked for.
        assert str(done.exception).startswith(f"cannot write {path}: ")
