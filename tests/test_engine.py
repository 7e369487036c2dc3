"""Speculative decoding of small random models against transformers' own, without a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

from tests.tiny_models import (
    CONTEXT,
    SIZES,
    VOCAB,
    KnowingDrafter,
    RandomDrafter,
    greedy,
    prompts,
    tiny_llama,
)
from torchvm.backends.base import VerifyBatch
from torchvm.compilation import reports
from torchvm.engine import (
    Draft,
    PlainDecoder,
    PromptLookupDrafter,
    SpeculativeDecoder,
    generate,
    steps,
)
from torchvm.engine.check import compare_with_plain
from torchvm.integrations.transformers import tree_attention_of
from torchvm.ops.contracts import MaskRead
from torchvm.ops.layout import TreeMaskMode
from torchvm.passes.report import Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchvm.engine import Generation

NEW = 24
FULL, QLEN, PACKED = TreeMaskMode


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


@pytest.fixture(scope="module")
def answers(model: Any) -> list[list[int]]:
    """Three prompts with what follows them: more tokens than any test asks for."""
    return [prompt + greedy(model, prompt, NEW + 8) for prompt in prompts(3)]


def padded(rows: list[list[int]], *, left: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    ids, mask = [], []
    for row in rows:
        spare = [0] * (width - len(row))
        ids.append(spare + row if left else row + spare)
        mask.append(spare + [1] * len(row) if left else [1] * len(row) + spare)
    return torch.tensor(ids), torch.tensor(mask)


def run(model: Any, rows: list[list[int]], drafter: Any, **options: Any) -> Generation:
    settings: dict[str, Any] = {"max_new_tokens": NEW, "inner": "aot_eager"} | options
    return generate(model, *padded(rows), drafter=drafter, **settings)


def expected(answers: list[list[int]], count: int = NEW) -> list[list[int]]:
    return [
        answer[len(prompt) : len(prompt) + count]
        for answer, prompt in zip(answers, prompts(3), strict=True)
    ]


class Silent:
    """Drafts nothing, and notes what it was asked."""

    topk, num_draft_tokens = 2, 8

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], list[bool]]] = []

    def propose(self, sequences: Any, active: Any) -> list[Draft]:
        self.asked.append(([len(s) for s in sequences], list(active)))
        return [Draft((), ()) for _ in sequences]


@pytest.mark.parametrize("mode", list(TreeMaskMode))
def test_drafts_that_are_right_give_the_same_tokens_in_fewer_steps(
    model: Any, answers: list[list[int]], mode: TreeMaskMode
) -> None:
    found = run(model, prompts(3), KnowingDrafter(answers), mask_mode=mode)
    assert found.sequences == expected(answers)
    assert found.steps < NEW / 2
    assert found.accepted_per_step > 1.5
    for row, sequence in zip(found.accepted, found.sequences, strict=True):
        assert sum(row) + len(row) == len(sequence)


@pytest.mark.parametrize("drafter", [RandomDrafter(), PromptLookupDrafter(), Silent()])
def test_drafts_that_are_wrong_give_the_same_tokens(
    model: Any, answers: list[list[int]], drafter: Any
) -> None:
    assert run(model, prompts(3), drafter).sequences == expected(answers)


def test_random_trees_of_likely_tokens(model: Any, answers: list[list[int]]) -> None:
    truth = expected(answers)[0]
    found = run(model, prompts(1), RandomDrafter(truth[:3]), max_new_tokens=3)
    assert found.sequences == [truth[:3]]
    assert found.accepted_per_step > 0


@pytest.mark.parametrize("left", [True, False])
def test_each_request_gets_what_it_gets_alone(
    model: Any, answers: list[list[int]], left: bool
) -> None:
    ids, mask = padded(prompts(3), left=left)
    options: dict[str, Any] = {"max_new_tokens": NEW, "inner": "aot_eager"}
    together = generate(model, ids, mask, drafter=KnowingDrafter(answers), **options)
    for b, prompt in enumerate(prompts(3)):
        alone = generate(
            model, torch.tensor([prompt]), drafter=KnowingDrafter(answers[b : b + 1]), **options
        )
        assert alone.sequences == [together.sequences[b]]


def test_requests_end_at_different_steps_without_recompiles(
    model: Any, answers: list[list[int]]
) -> None:
    truth = expected(answers)
    eos = truth[1][3]
    rows = [(row[: row.index(eos) + 1] if eos in row else row) for row in truth]
    assert len({len(row) for row in rows}) > 1
    torch._dynamo.reset()
    counters.clear()
    silent = Silent()
    for drafter in (silent, KnowingDrafter(answers), RandomDrafter()):
        found = run(model, prompts(3), drafter, eos_token_id=[eos, VOCAB + 1])
        assert found.sequences == rows
    stats: Any = counters
    assert stats["stats"]["unique_graphs"] == 1
    assert not stats["graph_break"]
    # A request that has ended neither grows nor is drafted for.
    ended, steps_taken = len(rows[1]), max(map(len, rows))
    assert [active[1] for _, active in silent.asked] == [
        step < ended for step in range(steps_taken)
    ]
    assert [lengths[1] - len(prompts(3)[1]) for lengths, _ in silent.asked] == [
        min(step, ended) for step in range(steps_taken)
    ]


def test_a_later_compile_is_an_error(model: Any) -> None:
    decoder = SpeculativeDecoder(
        model, Silent(), batch_size=1, max_context_len=CONTEXT, inner="aot_eager"
    )
    decoder.warm_up()
    verifier = decoder.verifier
    shorter = verifier.shape._replace(max_context_len=CONTEXT - 1)
    decoder.runner.verifier = verifier._replace(shape=shorter)
    with pytest.raises(RuntimeError, match="recompile"):
        decoder.decode([[1, 2]], max_new_tokens=2)


@pytest.mark.parametrize("at", [0, 1, 5, 6])
def test_the_end_token_inside_an_accepted_path_ends_the_text(
    model: Any, answers: list[list[int]], at: int
) -> None:
    truth = expected(answers)[0]
    eos = truth[at]
    found = run(model, prompts(1), KnowingDrafter(answers[:1]), eos_token_id=eos)
    assert found.sequences == [truth[: truth.index(eos) + 1]]


def test_a_request_stops_when_it_is_told_to(model: Any, answers: list[list[int]]) -> None:
    """Also in the middle of an accepted path, and each request by itself."""
    truth = expected(answers)
    seen: dict[int, list[int]] = {}

    def stop(b: int, tokens: Sequence[int]) -> bool:
        assert list(tokens) == truth[b][: len(tokens)]
        seen.setdefault(b, []).append(len(tokens))
        return len(tokens) == 2 + 3 * b

    found = run(model, prompts(3), KnowingDrafter(answers), stop_when=stop)
    assert found.sequences == [row[: 2 + 3 * b] for b, row in enumerate(truth)]
    assert seen == {b: list(range(1, 3 + 3 * b)) for b in range(3)}


@pytest.mark.parametrize("count", range(1, 8))
def test_the_token_budget_is_exact(model: Any, answers: list[list[int]], count: int) -> None:
    found = run(model, prompts(1), KnowingDrafter(answers[:1]), max_new_tokens=count)
    assert found.sequences == [expected(answers, count)[0]]


def test_the_context_limit_is_kept(model: Any) -> None:
    prompt = prompts(1, seed=1)[0] * (CONTEXT - 6)
    truth = greedy(model, prompt, 6)
    drafter = KnowingDrafter([prompt + truth + [0] * 9])
    for budget in (6, 7, 100):
        found = run(model, [prompt], drafter, max_new_tokens=budget)
        assert found.sequences == [truth]
    shorter = run(model, [prompt], drafter, max_context_len=CONTEXT - 2, max_new_tokens=100)
    assert shorter.sequences == [truth[:4]]


def test_what_no_embedding_is_for_is_refused(model: Any) -> None:
    for token in (-1, 97):
        with pytest.raises(ValueError, match=rf"prompt 1 must be in \[0, 97\), got {token}"):
            run(model, [[1], [2, token]], Silent())
    with pytest.raises(ValueError, match="batch_size must be >= 1, got 0"):
        PlainDecoder(model, batch_size=0, max_context_len=CONTEXT, inner="aot_eager")


def test_what_does_not_fit_the_context_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match=r"prompt 1 must have 1 to 63 tokens, .* got 64"):
        run(model, [[1], [1] * CONTEXT], Silent())
    with pytest.raises(ValueError, match=r"prompt 0 must have 1 to 63 tokens, .* got 0"):
        generate(model, torch.zeros(1, 0, dtype=torch.int64), drafter=Silent(), max_new_tokens=1)
    with pytest.raises(ValueError, match="max_context_len must be at most the model's 64, got 65"):
        run(model, [[1]], Silent(), max_context_len=CONTEXT + 1)
    with pytest.raises(ValueError, match="max_new_tokens must be >= 1, got 0"):
        run(model, [[1]], Silent(), max_new_tokens=0)


def test_long_prompts_are_run_in_chunks(
    model: Any, monkeypatch: pytest.MonkeyPatch, answers: list[list[int]]
) -> None:
    monkeypatch.setattr(steps, "PROMPT_TOKENS", 3)
    found = run(model, prompts(3), KnowingDrafter(answers))
    assert found.sequences == expected(answers)


def test_a_chain_needs_no_mask(model: Any, answers: list[list[int]]) -> None:
    torch._dynamo.reset()
    before = len(reports())
    drafter = KnowingDrafter(answers[:1], topk=1, num_draft_tokens=6)
    found = run(model, prompts(1), drafter)
    assert found.sequences == expected(answers)[:1]
    assert found.steps < NEW / 2
    (report,) = reports()[before:]
    assert report.verdict is Reason.ELIDED
    assert (report.declared_mode, report.final_mode) == (FULL, QLEN)
    assert {reader.reads for reader in report.readers} == {MaskRead.NOTHING}


def test_the_compiler_shrinks_the_declared_mask(model: Any, answers: list[list[int]]) -> None:
    torch._dynamo.reset()
    before = len(reports())
    run(model, prompts(3), KnowingDrafter(answers))
    (report,) = reports()[before:]
    assert report.verdict is Reason.COMPACTED
    assert report.declared_mode is FULL
    assert report.declared_bytes == 3 * 8 * (CONTEXT + 8)
    assert report.final_mode in (QLEN, PACKED)
    assert report.final_bytes in (3 * 8 * 8, 3 * 8)
    assert [(reader.op, reader.reads) for reader in report.readers] == [
        ("torchvm::tree_attention", MaskRead.TREE_BLOCK)
    ] * 2


def test_one_flipped_bit_of_the_mask_is_found(
    model: Any, answers: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hide the root from node 1, in a step that is otherwise the same."""
    plain = PlainDecoder(model, batch_size=1, max_context_len=CONTEXT, inner="aot_eager")

    def flipped(*fields: Any) -> Any:
        batch = VerifyBatch(*fields)
        if batch.tree_mask is None:
            return batch
        mask = batch.tree_mask.clone()
        mask[8] = ~mask[8]
        return batch._replace(tree_mask=mask)

    drafter = KnowingDrafter(answers[:1])
    with monkeypatch.context() as patch:
        patch.setattr("torchvm.engine.steps.VerifyBatch", flipped)
        wrong = run(model, prompts(1), drafter, mask_mode=QLEN).sequences
    right = run(model, prompts(1), drafter, mask_mode=QLEN).sequences
    assert compare_with_plain(plain, prompts(1), right, max_new_tokens=NEW)[1] == [None]
    _, (first,) = compare_with_plain(plain, prompts(1), wrong, max_new_tokens=NEW)
    assert first is not None
    assert not first.is_near_tie
    assert first.gap > 0


