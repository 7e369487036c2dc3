"""The ops on a GPU: equal to oracle and CPU, no host sync, captured in CUDA graphs."""

from __future__ import annotations

import random
import warnings

import pytest
import torch

from tests import attention_launches, launches, oracle
from tests.attention_reference import FULL, HEAD_DIM, SCALE, Case, dense, make_case, write_mask
from tests.buffers import check_outputs
from tests.trees import SIZES, Batch, draw_batch
from torchvm.ops.attention import tree_attention
from torchvm.ops.candidates import select_draft_candidates
from torchvm.ops.mask import alloc_verify_mask
from torchvm.ops.tree import build_tree, build_tree_from_parents
from torchvm.ops.verify import verify_tree_greedy
from torchvm.tools.bench.gpu import beam_search

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that this PyTorch can use"),
]

GPU = torch.device("cuda")


def test_random_trees() -> None:
    launches.check_random_trees(GPU, 2000)


@pytest.mark.parametrize("n", SIZES)
def test_every_change_of_layout(n: int) -> None:
    launches.check_size(GPU, n, size=3)


def test_malformed_trees() -> None:
    launches.check_malformed_trees(GPU, 500)


def test_parent_rows() -> None:
    launches.check_parent_rows(GPU, 300)


def test_small_buffers() -> None:
    launches.check_small_buffers(GPU, 300)


def test_lengths_out_of_range() -> None:
    launches.check_lengths_out_of_range(GPU)


def test_rows_out_of_order() -> None:
    launches.check_rows_out_of_order(GPU, 100)


def test_verifications() -> None:
    launches.check_verifications(GPU, 500)


def test_selections() -> None:
    launches.check_selections(GPU, 500)


def test_more_requests_than_one_scan_of_lengths() -> None:
    for size in (256, 257, 700):
        launches.check_many_requests(GPU, size)


def test_full_mask_above_int32() -> None:
    lengths, n = [540_000_000, 5], 4
    batch = Batch(2, 2, n, [[-1, 0, 1]] * 2, [[0, 1, 2]] * 2, lengths)
    size = oracle.numel(oracle.FULL, lengths, n)
    if torch.cuda.mem_get_info()[0] < 2 * size:
        pytest.skip(f"needs {2 * size:,} free bytes of GPU memory")
    mask = torch.full((size + 8,), launches.IMPOSSIBLE, dtype=torch.uint8, device=GPU)
    parent_list, selected, seq_lens = (tensor.to(GPU) for tensor in batch.tensors())
    build_tree(
        parent_list, selected, seq_lens, mask,
        topk=2, depth=2, num_draft_tokens=n, tree_mask_mode=oracle.FULL,
    )  # fmt: skip
    begin = 0
    for request, length in zip(batch.trees(), lengths, strict=True):
        rows = mask[begin : begin + n * (length + n)].view(n, length + n)
        assert rows[:, length:].tolist() == request.rows
        assert all(bool((row[:length] == 1).all()) for row in rows)
        begin += rows.numel()
    assert mask[begin:].tolist() == [launches.IMPOSSIBLE] * 8


def _step(
    levels: tuple[list[torch.Tensor], ...], seq_lens: torch.Tensor, mask: torch.Tensor, mode: int
) -> tuple[torch.Tensor, ...]:
    """One decode step's ops: scores to tree to verification."""
    n, topk, depth = 16, 4, 3
    scores, tokens, parents = levels
    picked = select_draft_candidates(scores, tokens, parents, num_draft_tokens=n)
    tree = build_tree(
        picked.parent_list, picked.selected_index, seq_lens, mask,
        topk=topk, depth=depth, num_draft_tokens=n, tree_mask_mode=mode,
    )  # fmt: skip
    drafts = torch.nn.functional.pad(picked.draft_tokens, (1, 0))
    target = drafts.gather(1, tree.retrieve_next_token.clamp(min=0))
    return (*picked, *tree, *verify_tree_greedy(drafts, *tree[1:], target, max_accept=depth + 1))


@pytest.mark.parametrize("mode", [oracle.FULL, oracle.QLEN, oracle.PACKED])
def test_a_step_is_captured_once_for_any_lengths(mode: int) -> None:
    batch, n = 5, 16
    levels = beam_search(batch, 4, 3, GPU)
    seq_lens = torch.zeros(batch, dtype=torch.int64, device=GPU)
    mask = torch.empty(batch * n * (300 + n), dtype=torch.uint8, device=GPU)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _step(levels, seq_lens, mask, mode)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = _step(levels, seq_lens, mask, mode)
    for lengths in ([0] * batch, [300, 1, 0, 77, 5], [3] * batch):
        seq_lens.copy_(torch.tensor(lengths))
        mask.fill_(launches.IMPOSSIBLE)
        graph.replay()
        want_mask = torch.full((mask.numel(),), launches.IMPOSSIBLE, dtype=torch.uint8)
        on_cpu = tuple([level.cpu() for level in part] for part in levels)
        want = _step(on_cpu, torch.tensor(lengths), want_mask, mode)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(found, want, strict=True))
        assert torch.equal(mask.cpu(), want_mask)


