"""torchvm::build_tree and torchvm::build_tree_from_parents: mask, positions and links of a tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from torchvm.ops.checks import check, check_mask, check_tensor
from torchvm.ops.layout import tree_mode
from torchvm.ops.library import register_op

if TYPE_CHECKING:
    from torch import SymInt, Tensor

__all__ = ["DraftTree", "build_tree", "build_tree_from_parents"]

_RETURNS = (
    "(Tensor positions, Tensor retrieve_index, Tensor retrieve_next_token, "
    "Tensor retrieve_next_sibling)"
)
_BUILD_SCHEMA = (
    "build_tree(Tensor parent_list, Tensor selected_index, Tensor seq_lens, "
    "Tensor(a!) tree_mask, int topk, int depth, SymInt num_draft_tokens, int tree_mask_mode, "
    f"bool fill_prefix=True) -> {_RETURNS}"
)
_PARENTS_SCHEMA = (
    "build_tree_from_parents(Tensor parents, Tensor seq_lens, Tensor(a!) tree_mask, "
    f"SymInt num_draft_tokens, int tree_mask_mode, bool fill_prefix=True) -> {_RETURNS}"
)


class DraftTree(NamedTuple):
    """Where the nodes of each request's tree stand and how they hang together."""

    positions: Tensor
    """(B * n,) int64: committed length plus depth of each node."""
    retrieve_index: Tensor
    """(B, n) int64: b * n + j."""
    retrieve_next_token: Tensor
    """(B, n) int64: the first child of each node, or -1."""
    retrieve_next_sibling: Tensor
    """(B, n) int64: the next child of the same parent, or -1."""


Outputs = tuple["Tensor", "Tensor", "Tensor", "Tensor"]


def _check_build(
    parent_list: Tensor,
    selected_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    topk: int,
    depth: int,
    num_draft_tokens: int | SymInt,
    tree_mask_mode: int,
) -> None:
    check(topk >= 1, "topk", ">= 1", topk)
    check(depth >= 1, "depth", ">= 1", depth)
    _check_common(seq_lens, tree_mask, num_draft_tokens, tree_mask_mode)
    bs, device = seq_lens.shape[0], tree_mask.device
    check_tensor("selected_index", selected_index, (bs, num_draft_tokens - 1), device)
    widths = parent_list.shape[1:] if depth == 1 else (topk * (depth - 1) + 1,)
    check_tensor("parent_list", parent_list, (bs, *widths), device)


def _check_parents(
    parents: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    num_draft_tokens: int | SymInt,
    tree_mask_mode: int,
) -> None:
    _check_common(seq_lens, tree_mask, num_draft_tokens, tree_mask_mode)
    check_tensor("parents", parents, (seq_lens.shape[0], num_draft_tokens), tree_mask.device)


def _check_common(
    seq_lens: Tensor, tree_mask: Tensor, num_draft_tokens: int | SymInt, tree_mask_mode: int
) -> None:
    tree_mode(tree_mask_mode)
    check(num_draft_tokens >= 1, "num_draft_tokens", ">= 1", num_draft_tokens)
    check(num_draft_tokens <= 1024, "num_draft_tokens", "<= 1024", num_draft_tokens)
    if seq_lens.dim() != 1:
        raise ValueError(f"seq_lens must be 1-D, got shape {tuple(seq_lens.shape)}")
    check_tensor("seq_lens", seq_lens, (seq_lens.shape[0],), tree_mask.device)
    check_mask(tree_mask, tree_mask_mode, seq_lens.shape[0], num_draft_tokens)


def _fake_tree(seq_lens: Tensor, num_draft_tokens: int | SymInt) -> Outputs:
    """Four int64 tensors on the device of `seq_lens`: (B * n,) and three of (B, n)."""
    bs, n = seq_lens.shape[0], num_draft_tokens
    links = [seq_lens.new_empty((bs, n)) for _ in range(3)]
    return seq_lens.new_empty(bs * n), links[0], links[1], links[2]


def _build_fake(
    parent_list: Tensor,
    selected_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    topk: int,
    depth: int,
    num_draft_tokens: int | SymInt,
    tree_mask_mode: int,
    fill_prefix: bool = True,  # noqa: ARG001
) -> Outputs:
    _check_build(
        parent_list, selected_index, seq_lens, tree_mask, topk, depth, num_draft_tokens,
        tree_mask_mode,
    )  # fmt: skip
    return _fake_tree(seq_lens, num_draft_tokens)


