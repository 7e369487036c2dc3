"""Small models, what they say, heads that are trained on it, and decoders that use them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchvm.backends.layers import LayerKind
from torchvm.engine import EagleHead, HeadDrafter, PlainDecoder, SpeculativeDecoder, states_of
from torchvm.engine.small_model import SmallConfig, SmallModel

VOCAB, CONTEXT, BS = 24, 48, 5


def small(**config: Any) -> SmallModel:
    kinds = (LayerKind.grouped_query, LayerKind.grouped_query)
    sizes: dict[str, Any] = {"kinds": kinds, "vocab_size": VOCAB, "spread": 0.2}
    return SmallModel(SmallConfig(**sizes | config)).requires_grad_(False)


def texts(model: Any, count: int, seed: int) -> torch.Tensor:
    """What a model says to random beginnings of four tokens: (count, CONTEXT)."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(model.vocab_size, (count, 4), generator=generator).tolist()
    decoder = PlainDecoder(model, batch_size=count, max_context_len=CONTEXT, inner="aot_eager")
    said = decoder.decode(starts, max_new_tokens=CONTEXT).sequences
    return torch.tensor([start + row for start, row in zip(starts, said, strict=True)])


def train(model: Any, head: EagleHead, tokens: torch.Tensor, num_steps: int = 100) -> None:
    hidden = states_of(model, tokens)
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(num_steps):
        rows = torch.randint(len(tokens), (32,), generator=generator)
        losses = [
            nn.functional.cross_entropy(
                head.logits_of(entries[:, :-1]).flatten(0, 1), tokens[rows, level + 1 :].flatten()
            )
            for level, entries in enumerate(head.outputs(hidden[rows], tokens[rows]), start=1)
        ]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()


def drafter_of(head: Any, batch_size: int = BS, **sizes: Any) -> HeadDrafter:
    settings: dict[str, Any] = {"topk": 2, "depth": 3, "num_draft_tokens": 8} | sizes
    if settings["topk"] == 1:
        settings["num_draft_tokens"] = settings["depth"] + 1
    return HeadDrafter(head, batch_size=batch_size, max_context_len=CONTEXT, **settings)


def decoder_of(model: Any, drafter: Any, batch_size: int = BS, **options: Any) -> Any:
    settings: dict[str, Any] = {"inner": "aot_eager", "max_context_len": CONTEXT} | options
    return SpeculativeDecoder(model, drafter, batch_size=batch_size, **settings)


def plain(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """What each request says alone, up to the end of its context."""
    decoder = PlainDecoder(model, batch_size=1, max_context_len=CONTEXT, inner="aot_eager")
    return [decoder.decode([row], max_new_tokens=CONTEXT).sequences[0] for row in prompts]


def own_states(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Of a transformers model by itself."""
    with torch.inference_mode():
        out = model(input_ids=tokens, use_cache=False, output_hidden_states=True)
    return out.hidden_states[-1]  # type: ignore[no-any-return]
