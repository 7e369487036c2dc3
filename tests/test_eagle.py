"""Heads made of a target's parts: what they share, and what training makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

from tests.small_heads import decoder_of, drafter_of, own_states, small, texts, train
from tests.tiny_models import SIZES, tiny_llama
from torchvm.engine import EagleHead, states_of, steps

CLASSES: dict[str, tuple[Any, Any]] = {
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=6)),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config(
            **SIZES, head_dim=8, sliding_window=6, attn_logit_softcapping=0.5,
            final_logit_softcapping=2.0, query_pre_attn_scalar=8, tie_word_embeddings=False,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CLASSES))
def test_windows_and_soft_caps_of_other_models(name: str) -> None:
    """States, logits and the entries that are trained are those of the model and the ops."""
    torch.manual_seed(2)
    model_class, config = CLASSES[name]
    model = model_class(config).eval().requires_grad_(False)
    model.set_attn_implementation("eager")  # The default takes no soft cap.
    tokens = torch.randint(97, (2, 12))
    hidden = states_of(model, tokens)
    torch.testing.assert_close(hidden, own_states(model, tokens), rtol=1e-4, atol=1e-4)
    head = EagleHead(model)
    logits = head.logits_of(hidden)
    torch.testing.assert_close(logits, model(input_ids=tokens).logits, rtol=1e-4, atol=1e-4)
    (trained,) = head.outputs(hidden, tokens)
    slots = torch.arange(2)
    with torch.inference_mode(), head.attending():
        cache = head.allocate(1, 2, 11, 0)
        chain = steps._chain(cache, tokens[:, 1:], slots, torch.zeros_like(slots))
        read = head(1, cache, hidden[:, :-1], *chain[1:])
    torch.testing.assert_close(trained, read, rtol=1e-4, atol=1e-4)
    assert model.config._attn_implementation == "eager"


def test_only_the_heads_own_weights_are_trained() -> None:
    for model in (small(), tiny_llama().requires_grad_(False)):
        head = EagleHead(model, num_levels=2, seed=3)
        again, other = EagleHead(model, num_levels=2, seed=3), EagleHead(model, num_levels=2)
        weights = head.state_dict()
        assert all(map(torch.equal, weights.values(), again.state_dict().values()))
        assert not torch.equal(weights["fuse.1.weight"], other.state_dict()["fuse.1.weight"])
        assert not torch.equal(weights["fuse.0.weight"], weights["fuse.1.weight"])
        taken = {p.data_ptr() for p in model.parameters()}
        assert not taken & {p.data_ptr() for p in head.parameters()}
        tokens = torch.arange(10).repeat(2, 1)
        torch.stack(
            [o.sum() for o in head.outputs(states_of(model, tokens), tokens)]
        ).sum().backward()
        assert all(p.grad is not None and bool(p.grad.any()) for p in head.parameters())
        assert all(p.grad is None for p in model.parameters())


class Allocated(TorchDispatchMode):
    """Counts bytes."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.nbytes += out.nbytes
        return out


def test_the_cache_of_a_head_is_of_one_layer() -> None:
    model = tiny_llama()
    assert model.config.num_hidden_layers > 1
    head = EagleHead(model)
    with Allocated() as allocated:  # type: ignore[no-untyped-call]
        cache: Any = head.allocate(1, 2, 11, 3)
    assert allocated.nbytes == cache.keys[0].nbytes + cache.values[0].nbytes


def test_training_gets_more_drafts_accepted() -> None:
    """Also of texts that the head has not seen."""
    model = small(spread=0.1, vocab_size=97)
    prompts = [row[: 4 + b].tolist() for b, row in enumerate(texts(model, 3, seed=9))]
    head = EagleHead(model)
    decoder = decoder_of(model, drafter_of(head, 3), 3)
    truth = decoder.decode(prompts, max_new_tokens=32)
    train(model, head, texts(model, 48, seed=1))
    found = decoder.decode(prompts, max_new_tokens=32)
    assert found.sequences == truth.sequences
    assert truth.accepted_per_step < 0.2
    assert found.accepted_per_step > 0.5


def test_what_does_not_fit_is_refused() -> None:
    model = small()
    with pytest.raises(ValueError, match="num_levels must be >= 1, got 0"):
        EagleHead(model, num_levels=0)
    with pytest.raises(TypeError, match=r"model must be a PreTrainedModel .*got Linear"):
        EagleHead(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="model must be in eval mode"):
        EagleHead(tiny_llama().train())
    with pytest.raises(TypeError, match="model must be a HiddenTarget, got Linear"):
        states_of(nn.Linear(2, 2), torch.zeros(1, 2, dtype=torch.int64))  # type: ignore[arg-type]
    for tokens in (torch.arange(3), torch.zeros(1, 2), torch.zeros(1, 8193, dtype=torch.int64)):
        with pytest.raises(
            ValueError, match=r"tokens must be \(B, T\) int64 with T in \[1, 8192\]"
        ):
            states_of(model, tokens)
    head = EagleHead(model, num_levels=3)
    for hidden, message in (
        (torch.zeros(1, 4, 47), r"hidden must be \[1, 4, 48\] for these tokens, got \[1, 4, 47\]"),
        (torch.zeros(1, 3, 48), "tokens must be more than 3 a row, got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            head.outputs(hidden, torch.zeros(hidden.shape[:2], dtype=torch.int64))