def test_no_op_waits_for_the_gpu() -> None:
    levels = beam_search(5, 4, 3, GPU)
    seq_lens = torch.full((5,), 9, dtype=torch.int64, device=GPU)
    mask = torch.empty(5 * 16 * (9 + 16), dtype=torch.bool, device=GPU)
    _step(levels, seq_lens, mask, oracle.FULL)
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # PyTorch warns that this mode is a prototype.
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        _step(levels, seq_lens, mask, oracle.FULL)
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_ops_take_strided_inputs_and_empty_batches() -> None:
    rng = random.Random(9)  # noqa: S311
    batch = draw_batch(rng, 4, 3, 12, 4)
    for size in (4, 0):
        some = batch._replace(
            parent_list=batch.parent_list[:size],
            selected=batch.selected[:size],
            lengths=batch.lengths[:size],
        )
        strided = [tensor.to(GPU).repeat_interleave(2, -1)[..., ::2] for tensor in some.tensors()]
        mask = torch.zeros(size * 12 * 12 + 1, dtype=torch.bool, device=GPU)
        parent_list, selected, seq_lens = strided
        found = build_tree(
            parent_list, selected, seq_lens, mask,
            topk=4, depth=3, num_draft_tokens=12, tree_mask_mode=oracle.QLEN,
        )  # fmt: skip
        check_outputs([t.cpu() for t in found], oracle.outputs(some.trees(), some.lengths))


def test_opcheck() -> None:
    seq_lens = torch.tensor([3, 0], device=GPU)
    parents = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 2]], device=GPU)
    mask = torch.zeros(64, dtype=torch.bool, device=GPU)
    arguments = (parents, seq_lens, mask, 4, oracle.QLEN, True)
    torch.library.opcheck(torch.ops.torchvm.build_tree_from_parents.default, arguments)
    tree = build_tree_from_parents(
        parents, seq_lens, mask, num_draft_tokens=4, tree_mask_mode=oracle.QLEN
    )
    tokens = torch.tensor([[7, 1, 2, 3], [7, 1, 2, 3]], device=GPU)
    verification = (tokens, *tree[1:], tokens, 3)
    torch.library.opcheck(torch.ops.torchvm.verify_tree_greedy.default, verification)


def test_compiles() -> None:
    def forward(parents: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
        mask = alloc_verify_mask(2, 4, 50, oracle.FULL, dtype=torch.uint8, device=parents.device)
        build_tree_from_parents(
            parents, seq_lens, mask, num_draft_tokens=4, tree_mask_mode=oracle.FULL
        )
        return mask.sum() * 2

    parents = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 2]], device=GPU)
    seq_lens = torch.tensor([30, 41], device=GPU)
    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
    assert int(compiled(parents, seq_lens)) == int(forward(parents, seq_lens)) > 2 * 4 * 71


@pytest.mark.parametrize("n", attention_launches.SIZES)
def test_attention_of_every_size(n: int) -> None:
    attention_launches.check_size(GPU, n, (None, 1, 2, 3, 5, 17, None, 2, 64, 1))


def test_attention_with_every_option() -> None:
    for n in (3, 20):
        attention_launches.check_options(GPU, n)


def test_attention_to_any_block_of_cells() -> None:
    attention_launches.check_any_block(GPU)


def test_attention_and_hidden_values() -> None:
    attention_launches.check_hidden_values(GPU)


def test_attention_with_what_is_out_of_range() -> None:
    attention_launches.check_pages_out_of_range(GPU)
    attention_launches.check_lengths_out_of_range(GPU)
    attention_launches.check_small_masks(GPU)


def test_attention_to_strided_inputs() -> None:
    attention_launches.check_strides(GPU)


def test_attention_of_more_requests_than_one_scan_of_lengths() -> None:
    attention_launches.check_many_requests(GPU, 700)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", attention_launches.DTYPES)
def test_attention_to_long_contexts(dtype: torch.dtype, head_dim: int) -> None:
    for n, window in ((4, 0), (32, 1000)):
        case = make_case(
            [9000, 3], n, dtype=dtype, page_size=16, heads=8, kv_heads=2, head_dim=head_dim
        )
        attention_launches.check_case(case, oracle.PACKED, torch.uint8, GPU, window=window)


def _attend(case: Case, mask: torch.Tensor) -> torch.Tensor:
    return tree_attention(
        case.query, case.k_cache, case.v_cache, case.page_table, case.seq_lens, mask,
        tree_mask_mode=FULL, is_causal_chain=False, scale=SCALE,
    )  # fmt: skip


def _on_gpu(case: Case) -> Case:
    tensors = {name: getattr(case, name).to(GPU) for name in Case._fields[:5]}
    return case._replace(**tensors)


def test_attention_is_captured_once_for_any_lengths() -> None:
    batch, n = 3, 6
    # One case of the largest size, whose buffers the others are copied into.
    buffers = _on_gpu(make_case([300] * batch, n, page_size=16))
    mask = torch.zeros(batch * n * (300 + n) + 3, dtype=torch.bool, device=GPU)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _attend(buffers, mask)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = _attend(buffers, mask)
    for seed, lengths in enumerate(([0] * batch, [300, 1, 77], [16, 300, 0])):
        case = make_case(lengths, n, page_size=16, seed=seed)
        for mine, other in zip(buffers[:5], case[:5], strict=True):
            mine.fill_(-7 if mine is buffers.page_table else 0)
            mine[tuple(slice(size) for size in other.shape)] = other.to(GPU)
        cells = write_mask(case, FULL).to(GPU)
        mask[: len(cells)] = cells
        out.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(out.cpu().double(), dense(case), atol=1e-5, rtol=0)


def test_attention_does_not_wait_for_the_gpu() -> None:
    case = _on_gpu(make_case([20, 0, 7], 5, page_size=4))
    mask = write_mask(case, FULL).to(GPU)
    _attend(case, mask)
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # PyTorch warns that this mode is a prototype.
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        out = _attend(case, mask)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert out.shape == (3, 5, 6, HEAD_DIM)


def test_opcheck_of_attention() -> None:
    case = make_case([3, 0], 3, page_size=2)
    mask = write_mask(case, FULL).to(GPU)
    tensors = _on_gpu(case)[:5]
    arguments = (*tensors, mask, int(FULL), False, SCALE, 2, 1.5)
    torch.library.opcheck(torch.ops.torchvm.tree_attention.default, arguments)
