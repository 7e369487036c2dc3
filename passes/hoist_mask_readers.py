"""HoistMaskReaders: what reads the old mask runs before the build that overwrites it.

Inductor reorders an inference graph for locality and may move a reader of the old value behind
the build. The build then needs a copy of the whole mask to write into: 1 GiB for one reader.

    before                                 after
    ..., m1 = build_tree(..., m0)          r = reader(m0)
    r = reader(m0)                         ..., m1 = build_tree(..., m0)

Runs at `post_grad_custom_pre_pass`, right after that reordering, on a graph that is functional.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch._inductor.custom_graph_pass import CustomGraphPass

from torchvm.ops.environment import flag
from torchvm.passes.cache_key import cache_key
from torchvm.passes.liveness import Build, find_builds

if TYPE_CHECKING:
    from torch.fx import Graph, Node

__all__ = ["HoistMaskReaders"]


class HoistMaskReaders(CustomGraphPass):  # type: ignore[misc, unused-ignore]
    """Move late readers of a mask's old value, and what they need, before the build."""

    def __call__(self, graph: Graph) -> None:
        """Reorder one graph in place; nothing is added, removed or changed."""
        if flag("TORCHVM_DISABLE"):
            return
        builds = find_builds(graph)
        order: dict[Node, int] = {}
        for build in builds.values():
            if len(build.written.base.users) > 1:
                order = order or {node: i for i, node in enumerate(graph.nodes)}
                if _hoist(build, order):
                    order = {}

    def uuid(self) -> str | None:
        """Return the compile-cache key."""
        return cache_key(["HoistMaskReaders", f"TORCHVM_DISABLE={flag('TORCHVM_DISABLE')}"])


def _hoist(build: Build, order: dict[Node, int]) -> bool:
    """Move every late reader of one build that can be moved; say whether any was."""
    node = build.call.node
    moved = False
    for reader in list(build.written.base.users):
        if order[reader] <= order[node] or reader.op != "call_function":
            continue
        needed = _needed_after(reader, node, order)
        if needed is not None:
            moved = True
            for each in sorted(needed, key=order.__getitem__):
                node.prepend(each)
    return moved


def _needed_after(reader: Node, build: Node, order: dict[Node, int]) -> set[Node] | None:
    """The reader and its inputs that stand behind the build; None if they depend on it."""
    needed: set[Node] = set()
    pending = [reader]
    while pending:
        node = pending.pop()
        if node is build or node.op != "call_function":
            return None
        if node not in needed:
            needed.add(node)
            pending.extend(n for n in node.all_input_nodes if order[n] >= order[build])
    return needed
