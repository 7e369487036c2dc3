"""Defects that owners of verify masks had elsewhere: each is reproduced, and is not here."""

from __future__ import annotations

import pytest
import torch

from tests.tiny_models import KnowingDrafter
from torchvm import build_tree_from_parents, maybe_create_verify_mask, verify_tree_greedy
from torchvm.backends.base import VerifyBatch, VerifyConfig
from torchvm.backends.layers import GroupedQuery, LayerKind
from torchvm.backends.registry import LEAVES
from torchvm.backends.triton import TritonUnifiedBackend
from torchvm.engine import PlainDecoder, SpeculativeDecoder
from torchvm.engine.small_model import SmallConfig, SmallModel
from torchvm.ops.layout import TreeMaskMode, live_mask_numel, tree_mask_numel

FULL = TreeMaskMode.FULL_MASK


def test_sizes_count_the_tree_once() -> None:
    """A sum of key-value lengths that has the drafts already counted them twice: 125 too many."""
    n, lengths = 5, [3, 1, 4, 1, 5]
    cells = sum(n * (length + n) for length in lengths)
    assert live_mask_numel(FULL, len(lengths), n, sum(lengths)) == cells
    with_drafts = sum(length + n for length in lengths)
    assert live_mask_numel(FULL, len(lengths), n, with_drafts) - cells == 125


@pytest.mark.parametrize("leaf", [leaf for leaf in LEAVES if leaf.takes_trees])
def test_no_buffer_lacks_room_for_the_tree(leaf: type) -> None:
    """Triton's was max_bs * n * context, short by max_bs * n * n."""
    config = VerifyConfig(num_draft_tokens=4, max_context_len=16, topk=2, tree_mask_mode=FULL)
    backend = leaf(config)
    backend.init_cuda_graph_state(3)
    mask = backend.verify_mask
    if mask is not None:
        assert mask.buffer.numel() == tree_mask_numel(FULL, 3, 4, 16) == 3 * 4 * (16 + 4)


def test_a_mask_neither_grows_nor_moves_with_the_batch() -> None:
    """One was grown by concatenation, and never shrank."""
    model = SmallModel(SmallConfig(kinds=(LayerKind.grouped_query,)))
    drafter = KnowingDrafter([[1] * 40] * 3)
    decoder = SpeculativeDecoder(
        model, drafter, batch_size=3, max_context_len=32, inner="aot_eager",
        backend="triton-unified", buckets=(1, 2, 3),
    )  # fmt: skip
    buffer = decoder.verifier.buffer
    assert buffer is not None
    before = buffer.data_ptr(), buffer.numel()
    for lengths in ((1, 9, 20), (25, 2, 1), (1, 1, 1)):
        decoder.decode([[1] * length for length in lengths], max_new_tokens=9)
        mask = decoder.verifier.backend.verify_mask
        assert mask is not None
        assert (mask.buffer.data_ptr(), mask.buffer.numel()) == before


def test_a_mask_is_read_as_it_was_built_when_the_batch_is_padded() -> None:
    """One was built for the real batch, and read at the offsets of the padded one."""
    model = SmallModel(SmallConfig(kinds=(LayerKind.grouped_query,)))
    prompts = [[3, 1, 4], [1, 5, 9, 2, 6], [5]]
    plain = PlainDecoder(model, batch_size=3, max_context_len=48, inner="aot_eager")
    truth = plain.decode(prompts, max_new_tokens=12).sequences
    answers = [p + row + [0] * 9 for p, row in zip(prompts, truth, strict=True)]
    decoder = SpeculativeDecoder(
        model, KnowingDrafter(answers), batch_size=3, max_context_len=48, inner="aot_eager",
        backend="triton-unified",
    )  # fmt: skip
    # Requests end at different steps, and the bucket of 3 is padded from then on.
    found = decoder.decode(
        prompts, max_new_tokens=12, stop_when=lambda b, tokens: len(tokens) == 4 * (b + 1)
    )
    assert found.sequences == [row[: 4 * (b + 1)] for b, row in enumerate(truth)]
    assert found.accepted_per_step > 1


