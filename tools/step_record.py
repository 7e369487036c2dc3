"""Recorded verify steps: a file of JSON lines, a header and one line a step and request."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec

from torchvm.ops.version import __version__
from torchvm.tools.messages import CommandError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torchvm.engine.runner import VerifiedStep

__all__ = ["Header", "Recorder", "Recording", "Sampling", "Step", "read_recording"]

FORMAT = "torchvm.steps"
VERSION = 1

_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1
Count = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]
Index = Annotated[int, msgspec.Meta(ge=_LEAST, le=_MOST)]


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How accepted tokens were sampled."""

    temperature: float
    top_p: float
    top_k: Count
    seed: int


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a run's steps have in common."""

    format: str = FORMAT
    version: int = VERSION
    torchvm: str = __version__
    model: str
    backend: str
    num_draft_tokens: Annotated[int, msgspec.Meta(ge=1, le=_MOST)]
    topk: Count
    depth: Count
    sampling: Sampling | None
    """None where the run was greedy."""
    lines: Count = 0
    """Steps of all requests in the file; fewer tell that its end is missing."""


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request's tree in one step, as it was verified; n nodes, those that fill up included."""

    step: Count
    request: Count
    seq_len: Count
    tokens: list[Index]
    """n, the root's first."""
    parents: list[Index]
    """n node indices, the root's is not looked at."""
    accepted: list[Count]
    """Nodes of the accepted path; the root's 0 comes first."""
    next_tokens: list[Index]
    """The target's token after each accepted node; the last is the bonus token."""
    text: list[str]
    """n, of the tokens."""
    next_text: list[str]
    """Of `next_tokens`."""


class Recording(msgspec.Struct, frozen=True):
    """A file that was read."""

    header: Header
    steps: list[Step]


_Line = TypeVar("_Line", Header, Step)


class _Kind(msgspec.Struct):
    """What every version of a header says."""

    format: str
    version: int


class Recorder:
    """Collects the steps of a run.

    Args:
        decode: text of tokens.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._steps: list[Step] = []

    def batch(self, first_request: int) -> Callable[[VerifiedStep], None]:
        """Make what takes the steps of a batch, as a runner's `on_verified`.

        Args:
            first_request: number of the batch's first request in the run.
        """
        steps = itertools.count()
        return lambda verified: self._add(next(steps), first_request, verified)

    def _add(self, number: int, first_request: int, verified: VerifiedStep) -> None:
        rows = zip(
            verified.slots, verified.seq_lens, verified.tokens, verified.parents,
            verified.found.paths, verified.found.tokens, strict=True,
        )  # fmt: skip
        for slot, seq_len, tokens, parents, path, next_tokens in rows:
            step = Step(
                step=number, request=first_request + slot, seq_len=seq_len, tokens=list(tokens),
                parents=list(parents), accepted=[0, *path], next_tokens=list(next_tokens),
                text=self._texts(tokens), next_text=self._texts(next_tokens),
            )  # fmt: skip
            self._steps.append(step)

    def content(self, header: Header) -> bytes:
        """Write the file's text, UTF-8."""
        header = msgspec.structs.replace(header, lines=len(self._steps))
        encode = msgspec.json.encode
        return b"".join(encode(line) + b"\n" for line in (header, *self._steps))

    def _texts(self, tokens: Sequence[int]) -> list[str]:
        return [self._decode([token]) for token in tokens]


def read_recording(path: Path) -> Recording:
    """Read what `Recorder.content` wrote.

    Raises:
        CommandError: when the file cannot be read, is another kind of file or of another version,
            lacks its end, or has a line that is not a step.
    """
    try:
        first, *lines = path.read_bytes().splitlines() or [b""]
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror or error}") from error
    header = _read_header(path, first)
    steps = [_read_step(path, at, line, header) for at, line in enumerate(lines, start=2)]
    if len(steps) != header.lines:
        raise CommandError(
            f"{path} must hold {header.lines} steps as its header says, got {len(steps)}"
        )
    return Recording(header, steps)


def _read_header(path: Path, line: bytes) -> Header:
    try:
        kind = msgspec.json.decode(line, type=_Kind)
    except _UNREADABLE as error:
        raise CommandError(f"{path} must be a file of `torchvm generate --record`") from error
    if (kind.format, kind.version) != (FORMAT, VERSION):
        raise CommandError(
            f"{path} must be of format {FORMAT!r} version {VERSION}, got {kind.format!r} "
            f"version {kind.version}: record it anew"
        )
    return _decode(path, 1, line, Header)


def _read_step(path: Path, at: int, line: bytes, header: Header) -> Step:
    step = _decode(path, at, line, Step)
    for name in ("tokens", "parents", "text"):
        if len(getattr(step, name)) != header.num_draft_tokens:
            raise CommandError(
                f"{path} line {at}: {name} must be {header.num_draft_tokens}, "
                f"got {len(getattr(step, name))}"
            )
    for name in ("next_tokens", "next_text"):
        if len(getattr(step, name)) != len(step.accepted):
            raise CommandError(
                f"{path} line {at}: {name} must be one for each of the {len(step.accepted)} "
                f"accepted nodes, got {len(getattr(step, name))}"
            )
    return step


def _decode(path: Path, at: int, line: bytes, kind: type[_Line]) -> _Line:
    try:
        return msgspec.json.decode(line, type=kind)
    except _UNREADABLE as error:
        raise CommandError(f"{path} line {at}: {error}") from error
