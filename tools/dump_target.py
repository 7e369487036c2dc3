"""What `torchvm dump` is pointed at: a function, an exported program or a model, as graphs."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import warnings
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torchvm.tools.dump_errors import told
from torchvm.tools.messages import CommandError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchvm.inspection import TracedGraph

__all__ = ["Loaded", "Request", "graphs_of", "load_target"]

FORMS = "FILE.py:FUNCTION, MODULE:FUNCTION, FILE.pt2, hf:FOLDER or hf:CONFIG"
SIZES = ("max_bs", "num_draft_tokens", "max_context_len")


class Request(NamedTuple):
    """What is asked of a target."""

    target: str
    max_bs: int | None = None
    num_draft_tokens: int | None = None
    max_context_len: int | None = None
    device: str | None = None
    """A device that nothing runs on; with None a function is called for real."""
    dynamic: bool = False
    every_node: bool = False
    debug: bool = False
    """Whether errors of the target's own come as they are."""

    @property
    def sizes(self) -> dict[str, int]:
        """Those that are given, by the name of a parameter."""
        given = {name: getattr(self, name) for name in SIZES}
        return {name: size for name, size in given.items() if size is not None}


class Loaded(NamedTuple):
    """What is traced, in the order of `trace_graphs`."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def graphs_of(request: Request) -> list[TracedGraph]:
    """Trace a target to its graphs and run the passes on them.

    Raises:
        CommandError: with one line that says what is wrong with the target.
    """
    if request.target.startswith("hf:"):
        from torchvm.tools.dump_model import model_graphs

        return model_graphs(request)
    if request.target.endswith(".pt2"):
        return _program_graphs(request)
    return _function_graphs(request)


def load_target(target: str, **sizes: int) -> Loaded:
    """Load `file.py:function` or `module:function` and call it for what to trace.

    Args:
        target: where the function is. It returns `(callable, example_args)`, or with a dict of
            keyword arguments behind.
        sizes: keyword arguments of the function.

    Raises:
        CommandError: with one line that says which part of the target is wrong.
    """
    return _load(Request(target), sizes, nullcontext())


def _function_graphs(request: Request) -> list[TracedGraph]:
    from torchvm.inspection import GraphOptions, MaskSizes, trace_graphs
    from torchvm.tracing import fake_mode

    mode, sizes = fake_mode(), request.sizes
    context = nullcontext() if request.device is None else _making(mode, request.device)
    loaded = _load(request, sizes, context)
    options = GraphOptions(
        every_node=request.every_node,
        device=shown_device(request.device),
        sizes=MaskSizes(**sizes) if len(sizes) == len(SIZES) else None,
    )
    with told(f"{request.target} cannot be traced", debug=request.debug):
        return trace_graphs(*loaded, dynamic=request.dynamic or None, mode=mode, options=options)


def _program_graphs(request: Request) -> list[TracedGraph]:
    if request.sizes or request.device or request.dynamic:
        raise CommandError(
            "sizes and devices of an exported program are its own: leave --fake-device, "
            "--dynamic, --max-bs, --num-draft-tokens and --max-context-len out"
        )
    path = Path(request.target)
    if not path.is_file():
        raise CommandError(f"{path} is not a file")
    import torch

    from torchvm.inspection import GraphOptions, inspect_program

    with warnings.catch_warnings():
        # Torch warns of its own use of its own classes.
        warnings.simplefilter("ignore", FutureWarning)
        with told(f"{path} is not a saved torch.export program", debug=request.debug):
            program = torch.export.load(path)
        with told(f"{path} cannot be decomposed", debug=request.debug):
            return inspect_program(program, GraphOptions(every_node=request.every_node))


@contextmanager
def _making(mode: Any, device: str) -> Iterator[None]:
    """Let tensors that are made inside be fakes, on a device where none is named."""
    import torch

    with mode, torch.device(traced_device(device)):
        yield


def traced_device(device: str | None) -> str:
    """The device whose fakes this torch can trace: without CUDA, the CPU in its place."""
    import torch

    return device if device is not None and torch.version.cuda else "cpu"


def shown_device(device: str | None) -> str:
    """What CPU tensors of a trace are shown on, as a torch with CUDA names it."""
    if device is None or traced_device(device) == device:
        return ""
    return "cuda:0" if device == "cuda" else device


def _load(request: Request, sizes: dict[str, int], making: Any) -> Loaded:
    target = request.target
    place, separator, name = target.rpartition(":")
    if not separator or not place or not name:
        raise CommandError(f"TARGET must be {FORMS}, got {target!r}")
    module = load_module(place, debug=request.debug)
    function = getattr(module, name, None)
    if not callable(function):
        raise CommandError(f"{place} has no function {name!r}")
    _check_takes(target, function, sizes)
    fake = " on fake tensors, which have no values," if request.device is not None else ""
    with told(f"{target}{fake} raised", debug=request.debug), making:
        made = function(**sizes)
    return _checked(target, made)


def load_module(place: str, *, debug: bool) -> Any:
    """Import a file or a module.

    Raises:
        CommandError: when it cannot be imported.
    """
    if place.endswith(".py"):
        return _load_file(Path(place), debug=debug)
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with told(f"{place} cannot be imported", debug=debug):
        return importlib.import_module(place)


def _load_file(path: Path, *, debug: bool) -> Any:
    if not path.is_file():
        raise CommandError(f"{path} is not a file")
    # A file named as a module that is imported already must not take its place.
    name = path.stem if path.stem not in sys.modules else f"torchvm_dump.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise CommandError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.resolve().parent))
    with told(f"{path} raised", debug=debug):
        spec.loader.exec_module(module)
    return module


def _check_takes(target: str, function: Callable[..., Any], sizes: dict[str, int]) -> None:
    """Require a function that takes the sizes that are given, and needs nothing else."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    parameters = signature.parameters.values()
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
    keywords = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    for name in sizes:
        if name not in keywords and not any_name:
            raise CommandError(f"{target} must take the parameter {name} for {_option(name)}")
    fixed = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    for parameter in parameters:
        needed = parameter.default is parameter.empty and parameter.kind not in fixed
        if needed and parameter.name not in sizes:
            known = parameter.name in SIZES
            advice = f"give {_option(parameter.name)}" if known else "give it a default"
            raise CommandError(f"{target} needs the parameter {parameter.name}: {advice}")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _checked(target: str, made: Any) -> Loaded:
    parts = made if isinstance(made, tuple) and len(made) in (2, 3) else (None,)
    if not callable(parts[0]):
        raise CommandError(f"{target} must return (callable, example_args), got {_kind(made)}")
    function, args, *rest = parts
    if not isinstance(args, tuple | list):
        raise CommandError(f"{target} must return example_args as a tuple, got {_kind(args)}")
    kwargs = rest[0] if rest else {}
    if not isinstance(kwargs, dict):
        raise CommandError(
            f"{target} must return keyword arguments as a dict, got {_kind(kwargs)}"
        )
    return Loaded(function, tuple(args), kwargs)


def _kind(value: Any) -> str:
    return type(value).__name__
