"""torchvm::select_draft_candidates: which draft scores become the tree that is verified."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from torchvm.ops.checks import check_tensor, int64, require
from torchvm.ops.kernels import cpu_candidates
from torchvm.ops.library import register_op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import SymInt, Tensor

__all__ = ["DraftCandidates", "select_draft_candidates"]

_SCHEMA = (
    "select_draft_candidates(Tensor[] score_list, Tensor[] token_list, Tensor[] parents_list, "
    "SymInt num_draft_tokens) -> (Tensor parent_list, Tensor selected_index, Tensor draft_tokens)"
)
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class DraftCandidates(NamedTuple):
    """What `build_tree` needs of the candidates, and the tokens of the n - 1 selected ones."""

    parent_list: Tensor
    """(B, topk * (depth - 1) + 1) int64, parents of all levels but the last; (B, 0) at depth 1."""
    selected_index: Tensor
    """(B, n - 1) int64, ids of the selected candidates in ascending order."""
    draft_tokens: Tensor
    """(B, n - 1) int64, their tokens; the bonus token goes before them for the verify."""


def _check(
    score_list: Sequence[Tensor],
    token_list: Sequence[Tensor],
    parents_list: Sequence[Tensor],
    num_draft_tokens: int | SymInt,
) -> None:
    """Check shapes and dtypes, and that there are enough candidates."""
    depth = len(score_list)
    require(depth >= 1, lambda: "score_list must have at least one level, got none")
    for name, levels in (("token_list", token_list), ("parents_list", parents_list)):
        if len(levels) != depth:
            raise ValueError(
                f"{name} must have as many levels as score_list, {depth}, got {len(levels)}"
            )
    first, dtype = score_list[0], score_list[0].dtype
    require(dtype in _DTYPES, lambda: f"score_list[0] must be floating point, got {dtype}")
    require(first.dim() == 3, lambda: f"score_list[0] must be 3-D, got {first.dim()}-D")
    (batch, _, topk), device = first.shape, first.device
    for i, level in enumerate(zip(score_list, token_list, parents_list, strict=True)):
        scores, tokens, parents = level
        beams = topk if i else 1
        check_tensor(f"score_list[{i}]", scores, device, batch, beams, topk, dtype=dtype)
        check_tensor(f"token_list[{i}]", tokens, device, batch, beams * topk)
        check_tensor(f"parents_list[{i}]", parents, device, batch, topk if i else topk + 1)
    num_candidates = topk + (depth - 1) * topk * topk
    require(
        num_draft_tokens >= 1, lambda: f"num_draft_tokens must be >= 1, got {num_draft_tokens}"
    )
    require(
        num_draft_tokens - 1 <= num_candidates,
        lambda: (
            f"num_draft_tokens must be <= {num_candidates + 1}, the root and all candidates of "
            f"{depth} levels of topk {topk}, got {num_draft_tokens}"
        ),
    )


def _fake(
    score_list: Sequence[Tensor],
    token_list: Sequence[Tensor],
    parents_list: Sequence[Tensor],
    num_draft_tokens: int | SymInt,
) -> tuple[Tensor, Tensor, Tensor]:
    """Contiguous int64: (B, topk * (depth - 1) + 1) or (B, 0), then (B, n - 1) twice."""
    _check(score_list, token_list, parents_list, num_draft_tokens)
    depth, tokens = len(score_list), token_list[0]
    batch, topk = tokens.shape
    return (
        tokens.new_empty(batch, topk * (depth - 1) + 1 if depth > 1 else 0),
        tokens.new_empty(batch, num_draft_tokens - 1),
        tokens.new_empty(batch, num_draft_tokens - 1),
    )


def _cpu(
    score_list: Sequence[Tensor],
    token_list: Sequence[Tensor],
    parents_list: Sequence[Tensor],
    num_draft_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(score_list, token_list, parents_list, num_draft_tokens)
    scores, tokens, parent_list = _join(score_list, token_list, parents_list)
    selected = cpu_candidates.select_draft_candidates(scores, tokens, num_draft_tokens)
    return parent_list, *selected


def _cuda(
    score_list: Sequence[Tensor],
    token_list: Sequence[Tensor],
    parents_list: Sequence[Tensor],
    num_draft_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:
    from torchvm.ops.kernels import triton_candidates

    _check(score_list, token_list, parents_list, num_draft_tokens)
    scores, tokens, parent_list = _join(score_list, token_list, parents_list)
    selected = triton_candidates.select_draft_candidates(scores, tokens, num_draft_tokens)
    return parent_list, *selected


_OP = register_op(_SCHEMA, fake=_fake, kernels={"CPU": _cpu, "CUDA": _cuda})


def select_draft_candidates(
    score_list: Sequence[Tensor],
    token_list: Sequence[Tensor],
    parents_list: Sequence[Tensor],
    *,
    num_draft_tokens: int,
) -> DraftCandidates:
    """Select the n - 1 best candidates of all draft levels, as `build_tree` takes them.

    Candidates are numbered level by level, beam by beam: [0, k) is the first level, and the
    c-th child of beam i at the level after it is k + k * i + c. They are selected by score in
    descending order, and by number in ascending order where scores are equal, so that a child
    whose probability is 1 never comes without its parent. NaN ranks below all.

    Args:
        score_list: one tensor a level, floating point, cumulative probabilities (logarithms
            order alike): (B, 1, k), then (B, k, k).
        token_list: one tensor a level, int64 (int32 is converted): (B, k), then (B, k * k).
        parents_list: one tensor a level, int64 (int32 is converted): (B, k + 1), the first entry
            unused, then (B, k). The last is not used.
        num_draft_tokens: n, root included; n - 1 is at most k + k * k * (levels - 1).

    Returns:
        parent_list (B, k * (levels - 1) + 1), or (B, 0) for one level; selected_index and
        draft_tokens (B, n - 1); all int64.

    Raises:
        ValueError: for a level whose shape or dtype does not fit, or too few candidates.

    Example:
        >>> import torch, torchvm
        >>> found = torchvm.select_draft_candidates(
        ...     [torch.tensor([[[0.6, 0.3]]]), torch.tensor([[[0.5, 0.1], [0.2, 0.1]]])],
        ...     [torch.tensor([[11, 12]]), torch.tensor([[21, 22, 23, 24]])],
        ...     [torch.tensor([[-1, 0, 1]]), torch.tensor([[2, 4]])],
        ...     num_draft_tokens=4,
        ... )
        >>> found.selected_index.tolist(), found.draft_tokens.tolist()
        ([[0, 1, 2]], [[11, 12, 21]])
    """
    if not score_list:
        raise ValueError("score_list must have at least one level, got none")
    return DraftCandidates(
        *_OP(score_list, list(map(int64, token_list)), list(map(int64, parents_list)),
             num_draft_tokens)
    )  # fmt: skip


def _join(
    score_list: Sequence[Tensor], token_list: Sequence[Tensor], parents_list: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """All candidates of a request side by side: scores (B, M), tokens (B, M), and parent_list."""
    scores = torch.cat([level.flatten(1) for level in score_list], dim=1)
    tokens = torch.cat(list(token_list), dim=1)
    parents = [tokens[:, :0], *parents_list[:-1]]
    return scores, tokens, torch.cat(parents, dim=1)
