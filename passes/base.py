"""The pipeline: find the masks of a graph, let each pass try each mask, report every verdict."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map

from torchvm.ops.environment import flag
from torchvm.ops.layout import TreeMaskMode, mask_storage
from torchvm.passes.cache_key import cache_key
from torchvm.passes.graph import source_line, symbolic_value
from torchvm.passes.liveness import Mask, find_masks
from torchvm.passes.report import MaskReport, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.fx import Graph, Node

__all__ = ["ChainedPasses", "MaskPass", "MaskPipeline", "change_mode"]

_EAGER_INPUTS = "eager_input_vals"


class MaskPass(ABC):
    """One rewrite of a mask; stateless, named by its class."""

    fired: Reason
    """The verdict of a mask that this pass rewrote."""

    @abstractmethod
    def declines(self, mask: Mask) -> Reason | None:
        """Say why this pass must leave the mask alone; None when it may rewrite it."""

    @abstractmethod
    def rewrite(self, mask: Mask) -> None:
        """Rewrite the graph around a mask that `declines` had nothing against."""


class MaskPipeline(CustomGraphPass):  # type: ignore[misc, unused-ignore]
    """All selected passes as one Inductor pass, for `joint_custom_pre_pass`.

    Args:
        passes: in the order in which they try a mask.
        sink: is given the reports of each graph, in a list.
    """

    def __init__(
        self, passes: Sequence[MaskPass], sink: Callable[[list[MaskReport]], None]
    ) -> None:
        self._passes = tuple(passes)
        self._sink = sink

    def __call__(self, graph: Graph) -> None:
        """Rewrite one functional graph in place and report on each of its masks."""
        disabled = flag("TORCHVM_DISABLE")
        reports = []
        for mask in find_masks(graph):
            before = _storage(mask)
            verdict = Reason.DISABLED if disabled else self._try(mask)
            after = _storage(mask)
            reports.append(
                MaskReport(
                    name=mask.origin.name,
                    source=source_line(mask.origin),
                    declared_mode=before[0],
                    final_mode=after[0],
                    declared_bytes=before[1],
                    final_bytes=after[1],
                    verdict=verdict,
                    readers=mask.readers(),
                )
            )
        self._sink(reports)

    def uuid(self) -> str | None:
        """Return the compile-cache key; None (no caching) where a contract has no stable key."""
        names = [type(p).__name__ for p in self._passes]
        return cache_key([*names, f"TORCHVM_DISABLE={flag('TORCHVM_DISABLE')}"])

    def _try(self, mask: Mask) -> Reason:
        """Let the first pass that may rewrite the mask do so; otherwise the last refusal."""
        verdict = Reason.PASS_OFF
        for mask_pass in self._passes:
            refusal = mask_pass.declines(mask)
            if refusal is None:
                mask_pass.rewrite(mask)
                return mask_pass.fired
            verdict = refusal
        return verdict


class ChainedPasses(CustomGraphPass):  # type: ignore[misc, unused-ignore]
    """Several graph passes in one hook: torch 2.11 takes one callable, not a list."""

    def __init__(self, passes: Sequence[Callable[[Graph], None]]) -> None:
        self._passes = tuple(passes)

    def __call__(self, graph: Graph) -> None:
        """Run the passes in order."""
        for graph_pass in self._passes:
            graph_pass(graph)

    def uuid(self) -> tuple[Any, ...] | None:
        """Return the keys of all; None (no caching) when one of them has none."""
        keys = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self._passes]
        return None if any(not key for key in keys) else tuple(keys)


def change_mode(mask: Mask, mode: TreeMaskMode) -> None:
    """Give an allocation, its builds and its readers another mode; sizes taken from it stay.

    Args:
        mask: one with no obstacle; every reader that has a mode argument takes `mode`.
        mode: the new layout.
    """
    if mask.alloc is None:
        raise AssertionError("only an allocation has a mode to change")
    for node in mask.sizes:
        _replace_by_declared_size(mask, node)
    eager_values = {
        user: _eager_values(user) for version in mask.versions for user in version.users
    }
    mask.alloc.set_argument("tree_mask_mode", int(mode))
    for build in mask.builds:
        build.call.set_argument(build.mode_arg, int(mode))
    for use in mask.uses:
        if use.call is not None and use.reader is not None and use.reader.mode_arg is not None:
            use.call.set_argument(use.reader.mode_arg, int(mode))
    _update_values(mask)
    for user, by_node in eager_values.items():
        _update_eager_inputs(mask, user, by_node)


def _replace_by_declared_size(mask: Mask, size: Node) -> None:
    """Compute a size that the graph asks of the mask from the allocation's arguments instead.

    The buffer of FULL_MASK is 1-D with `bs * n * (max_context_len + n)` elements.
    """
    assert mask.alloc is not None
    arguments = mask.alloc.arguments
    bs, n, context = (arguments[k] for k in ("bs", "num_draft_tokens", "max_context_len"))
    graph = size.graph

    def compute(function: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
        value = function(symbolic_value(a), symbolic_value(b))
        if isinstance(value, int):
            return value
        node = graph.call_function(function, (a, b))
        node.meta["val"] = value
        return node

    with graph.inserting_before(size):
        rows = compute(operator.mul, bs, n)
        total = compute(operator.mul, rows, compute(operator.add, context, n))
    size.replace_all_uses_with(total)
    graph.erase_node(size)


def _update_values(mask: Mask) -> None:
    """Bring the recorded fake tensors of every version to the new size."""
    value = mask.root.meta.get("val")
    numel = _storage(mask, symbolic=True)[1]
    if isinstance(value, torch.Tensor) and numel is not None:
        for version in mask.versions:
            version.meta["val"] = value.new_empty(numel)


def _eager_values(node: Node) -> dict[Node, Any]:
    """What tracing recorded of a call's inputs, by the node each came from."""
    recorded: dict[Node, Any] = {}
    if _EAGER_INPUTS in node.meta:

        def record(argument: Any, value: Any) -> None:
            if isinstance(argument, torch.fx.Node):
                recorded[argument] = value

        tree_map(record, (node.args, node.kwargs), node.meta[_EAGER_INPUTS])
    return recorded


def _update_eager_inputs(mask: Mask, node: Node, by_node: dict[Node, Any]) -> None:
    """Bring the recorded inputs of a call to the new size.

    Inductor sizes the copies that it makes for a mutated argument by them: with the old size it
    reads past the end of the smaller buffer.
    """
    if _EAGER_INPUTS in node.meta:
        new = {version: version.meta["val"] for version in mask.versions}
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: new.get(n, by_node.get(n)))
        node.meta[_EAGER_INPUTS] = (args, kwargs)


def _storage(mask: Mask, *, symbolic: bool = False) -> tuple[TreeMaskMode, Any]:
    """Return mode and bytes of a mask as the graph has it, symbols as text unless asked."""
    mode = mask.mode
    if mask.alloc is not None:
        names = ("bs", "num_draft_tokens", "max_context_len")
        bs, n, context = (symbolic_value(mask.alloc.arguments[name]) for name in names)
        nbytes, _ = mask_storage(mode, bs, n, context)
    else:
        value = symbolic_value(mask.origin)
        nbytes = value.numel() * value.element_size()
    if isinstance(nbytes, int) or symbolic:
        return mode, nbytes
    return mode, _number_or_text(nbytes)


def _number_or_text(value: torch.SymInt) -> int | str:
    expression = value.node.expr
    return int(expression) if expression.is_number else str(expression)
