"""What a draft model has read of a batch, and its forwards behind that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from torchvm.backends.base import AttentionBackend, VerifyBatch, VerifyConfig
from torchvm.backends.chain import CHAIN
from torchvm.backends.cpu import CPUBackend
from torchvm.backends.layers import LayerKind
from torchvm.ops.layout import TreeMaskMode
from torchvm.ops.mask import alloc_verify_mask
from torchvm.ops.tree import build_tree_from_parents

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from torchvm.engine.target import TargetCache

__all__ = ["DraftCache", "DraftReader"]

_PREFILL_TOKENS = 512
# So many tokens at most are read together with the root, whose forward computes logits.
_TAIL_TOKENS = 16
_MODE = TreeMaskMode.QLEN_ONLY


class DraftReader(Protocol):
    """What reads tokens: a `TargetModel`, or a level of a head.

    What it gives for a token, its output, has X numbers: logits, or states.
    """

    layer_kinds: frozenset[LayerKind]
    device: torch.device

    def allocate(self, batch_size: int, max_context_len: int, num_tokens: int) -> TargetCache:
        """As `torchvm.engine.target.TargetModel.allocate`."""
        ...

    def forward(
        self,
        cache: Any,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        seq_lens: Tensor,
        backend: AttentionBackend,
        metadata: Any,
        *,
        logits: bool = True,
    ) -> Tensor | None:
        """As `TargetModel.forward`; gives outputs (B, n, X), or None when `logits` is False."""
        ...


class DraftCache:
    """A draft model's cache of a batch, and the tokens that it was computed from.

    A request that shares a beginning with what its row has read keeps the entries of that
    beginning, so sequences may grow, shrink or be others at any call.

    Args:
        model: the draft model, or what else reads.
        topk: most children of a draft's node.
        batch_size: B.
        max_context_len: most tokens of a request.
        num_tokens: most tokens of a draft that stand in the cache at once, root included.

    Raises:
        ValueError: when a kind of layer of the model cannot be drafted with.
    """

    def __init__(
        self,
        model: DraftReader,
        *,
        topk: int,
        batch_size: int,
        max_context_len: int,
        num_tokens: int,
    ) -> None:
        sizes = VerifyConfig(
            num_draft_tokens=num_tokens,
            max_context_len=max_context_len,
            topk=topk,
            device=model.device,
            owns_mask=False,
        )
        self._backend = CPUBackend(sizes)
        # A state can be advanced but not set back to where a draft began.
        chains = CHAIN.layer_kinds - {LayerKind.recurrent}
        held = chains if topk == 1 else self._backend.layer_kinds
        if model.layer_kinds - held:
            raise ValueError(
                f"model must attend in {', '.join(sorted(held))} layers to draft with topk {topk},"
                f" got {', '.join(sorted(model.layer_kinds))}"
            )
        self._model = model
        self._cache = model.allocate(batch_size, max_context_len, num_tokens)
        self._read: list[list[int]] = [[] for _ in range(batch_size)]
        self.roots = torch.zeros(batch_size, dtype=torch.int64, device=model.device)
        """(B,), where the root of each request stands in the cache."""

    def catch_up(self, sequences: Sequence[Sequence[int]], active: Sequence[bool]) -> Tensor:
        """Read what each active request has more than at the last call.

        Args:
            sequences: B of them; those that are active of one token or more.
            active: rows that are False read nothing, and forget what they have read.

        Returns:
            Outputs (B, X) after the last token of each active request.
        """
        self._forget(sequences, active)
        lengths = [len(row) if on else 0 for row, on in zip(sequences, active, strict=True)]
        rows = [b for b, on in enumerate(active) if on]
        width = max((lengths[b] - len(self._read[b]) for b in rows), default=1)
        if width > min(_TAIL_TOKENS, *(lengths[b] for b in rows)):
            self._read_all_but_roots(sequences, lengths)
            width = 1
        # Rows end together, so that the last column is the root of each; one that is less far
        # behind computes its last entries again.
        blank = [0] * width
        tokens = self._tensor(
            [row[-width:] if n else blank for row, n in zip(sequences, lengths, strict=True)]
        )
        outputs = self._chain(tokens, self._tensor([max(n - width, 0) for n in lengths]))
        assert outputs is not None
        self.roots = self._tensor([max(n - 1, 0) for n in lengths])
        for b in rows:
            self._read[b] = list(sequences[b])
        return outputs[:, -1]

    def follow(self, tokens: Tensor, depth: int) -> Tensor:
        """Read more tokens of each request's chain of drafts.

        Args:
            tokens: (B, m) int64.
            depth: how far below the root the first stands; all above it have been read.

        Returns:
            Outputs (B, X) after the last.
        """
        outputs = self._chain(tokens, self.roots + depth)
        assert outputs is not None
        return outputs[:, -1]

    def keep(self, chains: Sequence[Sequence[int]]) -> None:
        """Count the tokens that `follow` read behind each sequence as read."""
        for read, chain in zip(self._read, chains, strict=True):
            if read:
                read.extend(chain)

    def forget(self, request: int) -> None:
        """Read a request from its beginning at the next call."""
        self._read[request].clear()

    def branch(self, tokens: Tensor, parents: Tensor, count: int) -> Tensor:
        """Read a tree whose node 0 is the root.

        Args:
            tokens: (B, m) int64; column 0, the last token of each sequence, is read again.
            parents: (B, m) int64 node indices.
            count: how many of the last nodes are asked for.

        Returns:
            Their outputs (B, count, X).
        """
        batch, num_nodes = tokens.shape
        mask = alloc_verify_mask(
            batch, num_nodes, self._backend.config.max_context_len, _MODE, device=tokens.device
        )
        tree = build_tree_from_parents(
            parents, self.roots, mask, num_draft_tokens=num_nodes, tree_mask_mode=_MODE
        )
        positions = tree.positions.view(tokens.shape)
        outputs = self._forward(tokens, positions, self.roots, self._backend, mask)
        assert outputs is not None
        return outputs[:, -count:]

    def _forget(self, sequences: Sequence[Sequence[int]], active: Sequence[bool]) -> None:
        """Leave of each row what its sequence begins with, its root excepted."""
        for b, (row, on) in enumerate(zip(sequences, active, strict=True)):
            shared = _shared(self._read[b], row) if on else 0
            del self._read[b][min(shared, max(len(row) - 1, 0)) :]

    def _read_all_but_roots(
        self, sequences: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> None:
        """Read in chunks, padded on the right: no padding outlives the tokens after it."""
        ends = [max(n - 1, 0) for n in lengths]
        while missing := max(end - len(read) for end, read in zip(ends, self._read, strict=True)):
            starts = [len(read) for read in self._read]
            width = min(missing, _PREFILL_TOKENS, self._cache.page_size - max(starts))
            chunks = [
                list(row[start : min(start + width, end)])
                for row, start, end in zip(sequences, starts, ends, strict=True)
            ]
            padded = self._tensor([chunk + [0] * (width - len(chunk)) for chunk in chunks])
            self._chain(padded, self._tensor(starts), logits=False)
            for read, chunk in zip(self._read, chunks, strict=True):
                read.extend(chunk)

    def _chain(self, tokens: Tensor, starts: Tensor, *, logits: bool = True) -> Tensor | None:
        """Run tokens that follow one another, the first of them at `starts` in the cache."""
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        positions = starts.unsqueeze(1) + steps
        return self._forward(tokens, positions, starts, CHAIN, None, logits=logits)

    def _forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        starts: Tensor,
        backend: AttentionBackend,
        mask: Tensor | None,
        *,
        logits: bool = True,
    ) -> Tensor | None:
        slots = torch.arange(tokens.shape[0], device=tokens.device)
        batch = VerifyBatch(
            slots.int().unsqueeze(1), self._cache.page_size, starts, positions, mask, int(_MODE)
        )
        metadata = backend.init_forward_metadata(batch)
        return self._model.forward(
            self._cache, tokens, positions, slots, starts, backend, metadata, logits=logits
        )

    def _tensor(self, rows: Sequence[object]) -> Tensor:
        return torch.tensor(rows, device=self._model.device)


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences have in common at their beginning."""
    length = min(len(first), len(second))
    if list(first[:length]) == list(second[:length]):
        return length
    return next(i for i in range(length) if first[i] != second[i])
