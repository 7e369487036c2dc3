"""The parts of the engine that need no model: drafts, batches, and the cache's compaction."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchvm.engine import Draft, PromptLookupDrafter
from torchvm.engine.batch import Batch, prompts_of
from torchvm.engine.cache import KVCache
from torchvm.engine.drafts import pack_drafts
from torchvm.engine.speculative import context_for


def draft(sequence: list[int], **options: Any) -> tuple[list[int], list[int]]:
    (found,) = PromptLookupDrafter(**options).propose([sequence], [True])
    return list(found.tokens), list(found.parents)


@pytest.mark.parametrize(
    ("sequence", "options", "tokens", "parents"),
    [
        ([1, 2, 3], {}, [], []),
        ([7], {}, [], []),
        # One match: what followed it, as far as the text goes and then again.
        ([5, 1, 2, 3, 4, 9, 5], {"depth": 3}, [1, 2, 3], [0, 1, 2]),
        ([4, 5, 4, 5], {"depth": 5}, [4, 5, 4, 5, 4], [0, 1, 2, 3, 4]),
        ([6, 6], {"depth": 3}, [6, 6, 6], [0, 1, 2]),
        # The longer match comes first although the shorter one is later.
        (
            [8, 1, 2, 3, 0, 2, 4, 8, 1, 2],
            {"depth": 1, "topk": 2},
            [3, 4],
            [0, 0],
        ),
        ([8, 1, 2, 3, 0, 2, 4, 8, 1, 2], {"depth": 1, "topk": 1}, [3], [0]),
        # Among equals the later one.
        ([2, 3, 2, 4, 2], {"depth": 1, "topk": 1}, [4], [0]),
        # Unless longer matches count no more.
        (
            [8, 1, 2, 3, 0, 2, 4, 8, 1, 2],
            {"depth": 1, "topk": 1, "max_ngram": 1},
            [4],
            [0],
        ),
        # Continuations share a prefix, and full trees stop growing.
        (
            [1, 5, 6, 1, 5, 7, 1, 5, 6, 1],
            {"depth": 2, "topk": 2},
            [5, 7, 6],
            [0, 1, 1],
        ),
        (
            [1, 5, 6, 1, 5, 7, 1, 5, 6, 1],
            {"depth": 2, "topk": 2, "num_draft_tokens": 3},
            [5, 7],
            [0, 1],
        ),
    ],
)
def test_prompt_lookup(
    sequence: list[int], options: dict[str, Any], tokens: list[int], parents: list[int]
) -> None:
    assert draft(sequence, **options) == (tokens, parents)


def test_prompt_lookup_keeps_its_limits() -> None:
    generator = torch.Generator().manual_seed(0)
    for topk, depth, n in ((1, 4, 8), (2, 3, 6), (3, 2, 9)):
        for _ in range(50):
            sequence = torch.randint(3, (40,), generator=generator).tolist()
            tokens, parents = draft(sequence, topk=topk, depth=depth, num_draft_tokens=n)
            assert 0 < len(tokens) < n
            depths = [0]
            for node, parent in enumerate(parents, start=1):
                assert 0 <= parent < node
                depths.append(depths[parent] + 1)
            assert max(depths) <= depth
            for node in range(n):
                children = [t for t, p in zip(tokens, parents, strict=True) if p == node]
                assert len(children) == len(set(children)) <= topk


def test_prompt_lookup_skips_requests_that_have_ended() -> None:
    first, second = PromptLookupDrafter().propose([[1, 1], [1, 1]], [False, True])
    assert first == Draft((), ())
    assert len(second.tokens) == 4


@pytest.mark.parametrize("name", ["topk", "depth", "num_draft_tokens", "max_ngram"])
def test_prompt_lookup_refuses_sizes_below_its_least(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be >= \d, got 0"):
        PromptLookupDrafter(**{name: 0})


def test_packing_fills_up_with_loose_nodes() -> None:
    tokens, parents = pack_drafts(
        [Draft([4, 5], [0, 0]), Draft([9], [99])],
        [[1, 2], [3]],
        [True, False],
        num_draft_tokens=4,
        topk=2,
        vocab_size=10,
    )
    assert tokens.tolist() == [[2, 4, 5, 2], [3, 3, 3, 3]]
    assert parents.tolist() == [[-1, 0, 0, -1], [-1, -1, -1, -1]]
    assert tokens.dtype == parents.dtype == torch.int64


def test_prompts_lose_their_padding_on_either_side() -> None:
    ids = torch.tensor([[0, 0, 5], [6, 7, 0], [1, 2, 3]])
    mask = torch.tensor([[0, 0, 1], [1, 1, 0], [1, 1, 1]])
    assert prompts_of(ids, mask) == [[5], [6, 7], [1, 2, 3]]
    assert prompts_of(ids, None) == ids.tolist()


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), None, r"input_ids must be \(B, P\) int64, got \[3\]"),
        (torch.zeros(1, 3), None, r"int64, got \[1, 3\] torch\.float32"),
        (torch.zeros(1, 3, dtype=torch.int64), torch.ones(1, 2), r"shape \[1, 3\], got \[1, 2\]"),
        (
            torch.zeros(2, 3, dtype=torch.int64),
            torch.tensor([[1, 1, 1], [1, 0, 1]]),
            "one run of ones in each row",
        ),
    ],
)
def test_bad_prompts(ids: torch.Tensor, mask: torch.Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prompts_of(ids, mask)


def test_a_batch_ends_requests_one_by_one() -> None:
    batch = Batch([[1, 2], [3]], max_new_tokens=3, eos_token_ids=[9], max_context_len=4)
    assert batch.seq_lens() == [1, 0]
    assert batch.extend(0, [4, 5, 6]) == [4, 5]  # The context is full.
    assert batch.extend(1, [7]) == [7]
    assert batch.active == [False, True]
    assert batch.seq_lens() == [0, 1]
    assert batch.extend(1, [9, 8]) == [9]
    assert batch.active == [False, False]
    assert batch.new_tokens() == [[4, 5], [7, 9]]


def test_compaction_moves_accepted_nodes_behind_the_root() -> None:
    config: Any = SimpleNamespace(num_attention_heads=2, num_key_value_heads=1, hidden_size=4)
    cache = KVCache.allocate(config, 3, 12, torch.float32, num_layers=3)
    for side, buffer in enumerate((*cache.keys, *cache.values)):
        assert buffer.shape == (3, 12, 1, 2)
        buffer.copy_(torch.arange(buffer.numel()).view(buffer.shape) + 1000 * side)
    before = [buffer.clone() for buffer in (*cache.keys, *cache.values)]
    lengths, paths = [2, 5, 0], [[2, 3, 6], [], [1, 2, 5]]
    cache.compact([0, 1, 2], lengths, paths)
    for old, new in zip(before, (*cache.keys, *cache.values), strict=True):
        expected = old.clone()
        for b, (length, path) in enumerate(zip(lengths, paths, strict=True)):
            for step, node in enumerate(path, start=1):
                expected[b, length + step] = old[b, length + node]
        assert torch.equal(new, expected)


@pytest.mark.parametrize(
    ("prompt", "new", "context"), [(10, 20, 256), (200, 57, 512), (200, 56, 256), (900, 400, 1000)]
)
def test_contexts_come_in_few_sizes(prompt: int, new: int, context: int) -> None:
    assert context_for(1000, [[0] * prompt, [0]], new) == context
