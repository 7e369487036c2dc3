"""Trace a function under fake tensors to the functional graphs that a compiler would get."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.fx import GraphModule, Node

__all__ = ["TracedModule", "fake_mode", "trace", "uncompiled"]


class TracedModule(NamedTuple):
    """A functional graph and what each of its inputs is in the traced call."""

    module: GraphModule
    inputs: dict[Node, torch.Tensor]
    """The caller's own tensor behind each placeholder, where there is one."""


def fake_mode() -> FakeTensorMode:
    """Make a mode in which tensors have metadata alone; real parameters may be used beside."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what a compiled function or module compiles; anything else as it is."""
    function = getattr(function, "_torchdynamo_orig_callable", function)
    inner: Callable[..., Any] = getattr(function, "_orig_mod", function)
    return inner


def trace(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    mode: FakeTensorMode,
    dynamic: bool | None = None,
    fullgraph: bool = False,
) -> list[TracedModule]:
    """Return the functional graphs of one call, in the order in which they are compiled.

    Nothing is computed, and nothing that is compiled already is forgotten.

    Args:
        function: what would be compiled.
        args: arguments whose tensors are fake and of `mode`.
        kwargs: keyword arguments likewise.
        mode: from `fake_mode`.
        dynamic: as in `torch.compile`.
        fullgraph: raise on a graph break, as `torch.compile` does.
    """
    traced: list[TracedModule] = []

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Any:
        behind = [_tensor_behind(n) for n in gm.graph.find_nodes(op="placeholder")]

        def grab(functional: GraphModule, _: list[Any]) -> Any:
            placeholders = functional.graph.find_nodes(op="placeholder")
            # AOTAutograd keeps the inputs and their order; should it ever not, none is named.
            tensors = behind if len(behind) == len(placeholders) else [None] * len(placeholders)
            pairs = zip(placeholders, tensors, strict=True)
            traced.append(TracedModule(functional, {p: t for p, t in pairs if t is not None}))
            return functional.forward

        return aot_autograd(fw_compiler=grab, keep_inference_input_mutations=True)(
            gm, example_inputs
        )

    compiled = torch.compile(
        _with_own_code(function), backend=backend, dynamic=dynamic, fullgraph=fullgraph
    )
    # Sizes that differ from an earlier trace's would be dynamic in this one.
    with mode, torch.no_grad(), torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        compiled(*args, **kwargs)
    return traced


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function in a code object of its own: Dynamo keeps what it compiles by code."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_name="traced_call")
    return call


def _tensor_behind(placeholder: Node) -> torch.Tensor | None:
    argument = placeholder.meta.get("grapharg")
    tensor = getattr(argument, "example", None)
    return tensor if isinstance(tensor, torch.Tensor) else None
