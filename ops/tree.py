"""torchvm::build_tree and torchvm::build_tree_from_parents: draft trees laid out for a verify."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torchvm.ops.checks import check_mask, check_tensor, int64, require
from torchvm.ops.kernels import cpu_tree
from torchvm.ops.library import register_op

if TYPE_CHECKING:
    from torch import SymInt, Tensor

__all__ = ["DraftTree", "build_tree", "build_tree_from_parents"]

_RETURNS = (
    "(Tensor positions, Tensor retrieve_index, Tensor retrieve_next_token, "
    "Tensor retrieve_next_sibling)"
)
_SCHEMA = (
    "build_tree(Tensor parent_list, Tensor selected_index, Tensor seq_lens, Tensor(a!) tree_mask, "
    "int topk, int depth, SymInt num_draft_tokens, int tree_mask_mode, bool fill_prefix=True) "
    f"-> {_RETURNS}"
)
_PARENTS_SCHEMA = (
    "build_tree_from_parents(Tensor parents, Tensor seq_lens, Tensor(a!) tree_mask, "
    f"SymInt num_draft_tokens, int tree_mask_mode, bool fill_prefix=True) -> {_RETURNS}"
)


class DraftTree(NamedTuple):
    """Where each of the n nodes of B trees stands; -1 where there is no such node."""

    positions: Tensor
    """(B * n,) int64, position of each node in its sequence: seq_lens + depth, the root's 0."""
    retrieve_index: Tensor
    """(B, n) int64, the node's place among all B * n."""
    retrieve_next_token: Tensor
    """(B, n) int64, the node's first child by node index."""
    retrieve_next_sibling: Tensor
    """(B, n) int64, the next child of the node's parent by node index."""


def _check(
    parent_list: Tensor,
    selected_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    topk: int,
    depth: int,
    num_draft_tokens: int | SymInt,
    tree_mask_mode: int,
) -> None:
    """Check all that needs no data."""
    if topk < 1:
        raise ValueError(f"topk must be >= 1, got {topk}")
    if depth < 1:
        raise ValueError(f"depth must be >= 1, got {depth}")
    _check_batch(seq_lens, tree_mask, num_draft_tokens, tree_mask_mode)
    device, batch = seq_lens.device, seq_lens.shape[0]
    width = topk * (depth - 1) + 1 if depth > 1 else parent_list.shape[-1]
    check_tensor("parent_list", parent_list, device, batch, width)
    check_tensor("selected_index", selected_index, device, batch, num_draft_tokens - 1)


def _check_batch(
    seq_lens: Tensor, tree_mask: Tensor, num_draft_tokens: int | SymInt, tree_mask_mode: int
) -> None:
    require(
        num_draft_tokens >= 1, lambda: f"num_draft_tokens must be >= 1, got {num_draft_tokens}"
    )
    device, batch = seq_lens.device, seq_lens.numel()
    check_tensor("seq_lens", seq_lens, device, batch)
    check_mask(tree_mask, tree_mask_mode, batch, num_draft_tokens, device=device)


def _check_parents(
    parents: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    num_draft_tokens: int | SymInt,
    tree_mask_mode: int,
) -> None:
    """Check all that needs no data."""
    _check_batch(seq_lens, tree_mask, num_draft_tokens, tree_mask_mode)
    check_tensor("parents", parents, seq_lens.device, seq_lens.shape[0], num_draft_tokens)


