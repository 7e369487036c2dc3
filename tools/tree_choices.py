"""Trees as Medusa and EAGLE write them: a list of paths, each of ranks below the root."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path
from typing import Any

from torchvm.tools.messages import CommandError
from torchvm.tools.tree_input import ROOT, Given, check_size, short

__all__ = ["from_choices"]


def from_choices(text: str, seq_len: int) -> Given:
    """Read paths of ranks, as Medusa and EAGLE write them, from text or a file.

    `[0, 2]` is the third choice below the best choice below the root. Nodes are numbered as both
    do: by length, then by rank.

    Args:
        text: a JSON or Python list of lists, a FILE that holds one, or FILE:NAME where a file
            gives names to several.
        seq_len: L.

    Raises:
        CommandError: for another form, a path twice, or one whose beginning is not in the list.
    """
    value, where = _literal(text)
    if not isinstance(value, list | tuple):
        raise CommandError(f"{where} must be a list of lists of numbers, got {short(value)}")
    for path in value:
        _check_path(path, where)
    paths = sorted((list(path) for path in value), key=lambda path: (len(path), path))
    check_size(where, len(paths) + 1)
    numbers: dict[tuple[int, ...], int] = {(): 0}
    parents = [ROOT]
    for node, path in enumerate(paths, start=1):
        above = tuple(path[:-1])
        if above not in numbers:
            raise CommandError(
                f"{where} must hold the beginning of every path: {short(path)} needs "
                f"{short(list(above))}, which is not there"
            )
        if tuple(path) in numbers:
            raise CommandError(f"{where} must hold every path once, got {short(path)} twice")
        numbers[tuple(path)] = node
        parents.append(numbers[above])
    notes: tuple[str, ...] = ()
    if paths != [list(path) for path in value]:
        notes = (
            "the paths came in another order; nodes are numbered by length of path, then by rank",
        )
    return Given(parents, seq_len, paths=[[], *paths], notes=notes)


def _check_path(path: Any, where: str) -> None:
    if not isinstance(path, list | tuple) or not path:
        raise CommandError(
            f"{where} must be a list of paths, each a list of at least one number; the root has "
            f"none. Got {short(path)}"
        )
    if any(type(rank) is not int or rank < 0 for rank in path):
        raise CommandError(f"ranks of {where} must be whole numbers from 0 on, got {short(path)}")


def _literal(text: str) -> tuple[Any, str]:
    """Return the value of a literal, and what to call it in a message."""
    where = "--choices"
    source, name = text.strip(), ""
    if not source.startswith(("[", "(")):
        where = text
        if not _is_file(text) and _is_file(text.rpartition(":")[0]):
            where, _, name = text.rpartition(":")
        source = _read(Path(where)).strip()
    values = _values(source, where)
    if name and name not in values:
        raise CommandError(f"{where} must give a list the name {short(name)}{_listed(values)}")
    if not name and len(values) != 1:
        raise CommandError(
            f"{where} must hold one list, or be given as FILE:NAME{_listed(values)}"
        )
    node = values[name] if name else next(iter(values.values()))
    try:
        return ast.literal_eval(node), where
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise CommandError(f"{where} must be a list of lists of numbers") from error


def _values(text: str, where: str) -> dict[str, ast.expr]:
    """Expressions of a Python or JSON text by the names that they are given, "" for none."""
    try:
        with warnings.catch_warnings(action="ignore"):
            statements = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CommandError(f"{where} must be a JSON or Python list of lists of numbers") from error
    values: dict[str, ast.expr] = {}
    for statement in statements:
        match statement:
            case ast.Expr(value=ast.Constant()):
                pass
            case ast.Expr(value=value):
                values[""] = value
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                values[name] = value
    return values


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except OSError:  # A name that no file can have.
        return False


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise CommandError(f"cannot read --choices {path}: {reason}") from error


def _listed(values: dict[str, ast.expr]) -> str:
    names = [name for name in values if name]
    return f"; it has {', '.join(names)[:200]}" if names else "; it has none"
