"""Errors of a target as one line, or as they are."""

from __future__ import annotations

import logging
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torchvm.tools.messages import CommandError, printable

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["told"]

_LONGEST = 300
# How Dynamo reports what an op raised, whose own text has many lines.
_RAISED = re.compile(r": got (\w+)\((['\"])(.*)\2\)")


@contextmanager
def told(what: str, *, debug: bool) -> Iterator[None]:
    """Tell an error inside the block as one line of the user's.

    Args:
        what: comes before the error.
        debug: leave errors as they are, with their traceback.

    Raises:
        CommandError: for any error, and for a target that ends the process.
    """
    silenced = logging.root.manager.disable
    try:
        if not debug:  # torch logs tracebacks of errors that it raises all the same.
            logging.disable(logging.CRITICAL)
        yield
    except CommandError:
        raise
    except (Exception, SystemExit) as error:
        if debug:
            raise
        raise CommandError(f"{what}: {_one_line(_origin(error))}") from error
    finally:
        logging.disable(silenced)


def _origin(error: BaseException) -> BaseException:
    """What an error was raised from, in the end: compilers wrap those of what they compile."""
    seen = {id(error)}
    while error.__cause__ is not None and id(error.__cause__) not in seen:
        error = error.__cause__
        seen.add(id(error))
    return error


def _one_line(error: BaseException) -> str:
    """Write the kind of an error and its first line, cut where it is very long."""
    kind, text = type(error).__name__, str(error)
    raised = _RAISED.search(text)
    if raised is not None:
        kind, _, text = raised.groups()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    text = lines[0] if lines else ""
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]} ..."
    return f"{kind}: {printable(text)}" if text else kind
