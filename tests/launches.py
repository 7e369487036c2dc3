"""Checks of the GPU launchers on any device: a GPU, or the CPU under Triton's interpreter."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import torch

from tests import oracle
from tests.buffers import MODES_AND_DTYPES, check_outputs
from tests.trees import Batch, draw_batch, draw_malformed, draw_sizes
from torchvm.ops import tree as tree_ops
from torchvm.ops import verify as verify_ops
from torchvm.ops.kernels import triton_candidates, triton_tree, triton_verify

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    Build = Callable[[Tensor], Sequence[Tensor]]

OFFSETS = (0, 1, 2, 4, 8, 16, 37)
"""Where a mask begins inside its allocation: aligned for every width of store, and for none."""
SLACK = 75
IMPOSSIBLE = 0xA5
"""No cell holds it, so that one build shows what is written and what is not."""
POISONS = ((0,), (1,), (IMPOSSIBLE,))


def _launch(batch: Batch, mask: Tensor, mode: int, fill_prefix: bool) -> Sequence[Tensor]:
    parent_list, selected, seq_lens = batch.tensors()
    return triton_tree.build_tree(
        parent_list.to(mask.device), selected.to(mask.device), seq_lens.to(mask.device), mask,
        batch.topk, batch.depth, batch.n, mode, fill_prefix,
    )  # fmt: skip


def _check_buffer(
    build: Build,
    reference: Build | None,
    trees: list[oracle.Tree],
    lengths: list[int],
    mode: int,
    dtype: torch.dtype,
    fill_prefix: bool,
    device: torch.device,
    offset: int,
    poisons: Sequence[int],
    missing: int = 0,
) -> None:
    """Compare buffer and outputs with the oracle, and with the CPU kernel byte for byte.

    `missing` elements are cut off the end of the buffer: they and all around stay as they were.
    """
    expected = oracle.mask(trees, lengths, mode, fill_prefix)
    size = expected.cells.size - missing
    for poison in poisons:
        whole = torch.full((offset + size + SLACK,), poison, dtype=torch.uint8, device=device)
        # Past a buffer that is large enough there is room inside it as well.
        inside = slice(offset, offset + size + (0 if missing else SLACK // 2))
        before = whole.cpu().clone()
        found = [output.cpu() for output in build(whole[inside].view(dtype))]
        want = before.numpy().copy()
        written = expected.written[:size]
        want[offset : offset + size][written] = expected.cells[:size][written]
        np.testing.assert_array_equal(whole.cpu().numpy(), want)
        check_outputs(found, oracle.outputs(trees, lengths))
        if reference is not None and not missing:
            for mine, other in zip(found, reference(before[inside].view(dtype)), strict=True):
                assert torch.equal(mine, other)
            assert torch.equal(whole.cpu(), before)


def check_batch(
    batch: Batch,
    mode: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    fill_prefix: bool = True,
    offset: int = 0,
    poisons: Sequence[int] = (IMPOSSIBLE,),
    missing: int = 0,
) -> None:
    """Check `build_tree` on a batch, in one mode."""

    def build(mask: Tensor) -> Sequence[Tensor]:
        return _launch(batch, mask, mode, fill_prefix)

    def reference(mask: Tensor) -> Sequence[Tensor]:
        return tree_ops.build_tree(
            *batch.tensors(), mask, topk=batch.topk, depth=batch.depth, num_draft_tokens=batch.n,
            tree_mask_mode=mode, fill_prefix=fill_prefix,
        )  # fmt: skip

    _check_buffer(
        build, reference, batch.trees(), batch.lengths, mode, dtype, fill_prefix, device, offset,
        poisons, missing,
    )  # fmt: skip


def check_parents(
    parents: list[list[int]],
    lengths: list[int],
    n: int,
    mode: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    fill_prefix: bool = True,
    offset: int = 0,
) -> None:
    """Check `build_tree_from_parents` on a batch, in one mode."""
    named = torch.tensor(parents, dtype=torch.int64).view(len(lengths), n)
    seq_lens = torch.tensor(lengths, dtype=torch.int64)
    trees = [oracle.tree(oracle.parents_of_nodes(row), n - 1) for row in parents]

    def build(mask: Tensor) -> Sequence[Tensor]:
        return triton_tree.build_tree_from_parents(
            named.to(device), seq_lens.to(device), mask, n, mode, fill_prefix
        )

    def reference(mask: Tensor) -> Sequence[Tensor]:
        return tree_ops.build_tree_from_parents(
            named, seq_lens, mask,
            num_draft_tokens=n, tree_mask_mode=mode, fill_prefix=fill_prefix,
        )  # fmt: skip

    _check_buffer(
        build, reference, trees, lengths, mode, dtype, fill_prefix, device, offset, (IMPOSSIBLE,)
    )


def check_random_trees(device: torch.device, requests: int) -> None:
    """So many well-formed requests, nine a launch, modes, dtypes and offsets in turn."""
    rng = random.Random(1)  # noqa: S311
    for i in range(-(-requests // 9)):
        mode, dtype = MODES_AND_DTYPES[i % len(MODES_AND_DTYPES)]
        batch = draw_batch(rng, *draw_sizes(rng, 96), 9)
        check_batch(
            batch, mode, dtype, device,
            fill_prefix=i % 4 != 0, offset=OFFSETS[i % len(OFFSETS)], poisons=POISONS[i % 3],
        )  # fmt: skip


def check_size(device: torch.device, n: int, size: int) -> None:
    """One number of draft tokens in every mode, at an aligned and at an odd address.

    Of the two that are slowest to interpret, 1,000 is built in one mode alone.
    """
    rng = random.Random(n)  # noqa: S311
    topk, depth = (5, 6) if n <= 129 else (16, 8)
    batch = draw_batch(rng, topk, depth, n, size)
    for mode in (oracle.FULL, oracle.QLEN, oracle.PACKED) if n != 1000 else (oracle.FULL,):
        if n <= 129:
            check_batch(batch, mode, torch.uint8, device, poisons=(0, 1))
        check_batch(batch, mode, torch.uint8, device, offset=n % 37)


def check_many_requests(device: torch.device, size: int) -> None:
    """A batch whose lengths take more than one scan when there are more than 256."""
    batch = draw_batch(random.Random(8), 2, 2, 3, size, longest=3)  # noqa: S311
    check_batch(batch, oracle.FULL, torch.bool, device)


def check_malformed_trees(device: torch.device, launches: int) -> None:
    """Parents that are missing, the node itself, later nodes or nonsense; trees too deep."""
    rng = random.Random(2)  # noqa: S311
    lost = cut = 0
    for i in range(launches):
        topk, depth, n = draw_sizes(rng, 40)
        batch = draw_malformed(rng, topk, depth, n, rng.randint(1, 9))
        for tree in batch.trees():
            lost += tree.parents[1:].count(None)
            cut += sum(
                tree.depths[i] != tree.depths[p] + 1 for i, p in enumerate(tree.parents) if p
            )
        check_batch(batch, *MODES_AND_DTYPES[i % len(MODES_AND_DTYPES)], device, offset=i % 9)
    assert min(lost, cut) > launches, (lost, cut)


def check_parent_rows(device: torch.device, launches: int) -> None:
    """Parents given as nodes: trees, chains, and rows where many are no earlier node."""
    rng = random.Random(3)  # noqa: S311
    for i in range(launches):
        n, size = rng.randint(1, 70), rng.randint(0, 9)
        wild = rng.random() < 0.5
        chain = rng.random() < 0.2
        parents = [
            [
                rng.choice((-1, j, n, 2**62, -(2**63))) if wild and rng.random() < 0.2
                else max(j - 1, 0) if chain else rng.randrange(max(j, 1))
                for j in range(n)
            ]
            for _ in range(size)
        ]  # fmt: skip
        lengths = [rng.choice((0, rng.randint(0, 300))) for _ in range(size)]
        mode, dtype = MODES_AND_DTYPES[i % len(MODES_AND_DTYPES)]
        check_parents(
            parents, lengths, n, mode, dtype, device, offset=i % 5, fill_prefix=i % 2 > 0
        )


def check_small_buffers(device: torch.device, launches: int) -> None:
    """Buffers that end anywhere inside the batch: written up to their end, and not past it."""
    rng = random.Random(4)  # noqa: S311
    for i in range(launches):
        mode, dtype = MODES_AND_DTYPES[i % len(MODES_AND_DTYPES)]
        batch = draw_batch(rng, *draw_sizes(rng, 40), rng.randint(1, 9), longest=60)
        size = oracle.numel(mode, batch.lengths, batch.n)
        missing = rng.choice((1, size, rng.randint(1, size)))
        check_batch(
            batch, mode, dtype, device,
            fill_prefix=i % 2 > 0, offset=OFFSETS[i % len(OFFSETS)], missing=missing,
        )  # fmt: skip


def check_lengths_out_of_range(device: torch.device) -> None:
    """Lengths that are no lengths: the launch ends, and writes inside the buffer at most."""
    for lengths in ([2**62, 5, 2**62], [5, 2**63 - 1, 2**63 - 1], [-5, 3, 7], [-(2**63), 1, -1]):
        batch = Batch(2, 2, 4, [[-1, 0, 1]] * 3, [[0, 1, 2]] * 3, lengths)
        for numel in (0, 3, 200):
            whole = torch.full((16 + numel + 400,), 0xA5, dtype=torch.uint8, device=device)
            _launch(batch, whole[16 : 16 + numel], oracle.FULL, fill_prefix=True)
            outside = torch.cat([whole[:16], whole[16 + numel :]])
            assert bool((outside == 0xA5).all())


def check_rows_out_of_order(device: torch.device, launches: int) -> None:
    """A request whose ids do not ascend changes no other request."""
    rng = random.Random(5)  # noqa: S311
    for i in range(launches):
        mode, dtype = MODES_AND_DTYPES[i % len(MODES_AND_DTYPES)]
        topk, depth, n = draw_sizes(rng, 40)
        batch = draw_batch(rng, topk, depth, n, 3)
        trees = batch.trees()
        batch.selected[1][:] = [rng.randint(-2, 40) for _ in range(n - 1)]
        batch.parent_list[1][:] = [rng.randint(-2, 40) for _ in batch.parent_list[1]]
        size = oracle.numel(mode, batch.lengths, n)
        mask = torch.full((size + SLACK,), 1, dtype=torch.uint8, device=device)
        found = _launch(batch, mask.view(dtype), mode, fill_prefix=True)
        cells = oracle.mask(trees, batch.lengths, mode, fill_prefix=True).cells
        begin, end = (oracle.numel(mode, batch.lengths[:count], n) for count in (1, 2))
        got = mask.cpu().numpy()
        np.testing.assert_array_equal(got[:begin], cells[:begin])
        np.testing.assert_array_equal(got[end:size], cells[end:])
        assert bool((got[size:] == 1).all())
        expected = oracle.outputs(trees, batch.lengths)
        for tensor, (name, want) in zip(found, expected.items(), strict=True):
            rows, wanted = tensor.cpu().view(3, n), torch.tensor(want).view(3, n)
            assert torch.equal(rows[::2], wanted[::2]), name


def check_verifications(device: torch.device, launches: int) -> None:
    """Well-formed links in half of the launches, and in the others links to anywhere."""
    rng = random.Random(6)  # noqa: S311
    depths = set()
    for i in range(launches):
        n, size, width = rng.randint(1, 40), rng.randint(0, 9), rng.randint(1, 9)
        trees = [
            oracle.tree(oracle.parents_of_nodes([rng.randrange(max(j, 1)) for j in range(n)]), n)
            for _ in range(size)
        ]
        children, siblings = [t.next_token for t in trees], [t.next_sibling for t in trees]
        index = [[b * n + j for j in range(n)] for b in range(size)]
        if i % 2:
            odd = (-1, n, 2**62, -(2**63), *range(n))
            children, siblings = (
                [[rng.choice(odd) for _ in range(n)] for _ in range(size)] for _ in range(2)
            )
            for row in index:
                row[rng.randrange(n)] = rng.choice((-1, 0, size * n, size * n - 1, 2**62))
        tokens, target = (
            [[rng.randrange(3) for _ in range(n)] for _ in range(size)] for _ in range(2)
        )
        expected = oracle.verify_greedy(tokens, index, children, siblings, target, width)
        first, second, third, fourth, fifth = (
            torch.tensor(rows, dtype=torch.int64).view(size, n)
            for rows in (tokens, index, children, siblings, target)
        )
        found = triton_verify.verify_tree_greedy(
            first.to(device), second.to(device), third.to(device), fourth.to(device),
            fifth.to(device), width,
        )  # fmt: skip
        on_cpu = verify_ops.verify_tree_greedy(
            first, second, third, fourth, fifth, max_accept=width
        )
        for mine, other in zip(found, on_cpu, strict=True):
            assert torch.equal(mine.cpu(), other)
        check_outputs([output.cpu() for output in found], expected)
        depths |= set(found[2].tolist())
    assert {0, 1, 2, 3} <= depths


def check_selections(device: torch.device, launches: int) -> None:
    """Scores with ties, NaN, infinities and both zeros, in every dtype, of one block and more."""
    rng = random.Random(7)  # noqa: S311
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    special = (0.0, -0.0, 0.5, 0.25, 1.0, -1.0, float("nan"), float("inf"), -float("inf"), 1e-40)
    for i in range(launches):
        size, dtype = rng.randint(0, 4), dtypes[i % len(dtypes)]
        count = rng.choice((1, 2, 14, 64, 100, 2048, 2049, 4500) if i % 8 == 0 else (1, 2, 14, 70))
        n = rng.randint(1, min(count, 200) + 1)
        rows = [
            [rng.choice(special) if i % 3 else rng.random() for _ in range(count)]
            for _ in range(size)
        ]
        scores = torch.tensor(rows, dtype=dtype).view(size, count)
        tokens = torch.randint(32_000, (size, count), generator=torch.Generator().manual_seed(i))
        selected, drafts = triton_candidates.select_draft_candidates(
            scores.to(device), tokens.to(device), n
        )
        assert selected.shape == drafts.shape == (size, n - 1)
        assert selected.tolist() == [oracle.select(row, n - 1) for row in scores.tolist()]
        assert torch.equal(drafts.cpu(), tokens.gather(1, selected.cpu()))
