"""Drafts without a draft model: what followed earlier occurrences of the last tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from torchvm.engine.drafts import Draft

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["PromptLookupDrafter"]

_NOTHING = Draft((), ())
# Common tokens match thousands of times, and later matches add little.
_MATCHES_PER_NODE = 4


class PromptLookupDrafter:
    """Merge continuations of earlier matches of the last tokens into a tree.

    Matches are tried longest first and, among equals, latest first. The best one gives a path of
    `depth` tokens and each further one the tokens that the tree still lacks, until it is full.

    Args:
        topk: most children of a node; 1 drafts a chain.
        depth: most tokens below the root on a path.
        num_draft_tokens: n, the most nodes of a tree, root included.
        max_ngram: matches longer than this count as equally good.
    """

    def __init__(
        self, *, topk: int = 2, depth: int = 4, num_draft_tokens: int = 8, max_ngram: int = 8
    ) -> None:
        for name, value, least in (
            ("topk", topk, 1),
            ("depth", depth, 1),
            ("num_draft_tokens", num_draft_tokens, 2),
            ("max_ngram", max_ngram, 1),
        ):
            if value < least:
                raise ValueError(f"{name} must be >= {least}, got {value}")
        self.topk = topk
        self.depth = depth
        self.num_draft_tokens = num_draft_tokens
        self.max_ngram = max_ngram

    def propose(
        self, sequences: Sequence[Sequence[int]], active: Sequence[bool]
    ) -> Sequence[Draft]:
        """Return one draft per request; see `Drafter`."""
        return [
            self._draft(sequence) if on else _NOTHING
            for sequence, on in zip(sequences, active, strict=True)
        ]

    def _draft(self, sequence: Sequence[int]) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        children: list[dict[int, int]] = [{}]
        for end in self._matches(sequence):
            node = 0
            for token in _continuation(sequence, end, self.depth):
                known = children[node]
                if token not in known:
                    if len(known) == self.topk or len(children) == self.num_draft_tokens:
                        break
                    known[token] = len(children)
                    children.append({})
                    tokens.append(token)
                    parents.append(node)
                node = known[token]
            if len(children) == self.num_draft_tokens:
                break
        return Draft(tokens, parents)

    def _matches(self, sequence: Sequence[int]) -> Iterator[int]:
        """Earlier positions that end with the sequence's last tokens, best first."""
        array = np.asarray(sequence)
        last = len(array) - 1
        ends = np.flatnonzero(array[:last] == array[last])
        lengths = np.ones_like(ends)
        growing = np.arange(len(ends))
        for back in range(1, min(self.max_ngram, last + 1)):
            growing = growing[ends[growing] >= back]
            growing = growing[array[ends[growing] - back] == array[last - back]]
            if not len(growing):
                break
            lengths[growing] += 1
        best = np.lexsort((-ends, -lengths))[: _MATCHES_PER_NODE * self.num_draft_tokens]
        yield from ends[best].tolist()


def _continuation(sequence: Sequence[int], end: int, depth: int) -> Iterator[int]:
    """Tokens behind position `end`; past the sequence's own end they repeat with its period."""
    period = len(sequence) - 1 - end
    for step in range(depth):
        yield sequence[end + 1 + step % period]
