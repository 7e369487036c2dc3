"""Draft heads: what predicts tokens from a target's states, and its caches of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from torchvm.engine.draft_cache import DraftCache

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from torchvm.backends.base import AttentionBackend
    from torchvm.backends.layers import LayerKind
    from torchvm.engine.target import TargetCache

__all__ = ["DraftHead", "HeadCache"]


class DraftHead(Protocol):
    """Predicts from the target's states; a head of your own is used through these names.

    A request has tokens t[0], t[1], ... and the target's states h[0], h[1], ... of them. Entry i
    of level 1 is the head's output on (h[i], t[i + 1]), from which it predicts t[i + 2]. It
    attends to the entries before it, which the head keeps in a cache.

    With one level (EAGLE) the head continues on its own: below the root, a node's entry is the
    output on (its parent's entry, its token), and attends to its ancestors' and to all committed
    ones. With more (multi-token prediction), level d has weights and a cache of its own. Its
    entry i is the output on (entry i of level d - 1, t[i + d]), from which it predicts
    t[i + d + 1]: the tokens at depth d of a tree are level d's.
    """

    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    """Most tokens of a request."""
    num_levels: int
    """1, or the most levels of a tree."""
    layer_kinds: frozenset[LayerKind]
    device: torch.device
    dtype: torch.dtype
    """Of states."""

    def attending(self) -> AbstractContextManager[None]:
        """Let the layers attend through back ends inside the block."""
        ...

    def allocate(
        self, level: int, batch_size: int, max_context_len: int, num_tokens: int
    ) -> TargetCache:
        """Make the cache of a level, for `num_tokens` entries behind the committed ones."""
        ...

    def forward(
        self,
        level: int,
        cache: Any,
        hidden: Tensor,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        seq_lens: Tensor,
        backend: AttentionBackend,
        metadata: Any,
    ) -> Tensor:
        """Run a level over n entries per request.

        Args:
            level: 1 to `num_levels`.
            cache: of `allocate`; gets the entries.
            hidden: (B, n, hidden_size), states of the target or outputs of a level before.
            tokens: (B, n) int64.
            positions: (B, n) int64, which i each entry has.
            slots: (B,) int64, where each request lies in the cache.
            seq_lens: (B,) int64, where its entries begin there.
            backend: attends in every layer.
            metadata: what `backend.init_forward_metadata` made of this batch.

        Returns:
            (B, n, hidden_size).
        """
        ...

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Return (B, n, vocabulary) of outputs (B, n, hidden_size)."""
        ...


class HeadCache:
    """A head's caches of a batch, one for each level, and the states they are computed from.

    Committed entries are always those of the target's states: what was drafted is read again
    when it is accepted.

    Args:
        head: reads.
        topk: most children of a draft's node.
        depth: levels below the root.
        batch_size: B.
        max_context_len: most tokens of a request.
    """

    def __init__(
        self, head: DraftHead, *, topk: int, depth: int, batch_size: int, max_context_len: int
    ) -> None:
        self._head = head
        self._topk = topk
        count = min(depth, head.num_levels)
        self._levels = [_Level(head, level) for level in range(1, count + 1)]
        for level, following in zip(self._levels, self._levels[1:], strict=False):
            level.following = following
        self._caches = [
            DraftCache(
                level,
                topk=topk,
                batch_size=batch_size,
                max_context_len=max_context_len,
                num_tokens=1 + topk * (depth - 1),
            )
            for level in self._levels
        ]
        self._rows = torch.arange(batch_size, device=head.device).unsqueeze(1)
        # Tokens and outputs of the last forward, from the roots on.
        self._tokens = self._rows
        self._outputs = torch.empty(0, device=head.device)

    @property
    def states(self) -> Tensor:
        """(B, capacity, hidden_size), the target's, by position; written by who observes them."""
        return self._levels[0].states

    def forget(self, request: int) -> None:
        """Compute a request's entries anew at the next call."""
        for cache in self._caches:
            cache.forget(request)

    def catch_up(self, sequences: Sequence[Sequence[int]], active: Sequence[bool]) -> Tensor:
        """Read what each active request has more than at the last call.

        Args:
            sequences: B of them; those that are active longer than the head has levels.
            active: rows that are False read nothing, and forget what they have read.

        Returns:
            Logits (B, vocabulary) after the last token of each active request.
        """
        first, *_ = [
            cache.catch_up([row[level:] for row in sequences], active)
            for level, cache in enumerate(self._caches, start=1)
        ]
        self._tokens = torch.tensor([row[-1:] for row in sequences], device=first.device)
        return self._logits_after(first)

    def follow(self, tokens: Tensor, depth: int) -> Tensor:
        """Read one more token of each request's chain of drafts.

        Args:
            tokens: (B, 1) int64.
            depth: how far below the root they stand.

        Returns:
            Logits (B, vocabulary) after them.
        """
        if len(self._levels) == 1:
            self._levels[0].given = self._outputs
            outputs = self._caches[0].follow(tokens, depth)
        else:
            # Each level has left its outputs where the next one begins.
            self._tokens = torch.cat([self._tokens, tokens], 1)
            outputs = self._caches[depth].follow(self._tokens, 0)
        return self._logits_after(outputs)

    def keep(self, chains: Sequence[Sequence[int]]) -> None:
        """Do nothing: accepted drafts are read again, with the target's states."""

    def branch(self, tokens: Tensor, parents: Tensor, count: int) -> Tensor:
        """Read a tree whose node 0 is the root.

        Args:
            tokens: (B, m) int64; column 0 is the last token of each sequence.
            parents: (B, m) int64 node indices, of nodes that the last call read.
            count: how many of the last nodes are asked for.

        Returns:
            Their logits (B, count, vocabulary).
        """
        num_nodes = tokens.shape[1]
        depth = (num_nodes - 1) // self._topk if len(self._levels) > 1 else 0
        level, cache = self._levels[depth], self._caches[depth]
        roots = level.states[self._rows, cache.roots.unsqueeze(1)]
        places = parents[:, 1:, None].expand(-1, -1, roots.shape[-1])
        level.given = torch.cat([roots, self._outputs.gather(1, places)], 1)
        self._outputs = cache.branch(tokens, parents, num_nodes)
        return self._head.logits_of(self._outputs[:, -count:])

    def _logits_after(self, outputs: Tensor) -> Tensor:
        """(B, vocabulary) of outputs (B, hidden_size), which the next level begins from."""
        self._outputs = outputs.unsqueeze(1)
        return self._head.logits_of(self._outputs)[:, -1]


class _Level:
    """A level of a head as what reads tokens: their states lie in a buffer, as keys do."""

    states: Tensor
    """(B, capacity, hidden_size), by the place of an entry in the cache."""
    following: _Level | None = None
    """Whose states are this level's outputs."""
    given: Tensor | None = None
    """(B, n, hidden_size), what the next forward takes in place of the buffer's."""

    def __init__(self, head: DraftHead, level: int) -> None:
        self._head = head
        self._level = level
        self.layer_kinds = head.layer_kinds
        self.device = head.device

    def allocate(self, batch_size: int, max_context_len: int, num_tokens: int) -> TargetCache:
        head = self._head
        cache = head.allocate(self._level, batch_size, max_context_len, num_tokens)
        shape = (batch_size, cache.page_size, head.hidden_size)
        self.states = torch.zeros(shape, dtype=head.dtype, device=head.device)
        return cache

    def forward(
        self,
        cache: TargetCache,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        seq_lens: Tensor,
        backend: AttentionBackend,
        metadata: Any,
        *,
        logits: bool = True,  # noqa: ARG002 - there are none to be left out
    ) -> Tensor:
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        places = slots.unsqueeze(1), seq_lens.unsqueeze(1) + columns
        hidden, self.given = self.given, None
        if hidden is None:
            hidden = self.states[places]
        outputs = self._head.forward(
            self._level, cache, hidden, tokens, positions, slots, seq_lens, backend, metadata
        )
        if self.following is not None:
            self.following.states[places] = outputs
        return outputs
