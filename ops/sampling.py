"""torchvm::verify_tree_sampling: which draft tokens a sample from the target goes through."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchvm.ops.checks import check_tensor, require
from torchvm.ops.kernels import cpu_sampling
from torchvm.ops.library import register_op
from torchvm.ops.verify import Verification

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MOST_TOKENS", "verify_tree_sampling"]

# A sum of so many weights of at most 2 ** 40 stays within an int64.
MOST_TOKENS = 1 << 22

_SCHEMA = (
    "verify_tree_sampling(Tensor candidates, Tensor retrieve_index, Tensor retrieve_next_token, "
    "Tensor retrieve_next_sibling, Tensor target_probs, Tensor coins, Tensor coins_for_final, "
    "int max_accept, float threshold_single=1.0, float threshold_acc=1.0) "
    "-> (Tensor predicts, Tensor accept_index, Tensor accept_token_num)"
)


def _check(
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_probs: Tensor,
    coins: Tensor,
    coins_for_final: Tensor,
    max_accept: int,
    threshold_single: float,
    threshold_acc: float,
) -> None:
    """Check shapes, dtypes and thresholds; the rest is data."""
    if max_accept < 1:
        raise ValueError(f"max_accept must be >= 1, got {max_accept}")
    for name, threshold in (
        ("threshold_single", threshold_single),
        ("threshold_acc", threshold_acc),
    ):
        if not 0 < threshold <= 1:
            raise ValueError(f"{name} must be in (0, 1], got {threshold}")
    require(candidates.dim() == 2, lambda: f"candidates must be 2-D, got {candidates.dim()}-D")
    batch, n = candidates.shape
    device = candidates.device
    require(n >= 1, lambda: f"candidates must have at least 1 column, got {n}")
    for name, tensor in (
        ("candidates", candidates),
        ("retrieve_index", retrieve_index),
        ("retrieve_next_token", retrieve_next_token),
        ("retrieve_next_sibling", retrieve_next_sibling),
    ):
        check_tensor(name, tensor, device, batch, n)
    dim = target_probs.dim()
    require(dim == 3, lambda: f"target_probs must be 3-D, got {dim}-D")
    size = target_probs.shape[2]
    check_tensor("target_probs", target_probs, device, batch, n, size, dtype=torch.float32)
    for holds in (size >= 1, size <= MOST_TOKENS):
        require(holds, lambda: f"target_probs must be of 1 to {MOST_TOKENS} tokens, got {size}")
    check_tensor("coins", coins, device, batch, n, dtype=torch.float32)
    check_tensor("coins_for_final", coins_for_final, device, batch, dtype=torch.float32)


def _fake(
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_probs: Tensor,
    coins: Tensor,
    coins_for_final: Tensor,
    max_accept: int,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Contiguous int32 on the device of `candidates`: (B * n,), (B, max_accept), (B,)."""
    _check(
        candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_probs,
        coins, coins_for_final, max_accept, threshold_single, threshold_acc,
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
    target_probs: Tensor,
    coins: Tensor,
    coins_for_final: Tensor,
    max_accept: int,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(
        candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_probs,
        coins, coins_for_final, max_accept, threshold_single, threshold_acc,
    )  # fmt: skip
    return cpu_sampling.verify_tree_sampling(
        candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_probs,
        coins, coins_for_final, max_accept, threshold_single, threshold_acc,
    )  # fmt: skip


def _cuda(
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_probs: Tensor,
    coins: Tensor,
    coins_for_final: Tensor,
    max_accept: int,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    from torchvm.ops.kernels import triton_sampling

    _check(
        candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_probs,
        coins, coins_for_final, max_accept, threshold_single, threshold_acc,
    )  # fmt: skip
    return triton_sampling.verify_tree_sampling(
        candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_probs,
        coins, coins_for_final, max_accept, threshold_single, threshold_acc,
    )  # fmt: skip


_OP = register_op(_SCHEMA, fake=_fake, kernels={"CPU": _cpu, "CUDA": _cuda})


def verify_tree_sampling(
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_probs: Tensor,
    coins: Tensor,
    coins_for_final: Tensor,
    *,
    max_accept: int,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
) -> Verification:
    """Sample from the target along each draft tree: accept drafts while the sample meets them.

    At a node the coin picks a token of the node's distribution p, whose tokens are laid out with
    the children's first, in sibling order: a child is accepted when `coin <= (p of the children
    so far) / threshold_acc`, or when p of its own is `threshold_single` or more. Without one the
    last token is drawn from p without the children's tokens; where the path ends by itself, at a
    leaf or at `max_accept`, from all of p. With both thresholds at 1 the tokens are distributed
    as if each had been sampled from the target, whatever the drafts; with less, more drafts are
    accepted and the distribution leans towards them.

    A token among the siblings counts once. A token of probability 0, or outside [0, V), is never
    accepted nor drawn; what is negative or NaN is 0. p need not sum to 1 exactly: the last token
    is drawn in proportion, from weights of 2 ** -40 and by a coin of 24 bits, and is therefore
    the same on every device. Where nothing is left to draw from, by rounding, it is the most
    probable token that was not rejected (the smallest of equals), and if all of those have
    probability 0 the most probable of p; a p that is 0 everywhere gives token 0.

    Links are followed as by `verify_tree_greedy`, and end where it ends them; a child that is
    accepted but has no place among the request's own n is the last token.

    Args:
        candidates: (B, n) int64, token of each node; the root's is not looked at.
        retrieve_index: (B, n) int64, place of each node among all B * n.
        retrieve_next_token: (B, n) int64, first child of each node, -1 where none.
        retrieve_next_sibling: (B, n) int64, next sibling of each node, -1 where none.
        target_probs: (B, n, V) float32, the target's distribution after each node, V at most
            2 ** 22; see `sampling_probs`.
        coins: (B, n) float32 in [0, 1), for the children of each node; independent and uniform.
        coins_for_final: (B,) float32 in [0, 1), for the last token; independent of those.
        max_accept: columns of `accept_index`, the root's included: one more than the draft steps.
        threshold_single: in (0, 1], a child of this probability is accepted whatever the coin.
        threshold_acc: in (0, 1], divides what the coin is compared with.

    Returns:
        predicts (B * n,), accept_index (B, max_accept) and accept_token_num (B,), all int32; -1
        in the cells of the first two that the accepted path does not reach.

    Raises:
        ValueError: for a shape, a dtype or a threshold that does not fit.
    """
    return Verification(
        *_OP(
            candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_probs,
            coins, coins_for_final, max_accept, threshold_single, threshold_acc,
        )
    )  # fmt: skip
