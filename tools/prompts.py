"""Prompts from a file: a line each, or a JSON value each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from torchvm.tools.messages import CommandError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["read_prompts"]


class _Prompt(msgspec.Struct):
    """A line of a .jsonl file, when it is an object; other fields are let through."""

    prompt: str


def read_prompts(path: Path) -> list[str]:
    """Read the prompts of a file, in its order.

    Args:
        path: UTF-8 text. In a `.jsonl` file each line is a JSON string, or an object with a
            string `prompt`, so that a prompt may have several lines; in any other a prompt is a
            line as it stands. Empty lines are passed over.

    Raises:
        CommandError: when the file cannot be read, or holds no prompt or a malformed one.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise CommandError(f"cannot read prompts from {path}: {reason}") from error
    # Every line end is a line feed by then. Not splitlines: a form feed or U+2028 is part of a
    # prompt.
    lines = text.split("\n")
    numbered = [(i, line) for i, line in enumerate(lines, start=1) if line.strip()]
    if path.suffix.lower() == ".jsonl":
        prompts = [_of_json(path, i, line) for i, line in numbered]
    else:
        prompts = [line for _, line in numbered]
    if not prompts:
        raise CommandError(f"{path} must hold at least one prompt, got none")
    return prompts


def _of_json(path: Path, number: int, line: str) -> str:
    try:
        found = msgspec.json.decode(line, type=str | _Prompt)
    except msgspec.MsgspecError as error:
        raise CommandError(
            f"line {number} of {path} must be a JSON string or an object with a `prompt`: {error}"
        ) from error
    prompt = found.prompt if isinstance(found, _Prompt) else found
    if not prompt.strip():
        raise CommandError(
            f"the prompt in line {number} of {path} must be a text, got an empty one"
        )
    return prompt
