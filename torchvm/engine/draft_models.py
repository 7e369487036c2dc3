"""Drafts of a model's scores: a beam of its most probable continuations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from torchvm.engine.draft_cache import DraftCache
from torchvm.engine.drafts import UNLINKED, Draft
from torchvm.engine.transformers_target import as_target
from torchvm.ops.candidates import select_draft_candidates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from torchvm.engine.draft_head import DraftHead
    from torchvm.engine.target import TargetModel
    from torchvm.ops.candidates import DraftCandidates

__all__ = ["BeamCache", "BeamDrafter", "ModelDrafter", "grow_chain", "grow_tree"]

_NOTHING = Draft((), ())


class BeamCache(Protocol):
    """What a beam reads with: the logits after tokens, behind what it has read before."""

    def catch_up(self, sequences: Sequence[Sequence[int]], active: Sequence[bool]) -> Tensor:
        """Read what active requests have more than before; (B, vocabulary) after their roots."""
        ...

    def follow(self, tokens: Tensor, depth: int) -> Tensor:
        """Read the tokens (B, 1) of chains at this depth; (B, vocabulary) after them."""
        ...

    def keep(self, chains: Sequence[Sequence[int]]) -> None:
        """Count what `follow` read as read, if that is what committed tokens would leave."""
        ...

    def branch(self, tokens: Tensor, parents: Tensor, count: int) -> Tensor:
        """Read trees (B, m) from their roots on; (B, count, vocabulary) after the last nodes."""
        ...


class BeamDrafter:
    """Draft the best nodes of a beam over what a cache reads.

    The tree grows level by level: the `topk` best nodes of a level, by the probability of all
    tokens from the root, are continued by their `topk` most probable tokens each. The n - 1 best
    of all nodes that were scored make the draft. Equal scores go to the earlier node, and equal
    logits to the smaller token.

    Args:
        model: scores tokens.
        topk: continuations of a node, and nodes of a level that are continued; 1 drafts a chain.
        depth: levels below the root.
        num_draft_tokens: n, the most nodes of a tree, root included.
        batch_size: B, requests of every batch.
        max_context_len: most tokens of a request.
        vocab_size: of the model that verifies, to check that both have the same.

    Raises:
        ValueError: for a size below its least, more nodes than are scored, or a context or
            vocabulary that is not the model's.
    """

    _cache: BeamCache

    def __init__(
        self,
        model: TargetModel | DraftHead,
        *,
        topk: int,
        depth: int,
        num_draft_tokens: int | None,
        batch_size: int,
        max_context_len: int,
        vocab_size: int | None,
    ) -> None:
        if num_draft_tokens is None:
            num_draft_tokens = min(8, _scored(topk, depth) + 1)
        _check_sizes(topk, depth, num_draft_tokens, batch_size)
        _check_model(model, topk, max_context_len, vocab_size)
        self.topk = topk
        self.depth = depth
        self.num_draft_tokens = num_draft_tokens
        self.batch_size = batch_size
        self.max_context_len = max_context_len
        self._attending = model.attending

    def propose(
        self, sequences: Sequence[Sequence[int]], active: Sequence[bool]
    ) -> Sequence[Draft]:
        """Return one draft per request; see `torchvm.engine.Drafter`.

        Raises:
            ValueError: when there are not `batch_size` sequences, or one has no tokens or more
                than `max_context_len`.
        """
        self._check(sequences)
        if not any(active):
            return [_NOTHING] * self.batch_size
        with torch.inference_mode(), self._attending():
            logits = self._cache.catch_up(sequences, active)
            if self.topk == 1:
                steps = min(self.depth, self.num_draft_tokens - 1)
                drafts = grow_chain(self._cache, logits, steps)
            else:
                roots = torch.tensor([row[-1:] for row in sequences], device=logits.device)
                drafts = grow_tree(
                    self._cache, logits, roots,
                    topk=self.topk, depth=self.depth, num_draft_tokens=self.num_draft_tokens,
                )  # fmt: skip
        return [draft if on else _NOTHING for draft, on in zip(drafts, active, strict=True)]

    def _check(self, sequences: Sequence[Sequence[int]]) -> None:
        if len(sequences) != self.batch_size:
            raise ValueError(f"sequences must be {self.batch_size}, got {len(sequences)}")
        for b, row in enumerate(sequences):
            if not 1 <= len(row) <= self.max_context_len:
                raise ValueError(
                    f"sequence {b} must have 1 to {self.max_context_len} tokens, got {len(row)}"
                )


class ModelDrafter(BeamDrafter):
    """Draft what a second model of the same vocabulary would say; see `BeamDrafter`.

    The model keeps a cache of its own, reads each committed token once, and runs eagerly. A
    level costs one forward: of one token where `topk` is 1, else of the frontiers of all levels
    before.

    Args:
        model: a Llama-like causal LM of transformers in eval mode, or any `TargetModel` with
            grouped-query layers; where `topk` is 1, any without recurrent ones.
        topk: see `BeamDrafter`, like all that follow.
        depth: levels below the root.
        num_draft_tokens: n, root included; by default 8, or as many as are scored if fewer.
        batch_size: B.
        max_context_len: most tokens of a request.
        vocab_size: of the model that verifies.

    Raises:
        ValueError: as `BeamDrafter`, and for a model that cannot draft such trees.
    """

    def __init__(
        self,
        model: PreTrainedModel | TargetModel,
        *,
        topk: int = 2,
        depth: int = 4,
        num_draft_tokens: int | None = None,
        batch_size: int,
        max_context_len: int,
        vocab_size: int | None = None,
    ) -> None:
        self.model = as_target(model)
        super().__init__(
            self.model,
            topk=topk,
            depth=depth,
            num_draft_tokens=num_draft_tokens,
            batch_size=batch_size,
            max_context_len=max_context_len,
            vocab_size=vocab_size,
        )
        self._cache = DraftCache(
            self.model,
            topk=topk,
            batch_size=batch_size,
            max_context_len=max_context_len,
            num_tokens=1 + topk * (depth - 1),
        )


def grow_chain(cache: BeamCache, logits: Tensor, steps: int) -> list[Draft]:
    """Draft the most probable token after the most probable token.

    There is nothing to choose among: a chain scores, ranks and gathers nothing.

    Args:
        cache: has caught up.
        logits: (B, vocabulary) after the roots.
        steps: tokens to draft, at least 1.
    """
    tokens = [logits.argmax(-1, keepdim=True)]
    for depth in range(1, steps):
        tokens.append(cache.follow(tokens[-1], depth).argmax(-1, keepdim=True))
    chains = torch.cat(tokens, 1).tolist()
    cache.keep([chain[:-1] for chain in chains])
    return [Draft(chain, range(steps)) for chain in chains]


def grow_tree(
    cache: BeamCache,
    logits: Tensor,
    roots: Tensor,
    *,
    topk: int,
    depth: int,
    num_draft_tokens: int,
) -> list[Draft]:
    """Draft the best nodes of a beam.

    Args:
        cache: has caught up.
        logits: (B, vocabulary) after the roots.
        roots: (B, 1) int64, the last token of each sequence.
        topk: continuations of a node, and nodes of a level that are continued.
        depth: levels below the root.
        num_draft_tokens: n, root included.
    """
    frontier, children = _most_probable(logits, topk)
    scores, tokens = [frontier.unsqueeze(1)], [children]
    ids = [torch.arange(-1, topk, device=roots.device).repeat(roots.shape[0], 1)]
    # The frontiers, one behind the other, as the tree that the model reads.
    read, parents = [roots, children], [torch.zeros_like(roots), torch.zeros_like(children)]
    for level in range(1, depth):
        logits = cache.branch(torch.cat(read, 1), torch.cat(parents, 1), topk)
        values, children = _most_probable(logits, topk)
        scores.append(frontier.unsqueeze(2) + values)
        tokens.append(children.flatten(1))
        frontier, best = _largest(scores[-1].flatten(1), topk)
        ids.append(best + topk + topk * topk * (level - 1))
        read.append(tokens[-1].gather(1, best))
        parents.append(best // topk + 1 + topk * (level - 1))
    found = select_draft_candidates(scores, tokens, ids, num_draft_tokens=num_draft_tokens)
    return _drafts(found, topk)


def _most_probable(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities float32 and tokens of (..., vocabulary), each (..., count)."""
    logits = logits.float()
    values, tokens = _largest(logits, count)
    # Rounding must not let a child outrank its parent.
    return (values - logits.logsumexp(-1, keepdim=True)).clamp(max=0), tokens


