"""What the decoding loops need of a target model, whoever made it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    import torch
    from torch import Tensor

    from torchvm.backends.base import AttentionBackend
    from torchvm.backends.layers import LayerKind

__all__ = ["PROMPT_TOKENS", "HiddenTarget", "TargetCache", "TargetModel"]

PROMPT_TOKENS = 512
"""Most tokens of a prompt that run in one forward; verify steps run fewer."""


class TargetCache(Protocol):
    """What a batch's layers remember of its committed tokens."""

    @property
    def page_size(self) -> int:
        """Positions of a request; its page table has one page."""
        ...

    def reset(self) -> None:
        """Forget every request."""
        ...

    def compact(
        self,
        slots: Sequence[int],
        seq_lens: Sequence[int],
        paths: Sequence[Sequence[int] | None],
    ) -> None:
        """Keep what the last forward computed for the nodes that were accepted.

        Args:
            slots: where each request of that forward, in its order, lies in the cache.
            seq_lens: L of each request in that forward.
            paths: per request the accepted nodes below the root, ascending; the root, node 0, is
                always accepted. None when the request takes over nothing.
        """
        ...


class TargetModel(Protocol):
    """A causal language model whose attention is a back end's."""

    vocab_size: int
    max_position_embeddings: int
    """Most tokens of a request."""
    layer_kinds: frozenset[LayerKind]
    device: torch.device

    def attending(self) -> AbstractContextManager[None]:
        """Let the layers attend through back ends inside the block."""
        ...

    def allocate(self, batch_size: int, max_context_len: int, num_tokens: int) -> TargetCache:
        """Make a cache for forwards of up to `num_tokens` tokens behind the committed ones.

        Raises:
            ValueError: when the model cannot take so many in one forward.
        """
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
        """Run the layers over n tokens per request.

        Args:
            cache: of `allocate`; gets the tokens' entries.
            tokens: (B, n) int64.
            positions: (B, n) int64.
            slots: (B,) int64, where each request lies in the cache.
            seq_lens: (B,) int64, where its tokens begin there.
            backend: attends in every layer.
            metadata: what `backend.init_forward_metadata` made of this batch.
            logits: whether they are wanted.

        Returns:
            (B, n, vocabulary), or None.
        """
        ...


@runtime_checkable
class HiddenTarget(TargetModel, Protocol):
    """A target that also gives what its head reads, for a `HiddenDrafter` to begin from."""

    hidden_size: int

    def hidden_states(
        self,
        cache: Any,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        seq_lens: Tensor,
        backend: AttentionBackend,
        metadata: Any,
    ) -> Tensor:
        """Run the layers as `forward` does; return (B, n, hidden_size), after the final norm."""
        ...

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Return (B, n, vocabulary) of states (B, n, hidden_size): all that follows the norm."""
        ...