def _parents_fake(
    parents: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    num_draft_tokens: int | SymInt,
    tree_mask_mode: int,
    fill_prefix: bool = True,  # noqa: ARG001
) -> Outputs:
    _check_parents(parents, seq_lens, tree_mask, num_draft_tokens, tree_mask_mode)
    return _fake_tree(seq_lens, num_draft_tokens)


def _build_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    topk: int,
    depth: int,
    num_draft_tokens: int,
    tree_mask_mode: int,
    fill_prefix: bool = True,
) -> Outputs:
    from torchvm.ops.kernels import cpu_tree

    _check_build(
        parent_list, selected_index, seq_lens, tree_mask, topk, depth, num_draft_tokens,
        tree_mask_mode,
    )  # fmt: skip
    return cpu_tree.build_tree(
        parent_list.contiguous(), selected_index.contiguous(), seq_lens.contiguous(), tree_mask,
        topk, depth, num_draft_tokens, tree_mask_mode, fill_prefix,
    )  # fmt: skip


def _parents_cpu(
    parents: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    num_draft_tokens: int,
    tree_mask_mode: int,
    fill_prefix: bool = True,
) -> Outputs:
    from torchvm.ops.kernels import cpu_tree

    _check_parents(parents, seq_lens, tree_mask, num_draft_tokens, tree_mask_mode)
    return cpu_tree.build_tree_from_parents(
        parents.contiguous(), seq_lens.contiguous(), tree_mask, num_draft_tokens,
        tree_mask_mode, fill_prefix,
    )  # fmt: skip


def _no_cuda(*args: object, **kwargs: object) -> Outputs:
    raise NotImplementedError("tree builds have no CUDA kernel: give them CPU tensors")


_BUILD = register_op(
    _BUILD_SCHEMA, fake=_build_fake, kernels={"CPU": _build_cpu, "CUDA": _no_cuda}
)
_PARENTS = register_op(
    _PARENTS_SCHEMA, fake=_parents_fake, kernels={"CPU": _parents_cpu, "CUDA": _no_cuda}
)


def _lengths(seq_lens: Tensor) -> Tensor:
    return seq_lens.to(torch.int64) if seq_lens.dtype == torch.int32 else seq_lens


def build_tree(
    parent_list: Tensor,
    selected_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    *,
    topk: int,
    depth: int,
    num_draft_tokens: int,
    tree_mask_mode: int,
    fill_prefix: bool = True,
) -> DraftTree:
    """Lay out the tree that a draft's beam search selected; `tree_mask` is written in place.

    Node 0 is the root; node j + 1 is the candidate `selected_index[b, j]`. The parent of flat id
    f is the root when `f // topk` is 0, else the node that holds `parent_list[b, f // topk]`.

    Args:
        parent_list: (B, topk * (depth - 1) + 1) int64 flat ids; any width at depth 1.
        selected_index: (B, n - 1) int64 flat ids, ascending in each row.
        seq_lens: (B,) int64 or int32, committed tokens of each request.
        tree_mask: 1-D mask of at least `live_mask_numel` elements; only the cells of this batch
            are written.
        topk: children each beam proposes.
        depth: draft steps.
        num_draft_tokens: n, root included, 1 to 1,024.
        tree_mask_mode: a `TreeMaskMode`.
        fill_prefix: whether FULL_MASK's prefix columns are written; they are ones.

    Raises:
        ValueError: for a wrong shape, size or mode, or a mask that is too small.
        TypeError: for a wrong dtype.
    """
    outputs = _BUILD(
        parent_list, selected_index, _lengths(seq_lens), tree_mask, topk, depth,
        num_draft_tokens, tree_mask_mode, fill_prefix,
    )  # fmt: skip
    return DraftTree(*outputs)


def build_tree_from_parents(
    parents: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    *,
    num_draft_tokens: int,
    tree_mask_mode: int,
    fill_prefix: bool = True,
) -> DraftTree:
    """Lay out trees given as parents; `tree_mask` is written in place.

    Args:
        parents: (B, n) int64, the node index of each node's parent. Column 0 is ignored; a value
            outside [0, own index) means that the node hangs on nobody.
        seq_lens: (B,) int64 or int32, committed tokens of each request.
        tree_mask: as in `build_tree`.
        num_draft_tokens: n, root included, 1 to 1,024.
        tree_mask_mode: a `TreeMaskMode`.
        fill_prefix: whether FULL_MASK's prefix columns are written; they are ones.

    Raises:
        ValueError: for a wrong shape, size or mode, or a mask that is too small.
        TypeError: for a wrong dtype.
    """
    outputs = _PARENTS(
        parents, _lengths(seq_lens), tree_mask, num_draft_tokens, tree_mask_mode, fill_prefix
    )
    return DraftTree(*outputs)
