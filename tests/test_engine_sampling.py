"""Sampling in the engine: the target's distribution, whatever the drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchvm import SamplingParams, sampling_probs
from torchvm.backends.layers import LayerKind
from torchvm.engine import Draft, PlainDecoder, SpeculativeDecoder
from torchvm.engine.small_model import SmallConfig, SmallModel

VOCAB, CONTEXT, BS, RUNS = 6, 16, 1024, 20
PROMPT = [1, 4, 2]


class Both:
    """Two drafts for the next token, one of them with a child of its own."""

    topk, num_draft_tokens = 2, 4

    def propose(self, sequences: Any, active: Any) -> list[Draft]:
        return [Draft((3, 0, 5), (0, 0, 1)) for _ in sequences]


def small() -> SmallModel:
    kinds = (LayerKind.grouped_query,)
    return SmallModel(SmallConfig(kinds=kinds, vocab_size=VOCAB, hidden_size=16, spread=0.3))


def decoder_of(model: SmallModel, bs: int, **options: Any) -> SpeculativeDecoder:
    settings: dict[str, Any] = {"inner": "aot_eager", "max_context_len": CONTEXT} | options
    return SpeculativeDecoder(model, Both(), batch_size=bs, **settings)


def exact(model: SmallModel, sampling: SamplingParams) -> torch.Tensor:
    """Probability of each pair of next tokens, from plain forwards: (V, V) float64."""

    def after(tokens: list[int]) -> torch.Tensor:
        plain = PlainDecoder(model, batch_size=1, max_context_len=CONTEXT, inner="aot_eager")
        plain.decode([tokens], max_new_tokens=1)
        probs = sampling_probs(
            plain.last_logits[0], temperature=sampling.temperature, top_p=sampling.top_p,
            top_k=sampling.top_k,
        )  # fmt: skip
        return probs.double()

    first = after(PROMPT)
    return torch.stack([first[token] * after([*PROMPT, token]) for token in range(VOCAB)])


def p_value(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Of Pearson's chi-square; cells of probability 0 must be empty."""
    assert not counts[expected == 0].any()
    counts, expected = counts[expected > 0], expected[expected > 0]
    expected = expected / expected.sum() * counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    half = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, statistic / 2))


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.6}, {"temperature": 1.5, "top_k": 4, "top_p": 0.9}]
)
def test_two_tokens_have_the_targets_distribution(options: dict[str, Any]) -> None:
    model = small()
    truth = exact(model, SamplingParams(**options))
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    accepted = 0
    for seed in range(RUNS):
        decoder = decoder_of(model, BS, sampling=SamplingParams(seed=seed, **options))
        found = decoder.decode([PROMPT] * BS, max_new_tokens=2)
        accepted += sum(map(sum, found.accepted))
        for first, second in found.sequences:
            counts[first, second] += 1
    assert counts.sum() == BS * RUNS
    assert accepted > 0
    assert p_value(counts.flatten(), truth.flatten()) > 0.001
    # The test can fail: what greedy decoding, or another temperature, gives is far from it.
    hotter = exact(model, SamplingParams(temperature=2 * options.get("temperature", 1.0)))
    assert p_value(hotter.flatten() * BS * RUNS, truth.flatten() + 1e-9) < 1e-6


def test_a_seed_gives_the_same_tokens_again() -> None:
    model = small()
    decoder = decoder_of(model, 8, sampling=SamplingParams(seed=3), backend="cpu")
    first = decoder.decode([PROMPT] * 8, max_new_tokens=6)
    assert decoder.decode([PROMPT] * 8, max_new_tokens=6).sequences == first.sequences
    other = decoder_of(model, 8, sampling=SamplingParams(seed=4), backend="cpu")
    assert other.decode([PROMPT] * 8, max_new_tokens=6).sequences != first.sequences
    assert len(set(map(tuple, first.sequences))) > 1


def test_samples_of_a_request_are_its_own() -> None:
    """Whoever decodes beside it, and whenever they end."""
    model, sampling = small(), SamplingParams(seed=3)
    prompts = [PROMPT, [5], [2] * (CONTEXT - 4)]
    decoder = decoder_of(model, 3, sampling=sampling, backend="cpu", buckets=(1, 3))
    together = decoder.decode(prompts, max_new_tokens=9).sequences
    assert list(map(len, together)) == [9, 9, 4]
    ended = decoder.decode(prompts, max_new_tokens=9, stop_when=lambda b, _: b == 1).sequences
    assert ended == [together[0], together[1][:1], together[2]]
    assert decoder.decode(prompts[:2], max_new_tokens=9).sequences == together[:2]
    alone = decoder_of(model, 1, sampling=sampling)
    assert alone.decode(prompts[:1], max_new_tokens=9).sequences == together[:1]
    same = decoder.decode([PROMPT] * 3, max_new_tokens=9).sequences
    assert len(set(map(tuple, same))) == 3


def test_a_cold_temperature_is_greedy() -> None:
    model = small()
    greedy = decoder_of(model, 2).decode([PROMPT, [5]], max_new_tokens=8)
    cold = decoder_of(model, 2, sampling=SamplingParams(temperature=1e-4))
    assert cold.decode([PROMPT, [5]], max_new_tokens=8).sequences == greedy.sequences


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature must be > 0 to sample, got 0.0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_k": -1}, "top_k must be >= 0, got -1"),
        ({"threshold_single": 1.5}, r"threshold_single must be in \(0, 1\], got 1.5"),
        ({"seed": -1}, r"seed must be in \[0, 2\^64\), got -1"),
        ({"seed": 1 << 64}, r"seed must be in \[0, 2\^64\), got 18446744073709551616"),
        ({"threshold_acc": 0.0}, r"threshold_acc must be in \(0, 1\], got 0.0"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)
