"""Drafts of a head on the target's states."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchvm.engine.draft_head import HeadCache
from torchvm.engine.draft_models import BeamDrafter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from torchvm.engine.draft_head import DraftHead
    from torchvm.engine.drafts import Draft

__all__ = ["HeadDrafter"]


class HeadDrafter(BeamDrafter):
    """Draft what a head predicts from the target's states of committed tokens.

    A `HiddenDrafter`: the decoder hands the states over, and they are kept by position, beside
    the head's own caches. The head runs eagerly and reads each committed token once. A level costs
    one forward: of one token where `topk` is 1 and the head has one level, else of all above it.
    States take batch_size * capacity * hidden_size elements of the head's dtype for each of its
    levels, where the capacity is `max_context_len` and the nodes of a draft.

    A request that is not longer than the head has levels drafts nothing, since an entry needs a
    state before it.

    Args:
        head: an `EagleHead`, or any `DraftHead`.
        topk: see `BeamDrafter`, like all that follow; more than 1 needs grouped-query layers.
        depth: levels below the root; at most the head's, where it has more than one.
        num_draft_tokens: n, root included; by default 8, or as many as are scored if fewer.
        batch_size: B.
        max_context_len: most tokens of a request.
        vocab_size: of the model that verifies.

    Raises:
        ValueError: as `BeamDrafter`, and for a head that cannot draft such trees.
    """

    def __init__(
        self,
        head: DraftHead,
        *,
        topk: int = 2,
        depth: int = 4,
        num_draft_tokens: int | None = None,
        batch_size: int,
        max_context_len: int,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__(
            head,
            topk=topk,
            depth=depth,
            num_draft_tokens=num_draft_tokens,
            batch_size=batch_size,
            max_context_len=max_context_len,
            vocab_size=vocab_size,
        )
        if head.num_levels != 1 and depth > head.num_levels:
            raise ValueError(
                f"depth must be at most the head's {head.num_levels} levels, got {depth}"
            )
        self.head = head
        self.hidden_size = head.hidden_size
        self._cache: HeadCache = HeadCache(
            head, topk=topk, depth=depth, batch_size=batch_size, max_context_len=max_context_len
        )
        self._num_levels = min(head.num_levels, depth)
        self._num_states = [0] * batch_size
        # What was drafted for last, which a request only ever grows from.
        self._tokens: list[list[int]] = [[] for _ in range(batch_size)]

    def observe(
        self,
        hidden: Tensor,
        *,
        requests: Sequence[int],
        starts: Sequence[int],
        nodes: Sequence[Sequence[int]],
    ) -> None:
        """Copy the states of committed tokens; see `torchvm.engine.HiddenDrafter`.

        Raises:
            ValueError: for states of another size, a request out of range or named twice, places
                outside of `hidden`, and states that do not follow those that have been observed.
        """
        self._check_observed(hidden, requests, starts, nodes)
        places_of: list[tuple[int, int, int, int]] = []
        for row, (b, start, places) in enumerate(zip(requests, starts, nodes, strict=True)):
            if places and start == 0:
                self._begin(b)
            self._num_states[b] += len(places)
            places_of += [(row, place, b, start + i) for i, place in enumerate(places)]
        if places_of:
            states = self._cache.states
            row_of, place_of, slots, positions = torch.tensor(places_of, device=hidden.device).T
            with torch.inference_mode():
                states[slots, positions] = hidden[row_of, place_of].to(states.dtype)

    def propose(
        self, sequences: Sequence[Sequence[int]], active: Sequence[bool]
    ) -> Sequence[Draft]:
        """Return one draft per request; see `torchvm.engine.Drafter`.

        Requests that rest keep their states.

        Raises:
            ValueError: as `BeamDrafter`, and when the states of an active request are missing,
                or those of other tokens.
        """
        self._check(sequences)
        for b, (row, on) in enumerate(zip(sequences, active, strict=True)):
            if on:
                self._check_states(b, row)
                self._tokens[b] = list(row)
        long = [
            on and len(row) > self._num_levels for row, on in zip(sequences, active, strict=True)
        ]
        return super().propose(sequences, long)

    def _begin(self, b: int) -> None:
        """Forget a request."""
        self._num_states[b] = 0
        self._tokens[b].clear()
        self._cache.forget(b)

    def _check_states(self, b: int, row: Sequence[int]) -> None:
        needed, known = len(row) - 1, self._tokens[b]
        if needed == 0:
            self._begin(b)
        elif self._num_states[b] != needed:
            raise ValueError(
                f"states of request {b} must be observed for its {needed} tokens before the last, "
                f"got {self._num_states[b]}"
            )
        elif list(row[: len(known)]) != known:
            raise ValueError(
                f"sequence {b} must begin with the {len(known)} tokens that were drafted for "
                "last, got others: observe the states of another run from 0"
            )

    def _check_observed(
        self,
        hidden: Tensor,
        requests: Sequence[int],
        starts: Sequence[int],
        nodes: Sequence[Sequence[int]],
    ) -> None:
        if hidden.dim() != 3 or hidden.shape[2] != self.hidden_size:
            raise ValueError(
                f"hidden must be (rows, n, {self.hidden_size}), got {list(hidden.shape)}"
            )
        counts = len(requests), len(starts), len(nodes)
        if len(set(counts)) != 1 or counts[0] > hidden.shape[0]:
            raise ValueError(
                f"requests, starts and nodes must be one per row of at most {hidden.shape[0]}, "
                f"got {counts}"
            )
        if len(set(requests)) != len(requests):
            raise ValueError(f"requests must be different ones, got {list(requests)}")
        capacity = self._cache.states.shape[1]
        for b, start, places in zip(requests, starts, nodes, strict=True):
            if not 0 <= b < self.batch_size:
                raise ValueError(f"requests must be in [0, {self.batch_size}), got {b}")
            if places and start not in (0, self._num_states[b]):
                raise ValueError(
                    f"states of request {b} must begin at 0, or at {self._num_states[b]} behind "
                    f"those that were observed, got {start}"
                )
            if start + len(places) > capacity or any(
                not 0 <= place < hidden.shape[1] for place in places
            ):
                raise ValueError(
                    f"nodes of request {b} must be in [0, {hidden.shape[1]}) and end before "
                    f"position {capacity}, got {list(places)} from {start}"
                )
