"""torchvm reasons: every code of a report, what it means and what to do about it."""

from __future__ import annotations

import json
from difflib import get_close_matches
from textwrap import fill, indent
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchvm.tools.messages import CommandError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchvm.passes.report import ReasonText

__all__ = ["reasons"]

_WIDTH = 99


def reasons(
    code: Annotated[
        str | None, typer.Argument(metavar="CODE", help="One code, in capitals or not.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, or a list without CODE.")
    ] = False,
) -> None:
    """Show what the codes of reports mean and what to do about them.

    Reports of masks name one as their verdict, findings of check_capture begin with one, and
    verify_no_clone finds but one.
    """
    entries = [
        {"code": str(key), "source": source, "meaning": text.meaning, "remedy": text.remedy}
        for source, table in _tables().items()
        for key, text in table.items()
    ]
    if code is not None:
        entries = [_find(entries, code)]
    if as_json:
        typer.echo(json.dumps(entries if code is None else entries[0]))
    elif code is not None:
        typer.echo(_one(entries[0]))
    else:
        typer.echo(_all(entries))


def _tables() -> dict[str, Mapping[Any, ReasonText]]:
    """Every table of codes, by what reports them."""
    from torchvm.passes.capture_check import CAPTURE_CODES
    from torchvm.passes.clone_check import COPY_CODES
    from torchvm.passes.report import REASONS

    return {
        "verdicts on masks": REASONS,
        "check_capture": CAPTURE_CODES,
        "verify_no_clone": COPY_CODES,
    }


def _find(entries: list[dict[str, str]], code: str) -> dict[str, str]:
    """Return the entry of a code.

    Raises:
        CommandError: naming codes that are near.
    """
    wanted = code.strip().upper().replace("-", "_")
    for entry in entries:
        if entry["code"] == wanted:
            return entry
    known = [entry["code"] for entry in entries]
    near = [name for name in known if wanted and wanted in name]
    near += [name for name in get_close_matches(wanted, known) if name not in near]
    hint = f"near ones: {', '.join(near)}" if near else "`torchvm reasons` lists them all"
    raise CommandError(f"CODE must be a code of a report, got {code!r}: {hint}")


def _one(entry: dict[str, str]) -> str:
    return "\n".join(
        [
            f"{entry['code']} ({entry['source']})",
            fill(entry["meaning"], _WIDTH, initial_indent="  means  ", subsequent_indent=" " * 9),
            fill(entry["remedy"], _WIDTH, initial_indent="  to do  ", subsequent_indent=" " * 9),
        ]
    )


def _all(entries: list[dict[str, str]]) -> str:
    """A paragraph a code, under the name of what reports it."""
    lines = []
    for number, entry in enumerate(entries):
        if number == 0 or entries[number - 1]["source"] != entry["source"]:
            lines.append(f"{entry['source']}:\n")
        texts = (entry["meaning"], f"to do: {entry['remedy']}")
        paragraph = "\n".join(fill(text, _WIDTH - 4) for text in texts)
        lines.append(f"  {entry['code']}\n{indent(paragraph, ' ' * 4)}\n")
    return "\n".join(lines).rstrip()
