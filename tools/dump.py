"""torchvm dump TARGET: the shapes and bytes of a function's torchvm ops, before and after."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torchvm.inspection import NodeRow, TracedGraph

__all__ = ["TargetError", "dump_json", "dump_text", "load_target"]


class TargetError(Exception):
    """The target cannot be loaded; the message is one line for the user."""


def load_target(target: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Load `file.py:function` or `module:function` and call it for what to trace.

    The function takes no arguments and returns `(callable, example_args)`.

    Raises:
        TargetError: with one line that says which part of the target is wrong.
    """
    place, separator, name = target.rpartition(":")
    if not separator or not place or not name:
        raise TargetError(f"TARGET must be file.py:function or module:function, got {target!r}")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        raise TargetError(f"{place} has no function {name!r}")
    try:
        made = function()
    except Exception as error:
        raise TargetError(f"{target} raised {type(error).__name__}: {error}") from error
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0])):
        raise TargetError(f"{target} must return (callable, example_args), got {_kind(made)}")
    function, args = made
    if not isinstance(args, tuple | list):
        raise TargetError(f"{target} must return example_args as a tuple, got {_kind(args)}")
    return function, tuple(args)


def dump_text(graphs: Sequence[TracedGraph]) -> str:
    """Write tables of all graphs; a row that a pass changed has a `*` before it."""
    return "\n\n".join(_graph_text(number, graph) for number, graph in enumerate(graphs))


def dump_json(graphs: Sequence[TracedGraph]) -> str:
    """Write all graphs as one JSON list."""
    return msgspec.json.format(msgspec.json.encode(list(graphs))).decode()


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise TargetError(f"{path} is not a file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise TargetError(f"{path} raised {type(error).__name__}: {error}") from error
    return module


def _load_module(name: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise TargetError(f"{name} cannot be imported: {error}") from error


def _kind(value: Any) -> str:
    return type(value).__name__


def _graph_text(number: int, graph: TracedGraph) -> str:
    changed = set(graph.before) ^ set(graph.after)
    parts = [
        f"graph {number}, before",
        _table(graph.before, changed),
        "",
        f"graph {number}, after" + ("" if changed else ": the same"),
        *([_table(graph.after, changed)] if changed else []),
        "",
        "masks",
        *(f"  {report}" for report in graph.reports),
    ]
    return "\n".join(parts if graph.reports else [*parts, "  none"])


def _table(rows: Sequence[NodeRow], changed: set[NodeRow]) -> str:
    head = ("", "node", "op", "inputs", "output", "bytes", "source")
    cells = [head]
    for row in rows:
        mark = "*" if row in changed else ""
        nbytes = "" if row.nbytes is None else str(row.nbytes)
        inputs = ", ".join(row.inputs)
        cells.append((mark, row.name, row.op, inputs, row.output, nbytes, row.source))
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    padded = [[c.ljust(w) for c, w in zip(line, widths, strict=True)] for line in cells]
    return "\n".join("  ".join(line).rstrip() for line in padded)
