"""torchvm::verify_tree_greedy: which path of each draft tree the target model accepts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from torchvm.ops.checks import check, check_tensor
from torchvm.ops.library import register_op

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Verification", "verify_tree_greedy"]

_SCHEMA = (
    "verify_tree_greedy(Tensor candidates, Tensor retrieve_index, Tensor retrieve_next_token, "
    "Tensor retrieve_next_sibling, Tensor target_predict, int max_accept) "
    "-> (Tensor predicts, Tensor accept_index, Tensor accept_token_num)"
)
Outputs = tuple["Tensor", "Tensor", "Tensor"]


class Verification(NamedTuple):
    """What the target model accepted."""

    predicts: Tensor
    """(B * n,) int32: the target's token at each accepted node, -1 elsewhere."""
    accept_index: Tensor
    """(B, max_accept) int32: accepted entries of retrieve_index, root first, padded with -1."""
    accept_token_num: Tensor
    """(B,) int32: accepted draft tokens, without the bonus token."""


def _check(
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    max_accept: int,
) -> None:
    check(max_accept >= 1, "max_accept", ">= 1", max_accept)
    if candidates.dim() != 2:
        raise ValueError(f"candidates must be 2-D, got shape {tuple(candidates.shape)}")
    check(candidates.shape[1] >= 1, "candidates", "of at least 1 column", candidates.shape[1])
    shape = (candidates.shape[0], candidates.shape[1])
    for name, tensor in (
        ("candidates", candidates),
        ("retrieve_index", retrieve_index),
        ("retrieve_next_token", retrieve_next_token),
        ("retrieve_next_sibling", retrieve_next_sibling),
        ("target_predict", target_predict),
    ):
        check_tensor(name, tensor, shape, candidates.device)


def _fake(
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    max_accept: int,
) -> Outputs:
    """Three int32 tensors: (B * n,), (B, max_accept) and (B,)."""
    _check(
        candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_predict,
        max_accept,
    )  # fmt: skip
    bs, n = candidates.shape
    sizes = ((bs * n,), (bs, max_accept), (bs,))
    first, second, third = (candidates.new_empty(s, dtype=torch.int32) for s in sizes)
    return first, second, third


def _cpu(
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    max_accept: int,
) -> Outputs:
    from torchvm.ops.kernels import cpu_verify

    tensors = (
        candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_predict,
    )  # fmt: skip
    _check(*tensors, max_accept)
    return cpu_verify.verify_tree_greedy(*(t.contiguous() for t in tensors), max_accept)


def _no_cuda(*args: object, **kwargs: object) -> Outputs:
    raise NotImplementedError("verify_tree_greedy has no CUDA kernel: give it CPU tensors")


_OP = register_op(_SCHEMA, fake=_fake, kernels={"CPU": _cpu, "CUDA": _no_cuda})


def verify_tree_greedy(
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    *,
    max_accept: int,
) -> Verification:
    """Follow the target's greedy choice down each tree as long as a draft token equals it.

    Args:
        candidates: (B, n) int64, token of each node; column 0 is the last committed token.
        retrieve_index: (B, n) int64, as a build returns it.
        retrieve_next_token: (B, n) int64, as a build returns it.
        retrieve_next_sibling: (B, n) int64, as a build returns it.
        target_predict: (B, n) int64, argmax of the target's logits at each node.
        max_accept: columns of accept_index, root included (draft depth + 1).

    Raises:
        ValueError: for a wrong shape or max_accept below 1.
        TypeError: for a dtype other than int64.
    """
    outputs = _OP(
        candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_predict,
        max_accept,
    )  # fmt: skip
    return Verification(*outputs)