def _largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Values and places of the largest in the last dimension, in order, the first among equals.

    `torch.topk` leaves open which of equals it takes, and sorting a vocabulary costs more.
    """
    rest, places = scores.clone(), []
    for _ in range(count):
        places.append(rest.argmax(-1, keepdim=True))
        rest.scatter_(-1, places[-1], -torch.inf)
    place = torch.cat(places, -1)
    return scores.gather(-1, place), place


def _drafts(found: DraftCandidates, topk: int) -> list[Draft]:
    """Make node indices of candidates' ids."""
    rows = (found.parent_list.tolist(), found.selected_index.tolist(), found.draft_tokens.tolist())
    drafts = []
    for parent_ids, ids, tokens in zip(*rows, strict=True):
        nodes = {candidate: node for node, candidate in enumerate(ids, start=1)}
        parents = [
            nodes.get(parent_ids[candidate // topk], UNLINKED) if candidate >= topk else 0
            for candidate in ids
        ]
        drafts.append(Draft(tokens, parents))
    return drafts


def _scored(topk: int, depth: int) -> int:
    """Nodes that a beam scores."""
    return topk + (depth - 1) * topk * topk


def _check_sizes(topk: int, depth: int, num_draft_tokens: int, batch_size: int) -> None:
    for name, value, least in (
        ("topk", topk, 1),
        ("depth", depth, 1),
        ("num_draft_tokens", num_draft_tokens, 2),
        ("batch_size", batch_size, 1),
    ):
        if value < least:
            raise ValueError(f"{name} must be >= {least}, got {value}")
    scored = _scored(topk, depth)
    if num_draft_tokens > scored + 1:
        raise ValueError(
            f"num_draft_tokens must be <= {scored + 1}, the root and all nodes that depth {depth} "
            f"and topk {topk} score, got {num_draft_tokens}"
        )


def _check_model(
    model: TargetModel | DraftHead, topk: int, max_context_len: int, vocab_size: int | None
) -> None:
    if vocab_size is not None and model.vocab_size != vocab_size:
        raise ValueError(
            f"model must have the vocabulary of the one that verifies, {vocab_size} tokens, "
            f"got {model.vocab_size}"
        )
    if topk > model.vocab_size:
        raise ValueError(
            f"topk must be at most the model's vocabulary of {model.vocab_size}, got {topk}"
        )
    if not 1 <= max_context_len <= model.max_position_embeddings:
        raise ValueError(
            f"max_context_len must be 1 to the model's {model.max_position_embeddings}, "
            f"got {max_context_len}"
        )