def _empty_tree(seq_lens: Tensor, n: int | SymInt) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Contiguous int64 on the device of `seq_lens`: (B * n,), then (B, n) three times."""
    batch = seq_lens.shape[0]
    index, token, sibling = (seq_lens.new_empty(batch, n) for _ in range(3))
    return seq_lens.new_empty(batch * n), index, token, sibling


def _fake(
    parent_list: Tensor,
    selected_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    topk: int,
    depth: int,
    num_draft_tokens: int | SymInt,
    tree_mask_mode: int,
    fill_prefix: bool = True,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(
        parent_list, selected_index, seq_lens, tree_mask, topk, depth, num_draft_tokens,
        tree_mask_mode,
    )  # fmt: skip
    return _empty_tree(seq_lens, num_draft_tokens)


def _fake_from_parents(
    parents: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    num_draft_tokens: int | SymInt,
    tree_mask_mode: int,
    fill_prefix: bool = True,  # noqa: ARG001
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_parents(parents, seq_lens, tree_mask, num_draft_tokens, tree_mask_mode)
    return _empty_tree(seq_lens, num_draft_tokens)


def _cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    topk: int,
    depth: int,
    num_draft_tokens: int,
    tree_mask_mode: int,
    fill_prefix: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(
        parent_list, selected_index, seq_lens, tree_mask, topk, depth, num_draft_tokens,
        tree_mask_mode,
    )  # fmt: skip
    return cpu_tree.build_tree(
        parent_list, selected_index, seq_lens, tree_mask, topk, depth, num_draft_tokens,
        tree_mask_mode, fill_prefix,
    )  # fmt: skip


def _cpu_from_parents(
    parents: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    num_draft_tokens: int,
    tree_mask_mode: int,
    fill_prefix: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_parents(parents, seq_lens, tree_mask, num_draft_tokens, tree_mask_mode)
    return cpu_tree.build_tree_from_parents(
        parents, seq_lens, tree_mask, num_draft_tokens, tree_mask_mode, fill_prefix
    )


def _cuda(
    parent_list: Tensor,
    selected_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    topk: int,
    depth: int,
    num_draft_tokens: int,
    tree_mask_mode: int,
    fill_prefix: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from torchvm.ops.kernels import triton_tree

    _check(
        parent_list, selected_index, seq_lens, tree_mask, topk, depth, num_draft_tokens,
        tree_mask_mode,
    )  # fmt: skip
    return triton_tree.build_tree(
        parent_list, selected_index, seq_lens, tree_mask, topk, depth, num_draft_tokens,
        tree_mask_mode, fill_prefix,
    )  # fmt: skip


def _cuda_from_parents(
    parents: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    num_draft_tokens: int,
    tree_mask_mode: int,
    fill_prefix: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from torchvm.ops.kernels import triton_tree

    _check_parents(parents, seq_lens, tree_mask, num_draft_tokens, tree_mask_mode)
    return triton_tree.build_tree_from_parents(
        parents, seq_lens, tree_mask, num_draft_tokens, tree_mask_mode, fill_prefix
    )


_OP = register_op(_SCHEMA, fake=_fake, kernels={"CPU": _cpu, "CUDA": _cuda})
_PARENTS_OP = register_op(
    _PARENTS_SCHEMA,
    fake=_fake_from_parents,
    kernels={"CPU": _cpu_from_parents, "CUDA": _cuda_from_parents},
)


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
    """Lay out the draft tree of each request for one verify forward.

    Node 0 of a request is its root and node j + 1 the candidate `selected_index[b, j]`. With
    q = candidate // topk, the node's parent is the root where q is 0 and otherwise the node that
    holds candidate `parent_list[b, q]`. A node attends the root, its ancestors and itself.

    A parent is found when its candidate is >= 0, q is inside the row and a node with a smaller
    index holds it. Where it is not, the node is linked to nobody and attends the root and itself;
    its position is what its mask row says. A walk to the root takes min(depth, n) steps at most.

    Args:
        parent_list: (B, topk * (depth - 1) + 1) int64, candidate of each beam of all levels but
            the last, first entry unused; any width at depth 1, where it is not read.
        selected_index: (B, n - 1) int64, candidates in strictly ascending order. A row that is
            not makes the result of that request unspecified, and no other's.
        seq_lens: (B,) int64 (int32 is converted), committed length L of each request, draft
            tokens not counted.
        tree_mask: 1-D contiguous bool or uint8 (uint8 when packed), written in place: the cells
            of this batch in the layout `tree_mask_mode`, none past them.
        topk: candidates that a beam proposes, k.
        depth: draft steps, D.
        num_draft_tokens: n, root included.
        tree_mask_mode: a `TreeMaskMode`.
        fill_prefix: write ones to the L prefix columns of FULL_MASK, else leave them untouched.

    Returns:
        positions (B * n,), retrieve_index, retrieve_next_token, retrieve_next_sibling (B, n), all
        int64, -1 where there is no child or sibling.

    Raises:
        ValueError: for a shape, dtype or size that does not fit, on the CPU also where a length
            is negative or the buffer is too small for these lengths. Nothing is written then.

    Example:
        A child of the root, candidate 0, and a child of that, candidate 2:

        >>> import torch, torchvm
        >>> mask = torch.zeros(9, dtype=torch.bool)
        >>> tree = torchvm.build_tree(
        ...     torch.tensor([[-1, 0, 1]]), torch.tensor([[0, 2]]), torch.tensor([5]), mask,
        ...     topk=2, depth=2, num_draft_tokens=3, tree_mask_mode=torchvm.TreeMaskMode.QLEN_ONLY,
        ... )
        >>> tree.positions.tolist()
        [5, 6, 7]
    """
    return DraftTree(
        *_OP(
            parent_list, selected_index, int64(seq_lens), tree_mask, topk, depth,
            num_draft_tokens, int(tree_mask_mode), fill_prefix,
        )
    )  # fmt: skip


def build_tree_from_parents(
    parents: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    *,
    num_draft_tokens: int,
    tree_mask_mode: int,
    fill_prefix: bool = True,
) -> DraftTree:
    """Lay out draft trees that are given by the parent of each node.

    Args:
        parents: (B, n) int64, the node that each node hangs from. Column 0 is ignored; a parent
            outside [0, own index) is not found, with the consequences that `build_tree` names.
        seq_lens: as in `build_tree`, like all that follow.
        tree_mask: 1-D contiguous bool or uint8, written in place.
        num_draft_tokens: n, root included.
        tree_mask_mode: a `TreeMaskMode`.
        fill_prefix: write FULL_MASK's prefix columns.

    Returns:
        The same as `build_tree`.

    Raises:
        ValueError: as `build_tree`.

    Example:
        A root with two children, the first of which has one of its own:

        >>> import torch, torchvm
        >>> mask = torch.zeros(16, dtype=torch.bool)
        >>> tree = torchvm.build_tree_from_parents(
        ...     torch.tensor([[-1, 0, 0, 1]]), torch.tensor([5]), mask,
        ...     num_draft_tokens=4, tree_mask_mode=torchvm.TreeMaskMode.QLEN_ONLY,
        ... )
        >>> mask.view(4, 4).int()
        tensor([[1, 0, 0, 0],
                [1, 1, 0, 0],
                [1, 0, 1, 0],
                [1, 1, 0, 1]], dtype=torch.int32)
        >>> tree.positions.tolist(), tree.retrieve_next_token.tolist()
        ([5, 6, 6, 7], [[1, 3, -1, -1]])
        >>> tree.retrieve_next_sibling.tolist()
        [[-1, 2, -1, -1]]
    """
    return DraftTree(
        *_PARENTS_OP(
            parents, int64(seq_lens), tree_mask, num_draft_tokens, int(tree_mask_mode), fill_prefix
        )
    )
