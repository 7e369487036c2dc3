"""What differs between the supported versions of torch, and its private parts that passes use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._inductor import utils as inductor_utils

if TYPE_CHECKING:
    from torch.fx import Node

__all__ = ["returned_results", "unsafe_in_cuda_graph"]


def returned_results(op: torch._ops.OpOverload) -> int:
    """How many results of an auto_functionalized_v2 wrapper come before the new values.

    An op without any returns None; an op with the tag `out`, unknown to torch 2.11, does not.
    """
    out = getattr(torch.Tag, "out", None)
    return 0 if out is not None and out in op.tags else max(len(op._schema.returns), 1)


def unsafe_in_cuda_graph(node: Node) -> bool:
    """Whether Inductor itself keeps a node out of CUDA graphs."""
    return inductor_utils.is_cudagraph_unsafe_fx_node(node)
