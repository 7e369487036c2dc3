"""Small language models with random weights whose layers are of any kind a back end attends in."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn

from torchvm.backends.layers import GroupedQuery, Latent, LayerKind, Recurrent, SparseWindow
from torchvm.engine.small_cache import SmallCache

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor

    from torchvm.backends.base import AttentionBackend

__all__ = ["SmallConfig", "SmallModel"]


class SmallConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a small model."""

    kinds: tuple[LayerKind, ...]
    """The kind of each layer."""
    vocab_size: int = 97
    hidden_size: int = 48
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    rank: int = 24
    """Of a compressed key-value entry."""
    rope_dim: int = 8
    """Of the part of a latent key that carries the position."""
    sliding_window: int = 16
    """Of sparse-window layers."""
    block_size: int = 8
    """Tokens that a compressed block stands for."""
    num_selected: int = 2
    """Compressed blocks that a token attends."""
    max_position_embeddings: int = 8192
    spread: float = 0.4
    """Standard deviation of the weights; large ones make for logits that are far from a tie."""
    seed: int = 11


class SmallModel(nn.Module):
    """Embedding, layers of attention and a gated MLP, head: see `TargetModel` for its use.

    Args:
        config: its sizes; the weights follow from its seed.
    """

    def __init__(self, config: SmallConfig) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.max_position_embeddings = config.max_position_embeddings
        self.layer_kinds = frozenset(config.kinds)
        self.device = torch.device("cpu")
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers: Any = nn.ModuleList(_Block(config, kind) for kind in config.kinds)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        generator = torch.Generator().manual_seed(config.seed)
        with torch.no_grad():
            for weight in self.parameters():
                weight.normal_(std=config.spread, generator=generator)
        self.eval()

    def attending(self) -> AbstractContextManager[None]:
        """Do nothing: its layers always attend through a back end."""
        return nullcontext()

    def allocate(self, batch_size: int, max_context_len: int, num_tokens: int) -> SmallCache:
        """Make a cache.

        Raises:
            ValueError: when a window is shorter than the tokens of one forward: a draft could
                then leave the window of its own descendants and change their compressed blocks.
        """
        config = self.config
        if LayerKind.sparse_window in self.layer_kinds and num_tokens > config.sliding_window:
            raise ValueError(
                f"num_draft_tokens must be at most the sliding window of "
                f"{config.sliding_window}, got {num_tokens}"
            )
        shapes = [layer.attention.cache_shapes() for layer in self.layers]
        return SmallCache.allocate(config.kinds, shapes, batch_size, max_context_len, num_tokens)

    def forward(
        self,
        cache: SmallCache,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        seq_lens: Tensor,
        backend: AttentionBackend,
        metadata: Any,
        *,
        logits: bool = True,
    ) -> Tensor | None:
        """Run the model; see `TargetModel`."""
        hidden = self.hidden_states(
            cache, tokens, positions, slots, seq_lens, backend, metadata
        )  # fmt: skip
        return self.logits_of(hidden) if logits else None

    def hidden_states(
        self,
        cache: SmallCache,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        seq_lens: Tensor,
        backend: AttentionBackend,
        metadata: Any,
    ) -> Tensor:
        """Run the layers; see `HiddenTarget`."""
        embedded = self.embed(tokens)
        return self.run_layers(cache, embedded, positions, slots, seq_lens, backend, metadata)

    def embed(self, tokens: Tensor) -> Tensor:
        """Look tokens up: (..., hidden_size)."""
        embedded: Tensor = self.embedding(tokens)
        return embedded

    def run_layers(
        self,
        cache: SmallCache,
        embedded: Tensor,
        positions: Tensor,
        slots: Tensor,
        seq_lens: Tensor,
        backend: AttentionBackend,
        metadata: Any,
    ) -> Tensor:
        """Run the layers over (B, n, hidden_size) that stand for tokens; normalize."""
        hidden = embedded
        rows = slots.unsqueeze(1)
        columns = seq_lens.unsqueeze(1) + torch.arange(hidden.shape[1], device=hidden.device)
        for layer, buffers in zip(self.layers, cache.layers, strict=True):
            hidden = layer(hidden, positions, buffers, (rows, columns), backend, metadata)
        return _normalized(hidden)

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Apply the head."""
        logits: Tensor = self.head(hidden)
        return logits


class _Block(nn.Module):
    """One layer."""

    def __init__(self, config: SmallConfig, kind: LayerKind) -> None:
        super().__init__()
        self.attention: Any = _ATTENTIONS[kind](config)
        self.up = nn.Linear(config.hidden_size, 2 * config.hidden_size, bias=False)
        self.down = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        buffers: dict[str, Tensor],
        places: tuple[Tensor, Tensor],
        backend: AttentionBackend,
        metadata: Any,
    ) -> Tensor:
        attention = self.attention
        layer = attention.inputs(_normalized(hidden), positions, buffers, places)
        hidden = hidden + attention.result(backend.forward_verify(layer, metadata))
        out: Tensor = hidden + self.down(nn.functional.silu(self.up(_normalized(hidden))))
        return out


class _GroupedQueryAttention(nn.Module):
    """Rotary grouped-query attention."""

    def __init__(self, config: SmallConfig) -> None:
        super().__init__()
        self.config = config
        width = config.num_heads * config.head_dim
        kv_width = config.num_kv_heads * config.head_dim
        self.query = nn.Linear(config.hidden_size, width, bias=False)
        self.key = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.value = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.out = nn.Linear(width, config.hidden_size, bias=False)

    def cache_shapes(self) -> dict[str, tuple[int, ...]]:
        shape = (self.config.num_kv_heads, self.config.head_dim)
        return {"keys": shape, "values": shape}

    def inputs(
        self,
        hidden: Tensor,
        positions: Tensor,
        buffers: dict[str, Tensor],
        places: tuple[Tensor, Tensor],
    ) -> GroupedQuery:
        dim = self.config.head_dim
        query = _rotated(self.query(hidden).unflatten(-1, (-1, dim)), positions)
        buffers["keys"][places] = _rotated(self.key(hidden).unflatten(-1, (-1, dim)), positions)
        buffers["values"][places] = self.value(hidden).unflatten(-1, (-1, dim))
        return GroupedQuery(query, buffers["keys"], buffers["values"], dim**-0.5)

    def result(self, attended: Tensor) -> Tensor:
        out: Tensor = self.out(attended.flatten(-2))
        return out


class _SparseWindowAttention(_GroupedQueryAttention):
    """A sliding window, and the blocks whose mean key scores highest."""

    def inputs(  # type: ignore[override]  # Another kind of layer.
        self,
        hidden: Tensor,
        positions: Tensor,
        buffers: dict[str, Tensor],
        places: tuple[Tensor, Tensor],
    ) -> SparseWindow:
        dense = super().inputs(hidden, positions, buffers, places)
        config = self.config
        slots = places[0].squeeze(1)
        keys, values = (_block_means(side[slots], config.block_size) for side in dense[1:3])
        window = config.sliding_window
        selected = self._select(dense.query, keys, positions)
        return SparseWindow(*dense[:3], keys, values, selected, dense.scale, window)

    def _select(self, query: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
        """Best blocks among those that lie before the window as a whole: (B, n, S) int32."""
        config = self.config
        num_blocks = keys.shape[1]
        ends = (torch.arange(num_blocks, device=keys.device) + 1) * config.block_size
        open_to = ends <= positions.unsqueeze(-1) - config.sliding_window + 1
        grouped = query.unflatten(2, (config.num_kv_heads, -1)).mean(3)
        scores = torch.einsum("bnhd,bchd->bnc", grouped, keys).masked_fill(~open_to, -torch.inf)
        best = scores.topk(min(config.num_selected, num_blocks), -1)
        return torch.where(best.values == -torch.inf, -1, best.indices).int()


class _LatentAttention(nn.Module):
    """Latent attention, absorbed: queries are carried into the space of compressed entries."""

    def __init__(self, config: SmallConfig) -> None:
        super().__init__()
        self.config = config
        heads, rank, dim = config.num_heads, config.rank, config.head_dim
        self.query = nn.Linear(config.hidden_size, heads * dim, bias=False)
        self.query_rope = nn.Linear(config.hidden_size, heads * config.rope_dim, bias=False)
        self.compress = nn.Linear(config.hidden_size, rank, bias=False)
        self.key_rope = nn.Linear(config.hidden_size, config.rope_dim, bias=False)
        self.key_up = nn.Parameter(torch.empty(heads, dim, rank))
        self.value_up = nn.Parameter(torch.empty(heads, rank, dim))
        self.out = nn.Linear(heads * dim, config.hidden_size, bias=False)

    def cache_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"latents": (self.config.rank,), "ropes": (self.config.rope_dim,)}

    def inputs(
        self,
        hidden: Tensor,
        positions: Tensor,
        buffers: dict[str, Tensor],
        places: tuple[Tensor, Tensor],
    ) -> Latent:
        config = self.config
        query = self.query(hidden).unflatten(-1, (config.num_heads, -1))
        query_latent = torch.einsum("bnhd,hdr->bnhr", query, self.key_up)
        query_rope = self.query_rope(hidden).unflatten(-1, (config.num_heads, -1))
        key_rope = _rotated(self.key_rope(hidden).unsqueeze(2), positions).squeeze(2)
        buffers["latents"][places] = _normalized(self.compress(hidden))
        buffers["ropes"][places] = key_rope
        scale = (config.head_dim + config.rope_dim) ** -0.5
        return Latent(
            query_latent, _rotated(query_rope, positions), buffers["latents"], buffers["ropes"],
            scale,
        )  # fmt: skip

    def result(self, attended: Tensor) -> Tensor:
        values = torch.einsum("bnhr,hrd->bnhd", attended, self.value_up)
        out: Tensor = self.out(values.flatten(-2))
        return out


class _RecurrentAttention(nn.Module):
    """The gated delta rule with normalized queries and keys."""

    def __init__(self, config: SmallConfig) -> None:
        super().__init__()
        self.config = config
        width = config.num_heads * config.head_dim
        self.query = nn.Linear(config.hidden_size, width, bias=False)
        self.key = nn.Linear(config.hidden_size, width, bias=False)
        self.value = nn.Linear(config.hidden_size, width, bias=False)
        self.gate = nn.Linear(config.hidden_size, config.num_heads, bias=False)
        self.beta = nn.Linear(config.hidden_size, config.num_heads, bias=False)
        self.out = nn.Linear(width, config.hidden_size, bias=False)

    def cache_shapes(self) -> dict[str, tuple[int, ...]]:
        dim = self.config.head_dim
        return {"state": (self.config.num_heads, dim, dim)}

    def inputs(
        self,
        hidden: Tensor,
        positions: Tensor,  # noqa: ARG002 - the order of tokens is all it needs
        buffers: dict[str, Tensor],
        places: tuple[Tensor, Tensor],
    ) -> Recurrent:
        heads = (self.config.num_heads, -1)
        query, key, value = (
            side(hidden).unflatten(-1, heads) for side in (self.query, self.key, self.value)
        )
        gate = nn.functional.logsigmoid(self.gate(hidden)).float()
        beta = torch.sigmoid(self.beta(hidden)).float()
        normal = nn.functional.normalize
        return Recurrent(
            normal(query, dim=-1), normal(key, dim=-1), value, gate, beta,
            buffers["state"][places[0].squeeze(1)], buffers["node_states"][: hidden.shape[0]], 1.0,
        )  # fmt: skip

    def result(self, attended: Tensor) -> Tensor:
        out: Tensor = self.out(attended.flatten(-2))
        return out


_ATTENTIONS: dict[LayerKind, type[nn.Module]] = {
    LayerKind.grouped_query: _GroupedQueryAttention,
    LayerKind.latent: _LatentAttention,
    LayerKind.sparse_window: _SparseWindowAttention,
    LayerKind.recurrent: _RecurrentAttention,
}


def _normalized(hidden: Tensor) -> Tensor:
    return nn.functional.rms_norm(hidden, hidden.shape[-1:])


def _rotated(heads: Tensor, positions: Tensor) -> Tensor:
    """Rotate pairs of (B, n, heads, dim) by their positions."""
    half = heads.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=heads.device) / half)
    angles = (positions.unsqueeze(-1) * frequencies).unsqueeze(2)
    cos, sin = angles.cos(), angles.sin()
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _block_means(cache: Tensor, block_size: int) -> Tensor:
    """Mean of every whole block: (B, capacity // block_size, heads, dim)."""
    whole = cache.shape[1] // block_size * block_size
    means: Tensor = cache[:, :whole].unflatten(1, (-1, block_size)).mean(2)
    return means
