"""Small random models, drafters that know or do not know the answer, and a plain reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from torchvm.engine import Draft

if TYPE_CHECKING:
    from collections.abc import Sequence

VOCAB = 97
CONTEXT = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    # Large weights make for logits that are far from a tie.
    "initializer_range": 0.4,
}


def tiny_llama() -> Any:
    """A LlamaForCausalLM, the same at every call."""
    torch.manual_seed(11)
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES))
    return model.eval()


def prompts(count: int, seed: int = 5) -> list[list[int]]:
    """Prompts of different lengths, the shortest of one token."""
    rng = np.random.default_rng(seed)
    return [rng.integers(VOCAB, size=1 + 4 * b).tolist() for b in range(count)]


def greedy(model: Any, prompt: list[int], new_tokens: int, *, eos: int | None = None) -> list[int]:
    """Decode with transformers' own attention and no cache at all."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(new_tokens):
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
            if tokens[-1] == eos:
                break
    return tokens[len(prompt) :]


class KnowingDrafter:
    """Hides a part of each request's true continuation among wrong siblings and loose nodes."""

    def __init__(
        self, answers: Sequence[list[int]], *, topk: int = 3, num_draft_tokens: int = 8
    ) -> None:
        self.answers = answers
        self.topk = topk
        self.num_draft_tokens = num_draft_tokens
        self.rng = np.random.default_rng(3)

    def propose(
        self, sequences: Sequence[Sequence[int]], active: Sequence[bool]
    ) -> Sequence[Draft]:
        return [
            self._draft(answer[len(sequence) :]) if on else Draft((), ())
            for answer, sequence, on in zip(self.answers, sequences, active, strict=True)
        ]

    def _draft(self, truth: list[int]) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        node = 0
        for token in truth[: self.rng.integers(2, 6)]:
            if self.topk > 1 and self.rng.random() < 0.6:
                tokens.append((token + 1) % VOCAB)
                parents.append(int(self.rng.choice([node, -1])))
            tokens.append(token)
            parents.append(node)
            node = len(tokens)
        room = self.num_draft_tokens - 1
        return Draft(tokens[:room], parents[:room])


class RandomDrafter:
    """Random ones of some tokens under random parents."""

    topk = num_draft_tokens = 8

    def __init__(self, words: Sequence[int] = range(VOCAB)) -> None:
        self.words = words
        self.rng = np.random.default_rng(4)

    def propose(
        self, sequences: Sequence[Sequence[int]], active: Sequence[bool]
    ) -> Sequence[Draft]:
        count = self.num_draft_tokens - 1
        return [
            Draft(
                self.rng.choice(self.words, count).tolist(),
                [int(self.rng.integers(-1, j + 1)) for j in range(count)],
            )
            for _ in sequences
        ]