def test_accepted_indices_have_as_many_columns_as_they_are_read_by() -> None:
    """They were (B, depth + 1), and read with a stride of n."""
    tokens = torch.tensor([[7, 1, 2, 3, 4]] * 2)
    links = torch.tensor([[1, 2, 3, 4, -1]] * 2)
    place = torch.arange(10).view(2, 5)
    verified = verify_tree_greedy(
        tokens, place, links, torch.full_like(links, -1), tokens.roll(-1, 1), max_accept=3
    )
    assert verified.accept_index.tolist() == [[0, 1, 2], [5, 6, 7]]
    assert verified.predicts.view(2, 5)[:, :3].tolist() == [[1, 2, 3]] * 2


def test_ranks_have_masks_of_their_own() -> None:
    """Rank 1 of a data-parallel group used rank 0's."""
    first, second = (
        maybe_create_verify_mask(
            is_draft_runner=False, skip_prefill=False, max_bs=1, max_context_len=8,
            num_draft_tokens=3, device="cpu", is_read=True,
        )
        for _ in range(2)
    )  # fmt: skip
    assert first is not None
    assert second is not None
    parents = torch.tensor([[-1, 0, 1]]), torch.tensor([[-1, 0, 0]])
    for mask, rows in zip((first, second), parents, strict=True):
        build_tree_from_parents(
            rows, torch.tensor([2]), mask.buffer, num_draft_tokens=3, tree_mask_mode=mask.mode
        )
    assert first.buffer.view(3, 3)[2].tolist() == [True, True, True]
    assert second.buffer.view(3, 3)[2].tolist() == [True, False, True]


def test_the_root_sees_itself_alone() -> None:
    """Its row was all ones, so it saw what follows it."""
    mask = torch.ones(4 * (2 + 4), dtype=torch.bool)
    build_tree_from_parents(
        torch.tensor([[-1, 0, 0, 1]]), torch.tensor([2]), mask, num_draft_tokens=4,
        tree_mask_mode=FULL,
    )  # fmt: skip
    assert mask.view(4, 6)[0].tolist() == [True, True, True, False, False, False]


def test_two_ranks_accept_alike_what_one_of_them_predicts() -> None:
    """Argmax near a tie differed between ranks, which then waited for each other.

    What is accepted is a function of the predictions alone: broadcast those.
    """
    tokens = torch.tensor([[7, 1, 2]])
    links, nobody = torch.tensor([[1, -1, -1]]), torch.tensor([[-1, 2, -1]])
    logits = torch.zeros(1, 3, 4)
    logits[0, 0, 1], logits[0, 0, 2] = 1.0, 1.0 + 1e-7
    other = logits.flip(-1).flip(-1).clone()
    other[0, 0, 1] += 2e-6
    alone = [
        verify_tree_greedy(
            tokens, torch.arange(3).view(1, 3), links, nobody, rank.argmax(-1), max_accept=3
        ).accept_index.tolist()
        for rank in (logits, other)
    ]
    assert alone[0] != alone[1]
    predictions = logits.argmax(-1)
    together = [
        verify_tree_greedy(
            tokens, torch.arange(3).view(1, 3), links, nobody, predictions.clone(), max_accept=3
        ).accept_index.tolist()
        for _ in range(2)
    ]
    assert together[0] == together[1] == alone[0]


def test_a_reader_of_prefixes_without_a_plan_gets_its_prefixes() -> None:
    """A buffer in the device's default layout was read in another."""
    config = VerifyConfig(num_draft_tokens=3, max_context_len=8, topk=2)
    backend = TritonUnifiedBackend(config)
    backend.init_cuda_graph_state(1)
    mask = backend.verify_mask
    assert mask is not None
    lengths = torch.tensor([2])
    tree = build_tree_from_parents(
        torch.tensor([[-1, 0, 0]]), lengths, mask.buffer, num_draft_tokens=3,
        tree_mask_mode=mask.mode,
    )  # fmt: skip
    side = torch.randn(1, 8, 1, 4, generator=torch.Generator().manual_seed(0))
    layer = GroupedQuery(side[:, :3], side, side, 1.0)
    batch = VerifyBatch(
        torch.zeros(1, 1, dtype=torch.int32), 8, lengths, tree.positions.view(1, 3), mask.buffer,
        int(mask.mode),
    )  # fmt: skip
    out = backend.forward_verify(layer, backend.init_forward_metadata(batch))
    visible = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 1]]) == 1
    scores = side[0, :3, 0] @ side[0, :5, 0].T
    expected = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ side[0, :5, 0]
    torch.testing.assert_close(out[0, :, 0], expected)
