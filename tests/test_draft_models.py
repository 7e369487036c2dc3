"""Draft models: their beams against plain loops, their caches, and the tokens they lead to."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.beams import draft_lists, plain_beam
from tests.tiny_models import CONTEXT, VOCAB, prompts, tiny_llama
from torchvm.backends.base import VerifyBatch
from torchvm.backends.chain import CHAIN
from torchvm.backends.layers import LayerKind
from torchvm.engine import EarlyExitDrafter, ModelDrafter, PlainDecoder, SpeculativeDecoder
from torchvm.engine.draft_cache import DraftCache
from torchvm.engine.draft_models import _most_probable, grow_chain, grow_tree
from torchvm.engine.drafts import Draft
from torchvm.engine.early_exit import first_layers
from torchvm.engine.small_model import SmallConfig, SmallModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchvm.engine.target import TargetModel

GROUPED = (LayerKind.grouped_query, LayerKind.grouped_query)
ON = [True] * 3


def small(**config: Any) -> SmallModel:
    return SmallModel(SmallConfig(**{"kinds": GROUPED, **config}))


def drafter_of(model: Any, batch_size: int = 3, **sizes: Any) -> ModelDrafter:
    return ModelDrafter(model, batch_size=batch_size, max_context_len=CONTEXT, **sizes)


def log_probabilities(model: TargetModel, tokens: Sequence[int]) -> list[float]:
    """Of the token after some, by one uncached forward."""
    n = len(tokens)
    with torch.inference_mode(), model.attending():
        starts, positions = torch.zeros(1, dtype=torch.int64), torch.arange(n).unsqueeze(0)
        cache = model.allocate(1, n, 1)
        pages = torch.zeros(1, 1, dtype=torch.int32)
        batch = VerifyBatch(pages, cache.page_size, starts, positions, None, 1)
        metadata = CHAIN.init_forward_metadata(batch)
        row = torch.tensor([list(tokens)])
        logits = model.forward(cache, row, positions, starts, starts, CHAIN, metadata)
    assert logits is not None
    found: list[float] = logits[0, -1].double().log_softmax(-1).tolist()
    return found


def beam(model: TargetModel, sequence: list[int], topk: int, depth: int, n: int) -> Draft:
    return plain_beam(lambda path: log_probabilities(model, sequence + path), topk, depth, n)


@pytest.mark.parametrize(
    ("topk", "depth", "n"),
    [(1, 1, 2), (1, 4, 5), (1, 4, 3), (2, 3, 6), (2, 5, 16), (3, 1, 4), (3, 4, 20), (4, 3, 20)],
)
def test_the_beam_is_that_of_plain_loops(topk: int, depth: int, n: int) -> None:
    model = small()
    drafter = drafter_of(model, topk=topk, depth=depth, num_draft_tokens=n)
    sequences = prompts(3)
    for draft, sequence in zip(drafter.propose(sequences, ON), sequences, strict=True):
        assert draft_lists(draft) == draft_lists(beam(model, sequence, topk, depth, n))


def test_the_beam_of_a_transformers_model_is_that_of_plain_loops() -> None:
    model = first_layers(tiny_llama(), 2)
    drafter = drafter_of(tiny_llama(), topk=3, depth=3, num_draft_tokens=9)
    sequences = prompts(3)
    for draft, sequence in zip(drafter.propose(sequences, ON), sequences, strict=True):
        assert draft_lists(draft) == draft_lists(beam(model, sequence, 3, 3, 9))


def test_a_tree_has_branches_below_the_root() -> None:
    """Else nothing here would need a mask."""
    drafter = drafter_of(small(spread=0.2), topk=3, depth=3, num_draft_tokens=16)
    for draft in drafter.propose(prompts(3), ON):
        below = [parent for parent in draft.parents if parent]
        assert len(below) > len(set(below)) > 1


def test_equal_logits_go_to_the_smaller_token() -> None:
    logits = torch.tensor([[1.0, 3.0, 0.0, 3.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0, 2.0, 2.0]])
    values, tokens = _most_probable(logits, 4)
    assert tokens.tolist() == [[1, 3, 5, 0], [0, 1, 2, 3]]
    assert values[1].tolist() == pytest.approx([-math.log(6)] * 4)


def test_a_certain_child_never_comes_without_its_parent() -> None:
    """Probabilities of 1 make every node of the best path score the same."""
    drafter = drafter_of(small(spread=4.0), topk=3, depth=4, num_draft_tokens=6)
    for draft in drafter.propose(prompts(3), ON):
        assert draft.parents[0] == 0
        assert all(0 <= parent < node for node, parent in enumerate(draft.parents, start=1))


def test_a_chain_is_the_tree_of_one_child() -> None:
    model, sequences = small(), prompts(3)
    sizes: dict[str, Any] = {"topk": 1, "batch_size": 3, "max_context_len": CONTEXT}
    caches = [DraftCache(model, num_tokens=5, **sizes) for _ in range(2)]
    roots = torch.tensor([row[-1:] for row in sequences])
    with torch.inference_mode():
        chains = grow_chain(caches[0], caches[0].catch_up(sequences, ON), 4)
        logits = caches[1].catch_up(sequences, ON)
        trees = grow_tree(caches[1], logits, roots, topk=1, depth=5, num_draft_tokens=5)
    assert list(map(draft_lists, chains)) == list(map(draft_lists, trees))
    assert len({tuple(chain.tokens) for chain in chains}) == 3


@pytest.mark.parametrize("topk", [1, 3])
def test_catching_up_is_starting_anew(topk: int) -> None:
    """Whatever was accepted, drafted or forgotten before."""
    model = small()
    sizes: dict[str, Any] = {"topk": topk, "depth": 4, "num_draft_tokens": 5}
    drafter = drafter_of(model, **sizes)
    rows = prompts(3)
    generator = torch.Generator().manual_seed(2)
    for step in range(5):
        drafts = drafter.propose(rows, ON)
        fresh = drafter_of(model, **sizes).propose(rows, ON)
        assert list(map(draft_lists, drafts)) == list(map(draft_lists, fresh))
        # All of a chain, some of it, and none: then a token that was not drafted.
        for b, kept in enumerate((4, step % 3, 0)):
            path = drafts[b].tokens[:kept] if topk == 1 else drafts[b].tokens[:1][:kept]
            rows[b] = [*rows[b], *path, int(torch.randint(VOCAB, (), generator=generator))]


def test_another_run_is_another_start() -> None:
    model = small()
    drafter = drafter_of(model)
    first, second = prompts(3, seed=5), prompts(3, seed=6)
    # Shorter than what was read, a part of it, and longer than what is read with the root.
    second[1] = first[1][:2]
    second[2] = first[2][:4] + list(range(30))
    for rows in (first, second, first):
        fresh = drafter_of(model).propose(rows, ON)
        found = drafter.propose(rows, ON)
        assert list(map(draft_lists, found)) == list(map(draft_lists, fresh))


def test_a_full_context_beside_a_long_prompt() -> None:
    """Padding of the row that is further along has no room behind it."""
    model = small()
    sizes: dict[str, Any] = {"batch_size": 2, "topk": 2, "depth": 2, "num_draft_tokens": 4}
    drafter = drafter_of(model, **sizes)
    long = list(range(CONTEXT))
    drafter.propose([long[:-1], [5]], ON[:2])
    rows = [long, [5, *reversed(long[1:])]]
    found = drafter.propose(rows, ON[:2])
    for draft, row in zip(found, rows, strict=True):
        assert draft_lists(draft) == draft_lists(beam(model, row, 2, 2, 4))


@pytest.mark.parametrize("topk", [1, 2])
def test_finished_requests_draft_nothing_and_change_nothing(topk: int) -> None:
    model = small()
    sizes: dict[str, Any] = {"topk": topk, "depth": 3, "num_draft_tokens": 4}
    drafter = drafter_of(model, **sizes)
    rows = prompts(3)
    drafter.propose(rows, ON)
    assert drafter.propose(rows, [False] * 3) == [Draft((), ())] * 3
    rows = [[*row, 7] for row in rows]
    found = drafter.propose(rows, [True, False, True])
    assert found[1] == Draft((), ())
    # The request comes back: what its row held is lost.
    again = drafter.propose(rows, ON)
    fresh = list(map(draft_lists, drafter_of(model, **sizes).propose(rows, ON)))
    assert list(map(draft_lists, again)) == fresh
    assert [draft_lists(found[0]), draft_lists(found[2])] == [fresh[0], fresh[2]]


def decoders(model: Any, drafter: Any) -> tuple[SpeculativeDecoder, PlainDecoder]:
    sizes: dict[str, Any] = {"batch_size": 3, "max_context_len": CONTEXT, "inner": "aot_eager"}
    return SpeculativeDecoder(model, drafter, **sizes), PlainDecoder(model, **sizes)


def speculate(model: Any, drafter: Any, new_tokens: int = 20) -> float:
    """Accepted drafts a step, of a run that says what plain decoding says."""
    speculative, plain = decoders(model, drafter)
    truth = plain.decode(prompts(3), max_new_tokens=new_tokens).sequences
    for _ in range(2):
        found = speculative.decode(prompts(3), max_new_tokens=new_tokens)
        assert found.sequences == truth
    return found.accepted_per_step


@pytest.mark.parametrize("make", [small, tiny_llama])
@pytest.mark.parametrize("topk", [1, 2])
def test_all_layers_draft_what_is_accepted(make: Any, topk: int) -> None:
    model = make()
    drafter = EarlyExitDrafter(
        model, 2, topk=topk, depth=4, num_draft_tokens=5 if topk == 1 else 15, batch_size=3,
        max_context_len=CONTEXT,
    )  # fmt: skip
    accepted = speculate(model, drafter)
    # 20 tokens are 4 steps of 5, unless a beam leaves the best path.
    assert accepted == 4.0 if topk == 1 else accepted > 3.0


def test_some_layers_draft_over_the_same_weights() -> None:
    for model in (small(), tiny_llama()):
        before = list(model.state_dict())
        drafter = EarlyExitDrafter(model, 1, batch_size=3, max_context_len=CONTEXT)
        view: Any = drafter.model
        shared = {p.data_ptr() for p in getattr(view, "model", view).parameters()}
        assert shared < {p.data_ptr() for p in model.parameters()}
        speculate(model, drafter)
        assert list(model.state_dict()) == before


def test_a_first_layer_alone_is_a_model_of_one_layer() -> None:
    shorter = small(kinds=GROUPED[:1])
    whole = small()
    shorter.load_state_dict(first_layers(whole, 1).state_dict())  # type: ignore[attr-defined]
    early = EarlyExitDrafter(whole, 1, batch_size=3, max_context_len=CONTEXT)
    assert list(map(draft_lists, early.propose(prompts(3), ON))) == list(
        map(draft_lists, drafter_of(shorter).propose(prompts(3), ON))
    )


@pytest.mark.parametrize("topk", [1, 3])
def test_a_stranger_changes_no_token(topk: int) -> None:
    drafter = drafter_of(small(seed=12), topk=topk, num_draft_tokens=5, vocab_size=VOCAB)
    assert speculate(small(), drafter) < 1.0


def test_chains_may_be_drafted_in_other_layers() -> None:
    model = small(kinds=(LayerKind.latent, LayerKind.sparse_window))
    drafter = drafter_of(model, topk=1, depth=3, num_draft_tokens=4)
    rows = [[*row, *range(20)] for row in prompts(3)]
    for _ in range(2):
        for draft, row in zip(drafter.propose(rows, ON), rows, strict=True):
            assert draft_lists(draft) == draft_lists(beam(model, row, 1, 3, 4))
        rows = [[*row, 3, 4] for row in rows]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"topk": 0}, "topk must be >= 1, got 0"),
        ({"depth": 0}, "depth must be >= 1, got 0"),
        ({"num_draft_tokens": 1}, "num_draft_tokens must be >= 2, got 1"),
        ({"batch_size": 0}, "batch_size must be >= 1, got 0"),
        ({"num_draft_tokens": 16}, r"num_draft_tokens must be <= 15, .*got 16"),
        ({"topk": 98, "depth": 1}, "topk must be at most .* 97, got 98"),
        ({"max_context_len": 8193}, "max_context_len must be 1 to the model's 8192, got 8193"),
        ({"vocab_size": 96}, "model must have the vocabulary .*96 tokens, got 97"),
    ],
)
def test_sizes_must_fit(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelDrafter(small(), **{"batch_size": 1, "max_context_len": 32, **sizes})


def test_models_must_fit() -> None:
    recurrent = small(kinds=(LayerKind.recurrent, LayerKind.grouped_query))
    for topk in (1, 2):
        with pytest.raises(ValueError, match=f"to draft with topk {topk}, got .*recurrent"):
            drafter_of(recurrent, topk=topk, num_draft_tokens=4)
    with pytest.raises(ValueError, match="model must be in eval mode"):
        drafter_of(tiny_llama().train())
    for count in (0, 3):
        with pytest.raises(ValueError, match=f"must be 1 to the model's 2, got {count}"):
            first_layers(tiny_llama(), count)
    strangers: tuple[Any, ...] = (nn.Linear(2, 2), tiny_llama().model)
    for model in strangers:
        with pytest.raises(TypeError, match=r"model must be .*, got L"):
            first_layers(model, 1)


def test_sequences_must_fit() -> None:
    drafter = drafter_of(small(), batch_size=2)
    with pytest.raises(ValueError, match="sequences must be 2, got 1"):
        drafter.propose([[1]], [True])
    for length in (0, CONTEXT + 1):
        with pytest.raises(ValueError, match=f"sequence 1 must have 1 to 64 tokens, got {length}"):
            drafter.propose([[1], [1] * length], ON[:2])


def test_the_default_tree_has_what_is_scored() -> None:
    sizes: dict[str, Any] = {"batch_size": 1, "max_context_len": CONTEXT}
    for topk, depth, n in ((1, 4, 5), (2, 4, 8), (2, 1, 3)):
        assert ModelDrafter(small(), topk=topk, depth=depth, **sizes).num_draft_tokens == n


def test_a_drafter_must_be_made_for_the_decoders_batches() -> None:
    model = small()
    for sizes, message in (
        ({"batch_size": 2}, "drafter must be made for batch_size 3, got one for 2"),
        ({"max_context_len": 63}, "must be made for max_context_len 64 or more, got 63"),
    ):
        made: dict[str, Any] = {"batch_size": 3, "max_context_len": 64, **sizes}
        drafter = ModelDrafter(model, **made)
        with pytest.raises(ValueError, match=message):
            SpeculativeDecoder(model, drafter, batch_size=3, max_context_len=64, inner="aot_eager")
