"""Draft heads: their drafts against plain torch, the states they are given, and the tokens."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from tests.beams import draft_lists, plain_beam
from tests.head_reference import Reference
from tests.small_heads import (
    BS,
    CONTEXT,
    VOCAB,
    decoder_of,
    drafter_of,
    own_states,
    plain,
    small,
    texts,
    train,
)
from tests.tiny_models import SIZES, KnowingDrafter, tiny_llama
from torchvm import SamplingParams
from torchvm.backends.layers import LayerKind
from torchvm.engine import (
    Draft,
    EagleHead,
    HeadDrafter,
    HiddenDrafter,
    PromptLookupDrafter,
    states_of,
    steps,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchvm.engine.small_model import SmallModel

LEVELS = (1, 3)


@pytest.fixture(scope="module")
def model() -> SmallModel:
    return small()


@pytest.fixture(scope="module")
def said(model: SmallModel) -> torch.Tensor:
    return texts(model, 48, seed=1)


@pytest.fixture(scope="module")
def heads(model: SmallModel, said: torch.Tensor) -> dict[int, EagleHead]:
    """Trained ones, by their number of levels."""
    made = {levels: EagleHead(model, num_levels=levels) for levels in LEVELS}
    for head in made.values():
        train(model, head, said, num_steps=60)
    return made


@pytest.fixture(scope="module")
def rows(said: torch.Tensor) -> list[list[int]]:
    """Prompts that heads have been trained to continue, of 1, 8, 15, 22 and 29 tokens."""
    return [said[b, : 1 + 7 * b].tolist() for b in range(BS)]


@pytest.fixture(scope="module")
def truth(model: SmallModel, rows: list[list[int]]) -> list[list[int]]:
    """What follows the prompts, up to the end of the context."""
    return plain(model, rows)


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("topk", [1, 2])
def test_tokens_are_those_of_plain_decoding(
    model: SmallModel,
    heads: dict[int, EagleHead],
    rows: list[list[int]],
    truth: list[list[int]],
    topk: int,
    levels: int,
) -> None:
    """Whether drafts are right or not, in ragged batches that run on ever smaller buckets."""
    assert len({len(row) for row in truth}) == BS
    drafter = drafter_of(heads[levels], topk=topk)
    decoder = decoder_of(model, drafter, backend="cpu", buckets=(2, BS))
    torch._dynamo.reset()
    counters.clear()
    stats: Any = counters
    decoder.warm_up()
    for _ in range(2):
        found = decoder.decode(rows, max_new_tokens=CONTEXT)
        assert found.sequences == truth
        assert found.accepted_per_step > 0.6
    assert len(set(map(len, found.accepted))) > 2
    assert decoder.decode(rows[1:4], max_new_tokens=CONTEXT).sequences == truth[1:4]
    decoder.drafter = decoder._observer = drafter_of(
        EagleHead(model, num_levels=levels), topk=topk
    )
    found = decoder.decode(rows, max_new_tokens=CONTEXT)
    assert found.sequences == truth
    assert found.accepted_per_step < 0.2
    assert stats["stats"]["unique_graphs"] == 2
    assert not stats["graph_break"]


class Watched(HeadDrafter):
    """Keeps what it was asked and what it answered."""

    def propose(self, sequences: Any, active: Any) -> Sequence[Draft]:
        drafts = super().propose(sequences, active)
        self.kept: list[tuple[list[int], Draft]] = getattr(self, "kept", [])
        self.kept += [
            (list(row), draft)
            for row, draft, on in zip(sequences, drafts, active, strict=True)
            if on
        ]
        return drafts


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize(("topk", "depth", "n"), [(1, 3, 4), (2, 3, 8), (3, 2, 7)])
def test_drafts_are_those_of_plain_torch(
    model: SmallModel,
    heads: dict[int, EagleHead],
    said: torch.Tensor,
    levels: int,
    topk: int,
    depth: int,
    n: int,
) -> None:
    """Incremental, after accepted and rejected ones, as from scratch without any cache."""
    prompts = [said[0, :1].tolist(), said[1, :18].tolist(), [3, *said[2, :6].tolist()]]
    sizes = {"topk": topk, "depth": depth, "num_draft_tokens": n, "batch_size": 3}
    drafter = Watched(heads[levels], max_context_len=CONTEXT, **sizes)
    found = decoder_of(model, drafter, 3).decode(prompts, max_new_tokens=16)
    assert {0, depth} <= set(itertools.chain(*found.accepted))
    reference = Reference(model, heads[levels])
    silent = 0
    for row, draft in drafter.kept:
        if len(row) <= min(levels, depth):
            silent += 1
            assert draft == Draft((), ())
            continue
        truth = plain_beam(partial(reference.log_probabilities, row), topk, depth, n)
        assert draft_lists(draft) == draft_lists(truth)
    assert silent >= 1


class UnheardOf(nn.Module):
    """What transformers' own attention makes of a head, without a cache."""

    def __init__(self, model: Any, head: EagleHead) -> None:
        super().__init__()
        self.model = tiny_llama()
        self.model.model.layers = nn.ModuleList([self.model.model.layers[0]])
        self.model.model.layers[0].load_state_dict(head.layers[0].state_dict())
        self.target, self.head = model, head

    def entries(self, hidden: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        embedded = self.target.model.embed_tokens(torch.tensor(tokens))
        fused = self.head.fuse[0](torch.cat([embedded, hidden], -1))
        out = self.model.model(inputs_embeds=fused[None], use_cache=False)
        return out.last_hidden_state[0]  # type: ignore[no-any-return]

    def log_probabilities(self, tokens: list[int], path: list[int]) -> list[float]:
        read = own_states(self.target, torch.tensor([tokens[:-1]]))[0]
        together = tokens + path
        hidden = read
        for end in range(len(tokens), len(together) + 1):
            hidden = self.entries(read, together[1:end])
            read = torch.cat([read, hidden[-1:]])
        logits = self.target.lm_head(hidden[-1])
        found: list[float] = logits.double().log_softmax(-1).tolist()
        return found


def test_drafts_on_a_transformers_model_are_those_of_its_own_attention() -> None:
    model = tiny_llama()
    head = EagleHead(model, seed=4)
    sizes: dict[str, Any] = {"topk": 2, "depth": 3, "num_draft_tokens": 8, "batch_size": 2}
    drafter = Watched(head, max_context_len=CONTEXT, **sizes)
    prompts = [[7], list(range(10, 20))]
    with torch.inference_mode():
        found = decoder_of(model, drafter, 2).decode(prompts, max_new_tokens=6)
        assert found.sequences == [
            decoder_of(model, PromptLookupDrafter(), 1)
            .decode([row], max_new_tokens=6)
            .sequences[0]
            for row in prompts
        ]
        other = UnheardOf(model, head)
        for row, draft in drafter.kept:
            if len(row) > 1:
                truth = plain_beam(partial(other.log_probabilities, row), 2, 3, 8)
                assert draft_lists(draft) == draft_lists(truth)


class Notes(KnowingDrafter):
    """Writes down the states that it is given, and fails where one comes out of order."""

    hidden_size = 0
    states: dict[int, list[torch.Tensor]]

    def observe(self, hidden: Any, *, requests: Any, starts: Any, nodes: Any) -> None:
        assert len(requests) == len(starts) == len(nodes) <= len(hidden)
        for row, b, start, places in zip(hidden, requests, starts, nodes, strict=False):
            if not places:
                continue
            if start == 0:
                self.states[b] = []
            assert start == len(self.states[b])
            self.states[b] += row[list(places)].clone()
        hidden.fill_(torch.nan)


@pytest.mark.parametrize("make", [partial(small, vocab_size=97), tiny_llama])
def test_every_committed_token_comes_with_its_state(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts in chunks and of accepted paths through trees, on several buckets."""
    monkeypatch.setattr(steps, "PROMPT_TOKENS", 3)
    model = make()
    prompts = [list(range(1, 2 + 5 * b)) for b in range(4)]
    truth = plain(model, prompts)
    drafter = Notes([p + row + [0] * 9 for p, row in zip(prompts, truth, strict=True)])
    drafter.hidden_size, drafter.states = SIZES["hidden_size"] if make is tiny_llama else 48, {}
    assert isinstance(drafter, HiddenDrafter)
    decoder = decoder_of(model, drafter, 4, backend="cpu", buckets=(1, 4))
    for _ in range(2):
        found = decoder.decode(prompts, max_new_tokens=CONTEXT)
        assert found.sequences == truth
        assert found.accepted_per_step > 1
    for b, row in enumerate(truth):
        sequence = (prompts[b] + row)[:-1]
        states = torch.stack(drafter.states[b])
        assert len(states) >= len(sequence)
        whole = states_of(model, torch.tensor([sequence]))[0]
        torch.testing.assert_close(states[: len(sequence)], whole, rtol=1e-3, atol=1e-3)


def test_states_leave_the_step_for_those_who_ask(model: SmallModel) -> None:
    for drafter, count in ((drafter_of(EagleHead(model), 1), 4), (PromptLookupDrafter(), 3)):
        decoder = decoder_of(model, drafter, 1)
        decoder.decode([[1, 2]], max_new_tokens=3)
        with torch.inference_mode():
            outputs = decoder.runner._replay(1)
        assert len(outputs) == count


def test_sampling_is_by_the_same_coins(
    model: SmallModel,
    heads: dict[int, EagleHead],
    rows: list[list[int]],
    truth: list[list[int]],
) -> None:
    cold, warm = SamplingParams(temperature=1e-4), SamplingParams(seed=5)
    decoder = decoder_of(model, drafter_of(heads[1]), sampling=cold)
    assert decoder.decode(rows, max_new_tokens=9).sequences == [row[:9] for row in truth]
    decoder = decoder_of(model, drafter_of(heads[1]), sampling=warm)
    first = decoder.decode(rows, max_new_tokens=9)
    assert decoder.decode(rows, max_new_tokens=9).sequences == first.sequences
    assert first.accepted_per_step > 0


def observed(drafter: HeadDrafter, model: Any, sequences: Sequence[list[int]]) -> None:
    """Give a drafter the states of sequences, from their beginning."""
    for b, row in enumerate(sequences):
        hidden = states_of(model, torch.tensor([row]))
        drafter.observe(hidden, requests=[b], starts=[0], nodes=[range(len(row) - 1)])


def test_missing_and_stale_states_are_refused(model: SmallModel) -> None:
    drafter = drafter_of(EagleHead(model), 2)
    sequences, on = [[1, 2, 3, 4], [5]], [True, True]
    with pytest.raises(ValueError, match=r"of request 0 must be observed for its 3 .*, got 0"):
        drafter.propose(sequences, on)
    observed(drafter, model, sequences)
    first = drafter.propose(sequences, on)
    assert len(first[0].tokens) == 7
    assert first[1] == Draft((), ())
    assert drafter.propose(sequences, on) == first
    with pytest.raises(ValueError, match=r"of request 1 must be observed for its 1 .*, got 0"):
        drafter.propose([sequences[0], [5, 6]], on)
    with pytest.raises(ValueError, match=r"of request 0 must be observed for its 4 .*, got 3"):
        drafter.propose([[1, 2, 3, 4, 5], [5]], on)
    with pytest.raises(ValueError, match=r"sequence 0 must begin with the 4 tokens .*got others"):
        drafter.propose([[1, 2, 9, 4], [5]], on)
    # A request may rest, and another run may begin.
    assert drafter.propose(sequences, [False, True]) == [Draft((), ())] * 2
    assert drafter.propose(sequences, on) == first
    others = [[3, 2, 2], [4, 5, 6, 7, 8]]
    observed(drafter, model, others)
    second = drafter.propose(others, on)
    # The same tokens may have other states, of a model with other weights.
    observed(drafter, small(seed=12), others)
    third = drafter.propose(others, on)
    assert third != second
    for target, drafts in ((model, second), (small(seed=12), third)):
        fresh = drafter_of(drafter.head, 2)
        observed(fresh, target, others)
        assert drafts == fresh.propose(others, on)
    # One of a single token begins anew, too.
    drafter.propose([[3], [4]], on)
    with pytest.raises(ValueError, match=r"of request 0 must be observed for its 2 .*, got 0"):
        drafter.propose([others[0], [4]], on)


@pytest.mark.parametrize(
    ("shape", "change", "message"),
    [
        ((1, 4, 47), {}, r"hidden must be \(rows, n, 48\), got \[1, 4, 47\]"),
        ((4, 48), {}, r"hidden must be \(rows, n, 48\), got \[4, 48\]"),
        ((1, 4, 48), {"starts": [0, 0]}, r"one per row of at most 1, got \(1, 2, 1\)"),
        ((0, 4, 48), {}, r"one per row of at most 0, got \(1, 1, 1\)"),
        ((1, 4, 48), {"requests": [2]}, r"requests must be in \[0, 2\), got 2"),
        (
            (2, 4, 48), {"requests": [0, 0], "starts": [2, 2], "nodes": [[0], [0]]},
            r"requests must be different ones, got \[0, 0\]",
        ),
        ((1, 4, 48), {"starts": [1]}, "states of request 0 must begin at 0, or at 2 .*got 1"),
        ((1, 4, 48), {"nodes": [[1, 4]]}, r"must be in \[0, 4\) .*got \[1, 4\]"),
        ((1, 64, 48), {"nodes": [range(64)]}, "end before position 53, got"),
    ],
)  # fmt: skip
def test_states_that_do_not_fit_are_refused(
    model: SmallModel, shape: tuple[int, ...], change: dict[str, Any], message: str
) -> None:
    drafter = drafter_of(EagleHead(model), 2)
    observed(drafter, model, [[1, 2, 3]])
    settings: dict[str, Any] = {"requests": [0], "starts": [2], "nodes": [[0]]} | change
    with pytest.raises(ValueError, match=message):
        drafter.observe(torch.zeros(shape), **settings)
    # Nothing was written.
    assert len(drafter.propose([[1, 2, 3], [4]], [True, True])[0].tokens) == 7


@pytest.mark.parametrize(
    ("levels", "sizes", "message"),
    [
        (1, {"depth": 0}, "depth must be >= 1, got 0"),
        (1, {"vocab_size": 97}, "model must have the vocabulary .*97 tokens, got 24"),
        (1, {"topk": 25, "depth": 1}, "topk must be at most the model's vocabulary of 24, got 25"),
        (3, {"depth": 4}, "depth must be at most the head's 3 levels, got 4"),
    ],
)
def test_heads_must_fit(
    model: SmallModel, levels: int, sizes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        drafter_of(EagleHead(model, num_levels=levels), **sizes)


def test_heads_and_models_must_fit(model: SmallModel) -> None:
    recurrent = EagleHead(small(kinds=(LayerKind.recurrent,)))
    with pytest.raises(ValueError, match="to draft with topk 2, got recurrent"):
        drafter_of(recurrent)
    other = drafter_of(EagleHead(small(hidden_size=32)))
    with pytest.raises(ValueError, match="states of the model's hidden size 48, got 32"):
        decoder_of(model, other)

    class Silent(nn.Module):
        vocab_size, max_position_embeddings = VOCAB, CONTEXT

    with pytest.raises(TypeError, match=r"model must be a HiddenTarget for HeadDrafter.*Silent"):
        decoder_of(Silent(), drafter_of(EagleHead(model)))
