"""torchvm::gated_delta_tree: linear attention on a draft tree, by its links and with no mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from torchvm.ops.checks import check_tensor
from torchvm.ops.library import register_op
from torchvm.ops.paged import ATTENTION_DTYPES, must_be

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GatedDeltaTree", "gated_delta_tree"]

_SCHEMA = (
    "gated_delta_tree(Tensor query, Tensor key, Tensor value, Tensor gate, Tensor beta, "
    "Tensor initial_state, Tensor retrieve_next_token, Tensor retrieve_next_sibling, "
    "float scale) -> (Tensor output, Tensor states)"
)


class GatedDeltaTree(NamedTuple):
    """What linear attention gives at each of n nodes of B trees."""

    output: Tensor
    """(B, n, H, Dv) in value's dtype."""
    states: Tensor
    """(B, n, H, Dk, Dv) float32, the state after each node: the accepted one is committed."""


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
) -> None:
    """Check dtypes, shapes and devices; links are data."""
    device, dtype = query.device, query.dtype
    for name, tensor in (("query", query), ("value", value)):
        must_be(tensor.dim() == 4, name, "4-D (B, n, heads, width)", list(tensor.shape))
    must_be(dtype in ATTENTION_DTYPES, "query", "float32, float16 or bfloat16", dtype)
    batch, n, heads, width = query.shape
    must_be(n >= 1, "query", "of at least one draft token", list(query.shape))
    must_be(width >= 1, "query", "of Dk >= 1", list(query.shape))
    check_tensor("key", key, device, batch, n, heads, width, dtype=dtype)
    check_tensor("value", value, device, batch, n, heads, value.shape[3], dtype=dtype)
    check_tensor("gate", gate, device, batch, n, heads, dtype=torch.float32)
    check_tensor("beta", beta, device, batch, n, heads, dtype=torch.float32)
    state = (batch, heads, width, value.shape[3])
    check_tensor("initial_state", initial_state, device, *state, dtype=torch.float32)
    check_tensor("retrieve_next_token", retrieve_next_token, device, batch, n)
    check_tensor("retrieve_next_sibling", retrieve_next_sibling, device, batch, n)


def _fake(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    scale: float,  # noqa: ARG001
) -> tuple[Tensor, Tensor]:
    """Contiguous: (B, n, H, Dv) in value's dtype, (B, n, H, Dk, Dv) float32."""
    _check(
        query, key, value, gate, beta, initial_state, retrieve_next_token, retrieve_next_sibling
    )
    states = initial_state.new_empty(*key.shape, value.shape[3])
    return value.new_empty(value.shape), states


def _cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    from torchvm.ops.kernels import cpu_linear

    _check(
        query, key, value, gate, beta, initial_state, retrieve_next_token, retrieve_next_sibling
    )
    return cpu_linear.gated_delta_tree(
        query, key, value, gate, beta, initial_state, retrieve_next_token, retrieve_next_sibling,
        scale,
    )  # fmt: skip


def _cuda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    from torchvm.ops.kernels import triton_linear

    _check(
        query, key, value, gate, beta, initial_state, retrieve_next_token, retrieve_next_sibling
    )
    most, width = triton_linear.MOST_KEY_DIM, key.shape[3]
    must_be(width <= most, "key", f"at most {most} wide on a GPU", width)
    return triton_linear.gated_delta_tree(
        query, key, value, gate, beta, initial_state, retrieve_next_token, retrieve_next_sibling,
        scale,
    )  # fmt: skip


_OP = register_op(_SCHEMA, fake=_fake, kernels={"CPU": _cpu, "CUDA": _cuda})


def gated_delta_tree(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    *,
    scale: float,
) -> GatedDeltaTree:
    """Run the gated delta rule along every branch of a draft tree.

    The rule is that of Gated DeltaNet (Yang, Kautz, Hatamizadeh 2024, arXiv:2412.06464, equation
    10), with the state S held as (Dk, Dv). From the state of its parent, each node makes

        S = exp(gate) * S_parent
        S = S + beta * outer(key, value - key @ S)
        output = scale * query @ S

    The root, node 0, continues from `initial_state`. Parents come from the tree's links, which
    `build_tree` writes: the parent of a first child, and of the siblings after it. A link that
    does not point at a later node of the n is ignored, of several links to one node the first in
    node order counts, and a node that no link reaches continues from `initial_state`. The links
    of a chain make this the rule token after token.

    Args:
        query: (B, n, H, Dk) float32, float16 or bfloat16; on a GPU Dk <= 256. Neither it nor
            `key` is normalised here.
        key: like `query`.
        value: (B, n, H, Dv), the query's dtype.
        gate: (B, n, H) float32, logarithm of the decay, <= 0.
        beta: (B, n, H) float32, how much of the error is written.
        initial_state: (B, H, Dk, Dv) float32, the state after the committed tokens.
        retrieve_next_token: (B, n) int64, first child of each node, -1 where none.
        retrieve_next_sibling: (B, n) int64, next sibling of each node, -1 where none.
        scale: factor on the output.

    Returns:
        output (B, n, H, Dv) in the dtype of `value`, rounded once, and states (B, n, H, Dk, Dv)
        float32, the state after each node. Sums run in float32.

    Raises:
        ValueError: for a shape, dtype or device that does not fit.
    """
    return GatedDeltaTree(
        *_OP(
            query, key, value, gate, beta, initial_state, retrieve_next_token,
            retrieve_next_sibling, scale,
        )
    )  # fmt: skip