def test_the_check_sees_missing_and_extra_tokens(model: Any, answers: list[list[int]]) -> None:
    plain = PlainDecoder(model, batch_size=3, max_context_len=CONTEXT, inner="aot_eager")
    truth = expected(answers, 4)
    changed = [truth[0][:2], [*truth[1], 5], truth[2]]
    generation, found = compare_with_plain(plain, prompts(3), changed, max_new_tokens=4)
    assert generation.sequences == truth
    assert [d and (d.position, d.plain_token, d.token, d.is_near_tie) for d in found] == [
        (2, truth[0][2], None, False), (4, None, 5, False), None,
    ]  # fmt: skip


def test_a_near_tie_is_told_by_its_gap(
    model: Any, answers: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Move one logit up to just below the best: the gap reported is the one made."""
    plain = PlainDecoder(model, batch_size=1, max_context_len=CONTEXT, inner="aot_eager")
    truth = expected(answers, 3)[0]
    other = (truth[1] + 1) % VOCAB
    advance = plain._advance

    def close(*args: Any) -> list[list[int]]:
        found = advance(*args)
        plain.last_logits[0, other] = plain.last_logits[0].max() - gap
        return found

    monkeypatch.setattr(plain, "_advance", close)
    for gap, is_near_tie in ((0.005, True), (0.02, False)):
        _, (first,) = compare_with_plain(plain, prompts(1), [[truth[0], other]], max_new_tokens=3)
        assert first is not None
        assert first.position == 1
        assert first.gap == pytest.approx(gap, abs=1e-4)
        assert first.is_near_tie is is_near_tie


@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=6)),
        (
            Gemma2ForCausalLM,
            Gemma2Config(
                **SIZES, head_dim=8, sliding_window=6, attn_logit_softcapping=0.5,
                query_pre_attn_scalar=8, tie_word_embeddings=False,
            ),
        ),
    ],
    ids=["mistral", "gemma2"],
)  # fmt: skip
def test_windows_and_soft_caps_of_other_models(model_class: Any, config: Any) -> None:
    torch.manual_seed(2)
    other = model_class(config).eval()
    if config.model_type == "gemma2":
        other.set_attn_implementation("eager")  # Its default takes no soft cap.
    rows = prompts(3)
    truth = [greedy(other, row, NEW) for row in rows]
    assert min(len(set(row)) for row in truth) > 3, "repeating one token shows nothing"
    drafter = KnowingDrafter([row + more for row, more in zip(rows, truth, strict=True)])
    assert run(other, rows, drafter).sequences == truth


def test_the_models_own_attention_comes_back(model: Any) -> None:
    before = model.config._attn_implementation
    run(model, [[1, 2]], Silent(), max_new_tokens=1)
    assert model.config._attn_implementation == before
    with pytest.raises(ValueError, match="tokens of draft 0"):
        run(model, [[1, 2]], Fixed([VOCAB], [0]), max_new_tokens=1)
    assert model.config._attn_implementation == before


def test_torchvm_attention_outside_the_engine_says_what_it_needs(model: Any) -> None:
    with tree_attention_of(model), pytest.raises(ValueError, match="needs verify=VerifyInputs"):
        model(input_ids=torch.tensor([[1]]))


def test_a_model_that_trains_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model must be in eval mode.*model\.eval\(\)"):
        run(tiny_llama().train(), [[1]], Silent())


class Fixed:
    """Always the same draft."""

    num_draft_tokens = 4

    def __init__(self, tokens: list[int], parents: list[int], topk: int = 2) -> None:
        self.draft = Draft(tokens, parents)
        self.topk = topk

    def propose(self, sequences: Any, active: Any) -> list[Draft]:
        return [self.draft]


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (Fixed([1, 1, 1, 1], [0, 0, 0, 0]), "draft 0 must have at most 3 tokens"),
        (Fixed([1, 1], [0]), "a parent for each, got 2 tokens and 1 parents"),
        (Fixed([VOCAB], [0]), r"tokens of draft 0 must be in \[0, 97\), got 97 at node 1"),
        (Fixed([-1], [0]), r"tokens of draft 0 must be in \[0, 97\), got -1 at node 1"),
        (Fixed([1, 2], [0, 2]), "parents of draft 0 must be smaller .* got 2 at node 2"),
        (Fixed([1], [-2]), "at least -1, got -2 at node 1"),
        (Fixed([1, 2], [0, 0], topk=1), "must be a chain .* got parent 0 at node 2"),
    ],
)
def test_malformed_drafts_are_named(model: Any, drafter: Fixed, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(model, [[1, 2]], drafter)


def test_one_draft_per_request_is_needed(model: Any) -> None:
    with pytest.raises(ValueError, match="drafts must be one per request, 2 in all, got 1"):
        run(model, [[1], [2]], Fixed([], []))


def test_bfloat16_models_decode(model: Any) -> None:
    """Rounding decides ties there, so only where the text begins is compared."""
    half = tiny_llama().bfloat16()
    truth = greedy(half, prompts(2)[1], 3)
    found = run(half, prompts(2)[1:], KnowingDrafter([prompts(2)[1] + truth]), max_new_tokens=3)
    assert found.sequences == [truth]
