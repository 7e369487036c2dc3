"""sampling_probs: temperature, top-k and top-p, and their ties."""

from __future__ import annotations

import pytest
import torch

import torchvm


def _probs(*values: float, **options: float) -> list[float]:
    options.setdefault("temperature", 1.0)
    logits = torch.tensor(values).log()
    return torchvm.sampling_probs(logits, **options).tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, [0.125, 0.5, 0.25, 0.125]),
        ({"temperature": 0.5}, [1 / 22, 16 / 22, 4 / 22, 1 / 22]),
        ({"temperature": 0.0}, [0, 1, 0, 0]),
        ({"temperature": 1e-40}, [0, 1, 0, 0]),
        ({"top_k": 3}, [1 / 7, 4 / 7, 2 / 7, 0]),
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_k": 9}, [0.125, 0.5, 0.25, 0.125]),
        ({"top_p": 0.4}, [0, 1, 0, 0]),
        ({"top_p": 1e-9}, [0, 1, 0, 0]),
        ({"top_p": 0.6}, [0, 2 / 3, 1 / 3, 0]),
        ({"top_p": 0.8}, [1 / 7, 4 / 7, 2 / 7, 0]),
        # Of 2 / 3 and 1 / 3: what top_k leaves is renormalised before top_p.
        ({"top_k": 2, "top_p": 0.6}, [0, 1, 0, 0]),
    ],
)
def test_small_rows(options: dict[str, float], want: list[float]) -> None:
    found = _probs(0.125, 0.5, 0.25, 0.125, **options)
    assert found == pytest.approx(want, abs=1e-6)
    assert [p == 0 for p in found] == [p == 0 for p in want]


def test_equals_are_kept_in_order() -> None:
    logits = torch.zeros(2, 3, 1000, dtype=torch.bfloat16)
    for options in ({"top_k": 7}, {"top_p": 0.0065}):
        found = torchvm.sampling_probs(logits, temperature=0.3, **options)
        assert found.dtype == torch.float32
        assert (found[..., :7] > 0).all()
        assert not found[..., 7:].any()
    greedy = torchvm.sampling_probs(logits, temperature=0)
    assert greedy[..., 0].eq(1).all()
    assert not greedy[..., 1:].any()


def test_large_logits_and_excluded_tokens() -> None:
    logits = torch.tensor([3e38, -3e38, float("-inf"), 3e38])
    found = torchvm.sampling_probs(logits, temperature=0.01, top_p=0.9)
    assert found.tolist() == [0.5, 0, 0, 0.5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.5}, "temperature must be >= 0, got -0.5"),
        ({"temperature": float("nan")}, "temperature must be >= 0, got nan"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5"),
        ({"top_k": -1}, "top_k must be >= 0, got -1"),
    ],
)
def test_refusals(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _probs(0.5, 0.5, **options)


def test_refused_logits() -> None:
    with pytest.raises(TypeError, match=r"logits must be floating point, got torch\.int64"):
        torchvm.sampling_probs(torch.tensor([1, 2]), temperature=1.0)
    with pytest.raises(ValueError, match=r"logits must be of at least 1 token, got \[3, 0\]"):
        torchvm.sampling_probs(torch.zeros(3, 0), temperature=1.0)
