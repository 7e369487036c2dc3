"""Draft trees as token lists: what a drafter returns, and the batch that is verified."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["UNLINKED", "Draft", "Drafter", "HiddenDrafter", "pack_drafts"]

UNLINKED = -1
"""A parent that no node has: its node is linked to nobody and so never accepted."""


class Draft(NamedTuple):
    """A tree of proposed tokens below the last token of a request, which is node 0, the root."""

    tokens: Sequence[int]
    """Token of node 1, node 2, ...: at most n - 1 of them; fewer, or none, is fine."""
    parents: Sequence[int]
    """Node index of each one's parent, smaller than its own; -1 links it to nobody."""


class Drafter(Protocol):
    """Proposes trees; a draft model of your own is used through these three names."""

    num_draft_tokens: int
    """n, the most nodes of a tree, root included; the same for the whole run."""
    topk: int
    """Most children of a node. With 1 every draft is a chain and no mask is needed."""

    def propose(
        self, sequences: Sequence[Sequence[int]], active: Sequence[bool]
    ) -> Sequence[Draft]:
        """Return one draft per request.

        Args:
            sequences: prompt and tokens so far of every request of the batch, in its order; the
                last token is the root. They only ever grow, and must not be changed.
            active: whether the request still decodes. The draft of one that does not is ignored.
        """
        ...


@runtime_checkable
class HiddenDrafter(Drafter, Protocol):
    """A drafter that reads the target's states: those its head reads, after the final norm.

    The decoder calls `observe` with the states of every prompt, and after each step with those of
    the tokens that became committed. When `propose` is called, the states of all tokens of an
    active request but its last, the root, have been observed: none of a prompt of one token, which
    `propose` is the first to name.
    """

    hidden_size: int
    """Must be the target's."""

    def observe(
        self,
        hidden: Tensor,
        *,
        requests: Sequence[int],
        starts: Sequence[int],
        nodes: Sequence[Sequence[int]],
    ) -> None:
        """Take the states of committed tokens.

        Args:
            hidden: (R or more, n, hidden_size), in the target's dtype, on its device. It is the
                step's output, which the next step overwrites: copy what is to be kept.
            requests: whom each of the first R rows belongs to.
            starts: position in its request of each row's first token. A request that is observed
                from 0 begins anew.
            nodes: per row the places in n of the tokens at start, start + 1, ...; a row without
                any says nothing.
        """
        ...


def pack_drafts(
    drafts: Sequence[Draft],
    sequences: Sequence[Sequence[int]],
    active: Sequence[bool],
    *,
    num_draft_tokens: int,
    topk: int,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """Make the rows of a batch from drafts, filling each up with nodes that are linked to nobody.

    Args:
        drafts: one per request.
        sequences: tokens of each request; the last is its root.
        active: rows that are False are all padding.
        num_draft_tokens: n.
        topk: 1 requires every draft to be a chain.
        vocab_size: token ids must be smaller.

    Returns:
        tokens and parents, each (B, n) int64.

    Raises:
        ValueError: for a draft that is too long, or a token or parent out of range.
    """
    if len(drafts) != len(sequences):
        raise ValueError(
            f"drafts must be one per request, {len(sequences)} in all, got {len(drafts)}"
        )
    tokens, parents = [], []
    for b, (draft, sequence) in enumerate(zip(drafts, sequences, strict=True)):
        if active[b]:
            _check(draft, b, num_draft_tokens, topk, vocab_size)
        else:
            draft = Draft((), ())
        spare = num_draft_tokens - 1 - len(draft.tokens)
        tokens.append([sequence[-1], *draft.tokens, *[sequence[-1]] * spare])
        parents.append([UNLINKED, *draft.parents, *[UNLINKED] * spare])
    return torch.tensor(tokens), torch.tensor(parents)


def _check(draft: Draft, b: int, n: int, topk: int, vocab_size: int) -> None:
    tokens, parents = draft
    if len(tokens) != len(parents) or len(tokens) >= n:
        raise ValueError(
            f"draft {b} must have at most {n - 1} tokens and a parent for each, "
            f"got {len(tokens)} tokens and {len(parents)} parents"
        )
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True), start=1):
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"tokens of draft {b} must be in [0, {vocab_size}), got {token} at node {node}"
            )
        if not UNLINKED <= parent < node:
            raise ValueError(
                f"parents of draft {b} must be smaller than their node and at least -1, "
                f"got {parent} at node {node}"
            )
        if topk == 1 and parent != node - 1:
            raise ValueError(
                f"draft {b} must be a chain for a drafter with topk = 1, "
                f"got parent {parent} at node {node}"
            )
