"""What commands tell the user besides their result: errors, and progress on a terminal."""

from __future__ import annotations

import re
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["CommandError", "one_line", "printable", "progress"]

_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class CommandError(Exception):
    """A mistake of the user's; the message is one line that says what to do.

    `main` in cli.py prints it on stderr and ends with exit status 2, as for wrong usage.
    """


def printable(text: str) -> str:
    """Write out what a terminal would obey: controls, and marks that turn the writing direction.

    Line feeds and tabs stay. Halves of surrogate pairs, which no file takes, are written out too.
    """
    return _OBEYED.sub(lambda found: repr(found[0])[1:-1], text)


def one_line(text: str) -> str:
    """Show what cannot be printed, line feeds too, as Python writes it."""
    return printable(text).replace("\n", "\\n")


@contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """Show what is going on and for how long, on stderr and only if that is a terminal.

    Args:
        what: shown until the block ends, then removed.

    Yields:
        A function that replaces the text behind `what`.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task(what)
        yield lambda detail: bar.update(task, description=f"{what} {detail}")
