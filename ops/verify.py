"""torchvm::verify_tree_greedy: which draft tokens the target agrees with."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from torchvm.ops.checks import check_tensor, require
from torchvm.ops.kernels import cpu_verify
from torchvm.ops.library import register_op

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Verification", "verify_tree_greedy"]

_SCHEMA = (
    "verify_tree_greedy(Tensor candidates, Tensor retrieve_index, Tensor retrieve_next_token, "
    "Tensor retrieve_next_sibling, Tensor target_predict, int max_accept) "
    "-> (Tensor predicts, Tensor accept_index, Tensor accept_token_num)"
)


class Verification(NamedTuple):
    """The path that the target accepted in each of B trees of n nodes."""

    predicts: Tensor
    """(B * n,) int32, the target's token after each accepted node, -1 at all other nodes."""
    accept_index: Tensor
    """(B, max_accept) int32, places of the root and accepted nodes among the B * n, then -1."""
    accept_token_num: Tensor
    """(B,) int32, accepted draft tokens: neither the root nor the bonus token counts."""


def _check(
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    max_accept: int,
) -> None:
    """Check shapes and dtypes; the rest is data."""
    if max_accept < 1:
        raise ValueError(f"max_accept must be >= 1, got {max_accept}")
    require(candidates.dim() == 2, lambda: f"candidates must be 2-D, got {candidates.dim()}-D")
    batch, n = candidates.shape
    require(n >= 1, lambda: f"candidates must have at least 1 column, got {n}")
    for name, tensor in (
        ("candidates", candidates),
        ("retrieve_index", retrieve_index),
        ("retrieve_next_token", retrieve_next_token),
        ("retrieve_next_sibling", retrieve_next_sibling),
        ("target_predict", target_predict),
    ):
        check_tensor(name, tensor, candidates.device, batch, n)


def _fake(
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    max_accept: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Contiguous int32 on the device of `candidates`: (B * n,), (B, max_accept), (B,)."""
    _check(
        candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_predict,
        max_accept,
    )  # fmt: skip
    batch, n = candidates.shape
    return (
        candidates.new_empty(batch * n, dtype=torch.int32),
        candidates.new_empty(batch, max_accept, dtype=torch.int32),
        candidates.new_empty(batch, dtype=torch.int32),
    )


def _cpu(
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    max_accept: int,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(
        candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_predict,
        max_accept,
    )  # fmt: skip
    return cpu_verify.verify_tree_greedy(
        candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_predict,
        max_accept,
    )  # fmt: skip


def _cuda(
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    max_accept: int,
) -> tuple[Tensor, Tensor, Tensor]:
    from torchvm.ops.kernels import triton_verify

    _check(
        candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_predict,
        max_accept,
    )  # fmt: skip
    return triton_verify.verify_tree_greedy(
        candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_predict,
        max_accept,
    )  # fmt: skip


_OP = register_op(_SCHEMA, fake=_fake, kernels={"CPU": _cpu, "CUDA": _cuda})


def verify_tree_greedy(
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    *,
    max_accept: int,
) -> Verification:
    """Accept the longest path of each draft tree that the target itself would have taken.

    From the root on, the child is accepted whose token is the target's choice after the last
    accepted node; of two such children the first in sibling order. The target's choice after the
    last of them is the bonus token.

    A child or sibling outside [0, n) ends its list, a list is followed for n steps at most, and a
    place outside the request's own n ends the walk before it is used.

    Args:
        candidates: (B, n) int64, token of each node; the root's is not looked at.
        retrieve_index: (B, n) int64, place of each node among all B * n.
        retrieve_next_token: (B, n) int64, first child of each node, -1 where none.
        retrieve_next_sibling: (B, n) int64, next sibling of each node, -1 where none.
        target_predict: (B, n) int64, the target's token after each place.
        max_accept: columns of `accept_index`, the root's included: one more than the draft steps.

    Returns:
        predicts (B * n,), accept_index (B, max_accept) and accept_token_num (B,), all int32; -1
        in the cells of the first two that the accepted path does not reach.

    Raises:
        ValueError: for a shape or dtype that does not fit.

    Example:
        The target says 7 after the root, and 9 after that node, which nobody drafted:

        >>> import torch, torchvm
        >>> verified = torchvm.verify_tree_greedy(
        ...     torch.tensor([[3, 6, 7]]), torch.tensor([[0, 1, 2]]), torch.tensor([[1, -1, -1]]),
        ...     torch.tensor([[-1, 2, -1]]), torch.tensor([[7, 0, 9]]), max_accept=2,
        ... )
        >>> verified.accept_index.tolist(), verified.accept_token_num.tolist()
        ([[0, 2]], [1])
        >>> verified.predicts.tolist()
        [7, -1, 9]
    """
    return Verification(
        *_OP(
            candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling,
            target_predict, max_accept,
        )
    )  # fmt: skip
