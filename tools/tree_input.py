"""What torchvm tree is given, in one form: parents, choices or a recorded step."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from torchvm.tools.messages import CommandError
from torchvm.tools.step_record import read_recording

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

__all__ = [
    "ROOT",
    "Given",
    "check_size",
    "from_parents",
    "from_record",
    "parse_accepted",
    "parse_texts",
    "short",
]

MOST_NODES = 1024
ROOT = -1
_INT64 = range(-(1 << 63), 1 << 63)


class Given(NamedTuple):
    """A tree of n nodes, and what is known of it."""

    parents: list[int]
    """n node indices as they came; the root's is -1."""
    seq_len: int
    """L, committed tokens."""
    tokens: list[str] | None = None
    """Text of each node's token."""
    paths: list[list[int]] | None = None
    """Of each node, the rank of every token from the root to it; the root's is empty."""
    target: list[str] | None = None
    """Text of the target's choice after each node."""
    accepted: list[int] | None = None
    """Nodes of the accepted path, 0 first."""
    next_tokens: list[str] | None = None
    """Text of the target's token after each accepted node."""
    source: str | None = None
    """Where a recorded step comes from."""
    notes: tuple[str, ...] = ()


def from_parents(text: str, seq_len: int) -> Given:
    """Read `-1,0,0,1`: the parent of node 0, which is the root and has -1, of node 1, and so on.

    Raises:
        CommandError: unless it is 1 to 1,024 numbers of 64 bits, of which the first is -1.
    """
    parents = _numbers("--parents", text)
    if parents[0] != ROOT:
        raise CommandError(
            f"--parents must begin with -1, the root's own entry, got {parents[0]}: node 1 hangs "
            "from the root by a 0 in second place"
        )
    check_size("--parents", len(parents))
    return Given(parents, seq_len)


def from_record(path: Path, step: int, request: int) -> Given:
    """Take one step of one request from what `torchvm generate --record` wrote.

    Raises:
        CommandError: when the file cannot be read, or has no such step.
    """
    recording = read_recording(path)
    header, steps = recording.header, recording.steps
    if not steps:
        raise CommandError(f"{path} must hold a step, got none")
    mine = {one.step: one for one in steps if one.request == request}
    if not mine:
        requests = [one.request for one in steps]
        raise CommandError(f"--request must be {_span(requests)} for {path}, got {request}")
    if step not in mine:
        raise CommandError(
            f"--step must be {_span(mine)} for request {request} of {path}, got {step}"
        )
    check_size(f"{path}", header.num_draft_tokens)
    found = mine[step]
    how = "sampled" if header.sampling else "greedy"
    source = (
        f"request {request}, step {step} ({_span(mine)}): model {header.model!r}, "
        f"back end {header.backend!r}, topk {header.topk}, depth {header.depth}, {how}"
    )
    return Given(
        [ROOT, *found.parents[1:]], found.seq_len, tokens=found.text, accepted=found.accepted,
        next_tokens=found.next_text, source=source,
    )  # fmt: skip


def parse_texts(option: str, text: str, count: int) -> list[str]:
    """Read `the,cat,sat`, or a JSON list where a text has a comma or blanks at its ends.

    Raises:
        CommandError: unless there is one for each of `count` nodes.
    """
    if text.lstrip().startswith("["):
        try:
            listed = msgspec.json.decode(text, type=list[str | int])
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise CommandError(f"{option} must be a JSON list of texts: {error}") from error
        texts = [str(one) for one in listed]
    else:
        texts = [one.strip() for one in text.split(",")]
    if len(texts) != count:
        raise CommandError(
            f"{option} must be one for each of the {count} nodes, the root's first, "
            f"got {len(texts)}"
        )
    return texts


def parse_accepted(text: str) -> list[int]:
    """Read the nodes of an accepted path."""
    return _numbers("--accepted", text)


def _numbers(option: str, text: str) -> list[int]:
    bare = re.sub(r"^\[(.*)\]$", r"\1", text.strip())
    parts = [part.strip() for part in bare.split(",")]
    for part in parts:
        if not re.fullmatch(r"-?[0-9]{1,19}", part) or int(part) not in _INT64:
            raise CommandError(
                f"{option} must be whole numbers of 64 bits with commas between them, "
                f"got {short(part)}"
            )
    return [int(part) for part in parts]


def check_size(what: str, count: int) -> None:
    """Refuse more nodes than anyone can look at."""
    if count > MOST_NODES:
        raise CommandError(f"{what} must be of at most {MOST_NODES:,} nodes, got {count:,}")


def _span(numbers: Collection[int]) -> str:
    first, last = min(numbers), max(numbers)
    return str(first) if first == last else f"{first} to {last}"


def short(value: Any, most: int = 60) -> str:
    """Write a value of the user's for a message, cut to `most` characters."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."
