"""What differs between the supported versions of torch, and its private parts that passes use."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch._inductor import utils as inductor_utils

if TYPE_CHECKING:
    from torch.fx import Node

__all__ = ["unsafe_in_cuda_graph"]


def unsafe_in_cuda_graph(node: Node) -> bool:
    """Whether Inductor itself keeps a node out of CUDA graphs, or its value is data-dependent."""
    graph: Any = SimpleNamespace(graph=SimpleNamespace(nodes=[node]))
    return inductor_utils.get_first_incompatible_cudagraph_node(graph) is not None
