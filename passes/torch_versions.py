"""What differs between the supported versions of torch, and its private parts that passes use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch._inductor import utils as inductor_utils

if TYPE_CHECKING:
    from torch.fx import Node

__all__ = ["unsafe_in_cuda_graph"]


def unsafe_in_cuda_graph(node: Node) -> bool:
    """Whether Inductor itself keeps a node out of CUDA graphs."""
    return inductor_utils.is_cudagraph_unsafe_fx_node(node)
