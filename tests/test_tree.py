"""build_tree against the oracle: literal cases, random trees, malformed trees, large masks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import oracle
from tests.buffers import MODES_AND_DTYPES, check_outputs, poisoned, poisons
from tests.trees import SIZES, Batch, draw_batch, draw_malformed, draw_sizes, num_candidates
from torchvm.ops.kernels.cpu_tree import HINT_MASK
from torchvm.ops.tree import DraftTree, build_tree

FULL, QLEN, PACKED = oracle.FULL, oracle.QLEN, oracle.PACKED
CASES = Path(__file__).parents[2] / "shared" / "cases" / "tree_cases.json"


def _build(batch: Batch, mask: torch.Tensor, mode: int, *, fill_prefix: bool = True) -> DraftTree:
    return build_tree(
        *batch.tensors(), mask, topk=batch.topk, depth=batch.depth, num_draft_tokens=batch.n,
        tree_mask_mode=mode, fill_prefix=fill_prefix,
    )  # fmt: skip


def _check(batch: Batch, combinations: Any = MODES_AND_DTYPES) -> None:
    """Compare every combination of mode and dtype, each with two poisons."""
    trees = batch.trees()
    expected = oracle.outputs(trees, batch.lengths)
    for mode, dtype in combinations:
        fill_prefix = (batch.n + len(batch.lengths)) % 3 != 0
        cells = oracle.mask(trees, batch.lengths, mode, fill_prefix)
        for poison in poisons(dtype):
            buffer = poisoned(oracle.numel(mode, batch.lengths, batch.n), dtype, poison)
            found = _build(batch, buffer.mask, mode, fill_prefix=fill_prefix)
            buffer.check(cells)
            check_outputs(found, expected)


def test_worked_example() -> None:
    batch = Batch(
        4, 4, 8,
        [
            [-1, 0, 1, 2, 3, 4, 8, 9, 10, 20, 24, 21, 28],
            [-1, 0, 1, 2, 3, 4, 5, 6, 7, 24, 28, 20, 21],
        ],
        [[0, 1, 4, 8, 20, 24, 36], [0, 4, 5, 6, 7, 24, 36]],
        [5, 10],
    )  # fmt: skip
    packed = torch.full((17,), 0xA5, dtype=torch.uint8)
    tree = _build(batch, packed, PACKED)
    assert packed.tolist() == [
        1, 3, 5, 11, 21, 43, 85, 171, 1, 3, 7, 11, 19, 35, 75, 203, 0xA5,
    ]  # fmt: skip
    assert tree.positions.tolist() == [5, 6, 6, 7, 7, 8, 8, 9, 10, 11, 12, 12, 12, 12, 13, 14]
    assert tree.retrieve_index.tolist() == [list(range(8)), list(range(8, 16))]
    assert tree.retrieve_next_token.tolist() == [
        [1, 3, 4, 5, 6, 7, -1, -1], [1, 2, -1, 6, -1, -1, 7, -1],
    ]  # fmt: skip
    assert tree.retrieve_next_sibling.tolist() == [
        [-1, 2, -1, -1, -1, -1, -1, -1], [-1, -1, 3, 4, 5, -1, -1, -1],
    ]  # fmt: skip
    full = torch.zeros(248, dtype=torch.bool)
    _build(batch, full, FULL)
    assert int(full.sum()) == 8 * (5 + 10) + sum(row.bit_count() for row in packed[:16].tolist())
    assert full[104 : 104 + 18].int().tolist() == [1] * 11 + [0] * 7
    _check(batch)


@pytest.mark.parametrize(
    ("sizes", "parent_list", "selected", "packed", "token", "sibling", "depths"),
    [
        pytest.param(
            (1, 3, 4), [-1, 0, 1], [0, 1, 2],
            [1, 3, 7, 15], [1, 2, 3, -1], [-1, -1, -1, -1], [0, 1, 2, 3], id="chain",
        ),
        pytest.param(
            (4, 1, 4), [], [0, 2, 3],
            [1, 3, 5, 9], [1, -1, -1, -1], [-1, 2, 3, -1], [0, 1, 1, 1], id="star",
        ),
        pytest.param((4, 1, 1), [], [], [1], [-1], [-1], [0], id="root alone"),
        pytest.param(
            (2, 2, 4), [-1, 0, 1], [0, 2, 4],
            [1, 3, 7, 9], [1, 2, -1, -1], [-1, -1, -1, -1], [0, 1, 2, 1], id="parent missing",
        ),
        pytest.param(
            (1, 2, 3), [0, 1], [0, 1],
            [1, 3, 5], [1, -1, -1], [-1, -1, -1], [0, 1, 1], id="own parent",
        ),
        pytest.param(
            (2, 2, 4), [-1, 4, 1], [0, 2, 4],
            [1, 3, 5, 9], [1, -1, -1, -1], [-1, -1, -1, -1], [0, 1, 1, 1], id="later parent",
        ),
        pytest.param(
            (2, 2, 4), [-1, 0, 1], [-4, 0, 6],
            [1, 3, 5, 9], [2, -1, -1, -1], [-1, -1, -1, -1], [0, 1, 1, 1], id="ids out of range",
        ),
        pytest.param(
            (1, 1, 3), [], [0, 1],
            [1, 3, 5], [1, -1, -1], [-1, -1, -1], [0, 1, 1], id="deeper than depth 1",
        ),
        pytest.param(
            (3, 2, 5), [-1, 2, 3, 6], [2, 3, 6, 9],
            [1, 3, 7, 15, 29], [1, 2, 3, 4, -1], [-1, -1, -1, -1, -1], [0, 1, 2, 3, 3],
            id="walk cut at depth",
        ),
    ],
)  # fmt: skip
def test_small_trees(
    sizes: tuple[int, int, int],
    parent_list: list[int],
    selected: list[int],
    packed: list[int],
    token: list[int],
    sibling: list[int],
    depths: list[int],
) -> None:
    batch = Batch(*sizes, [parent_list], [selected], [7])
    mask = torch.full((len(packed),), 0xA5, dtype=torch.uint8)
    tree = _build(batch, mask, PACKED)
    assert mask.tolist() == packed
    assert tree.retrieve_next_token.tolist() == [token]
    assert tree.retrieve_next_sibling.tolist() == [sibling]
    assert tree.positions.tolist() == [7 + depth for depth in depths]
    _check(batch)


@pytest.mark.skipif(not CASES.exists(), reason="the shared case file is not beside the project")
def test_shared_cases() -> None:
    cases = json.loads(CASES.read_text())["build_cases"]
    assert len(cases) > 5
    for case in cases:
        sizes, wanted = case["params"], case["expected"]
        source = case["inputs"] if "parent_list" in case["inputs"] else wanted
        batch = Batch(
            sizes["topk"], sizes["depth"], sizes["num_draft_tokens"],
            source["parent_list"], source["selected_index"], case["inputs"]["seq_lens"],
        )  # fmt: skip
        size, n = len(batch.lengths), batch.n
        mask = torch.zeros(size * n * n, dtype=torch.bool)
        tree = _build(batch, mask, QLEN)
        assert mask.view(size, n, n).int().tolist() == wanted["tree_block"], case["id"]
        for name, found in tree._asdict().items():
            assert found.tolist() == wanted.get(name, found.tolist()), (case["id"], name)
        _check(batch)


def test_random_trees() -> None:
    rng = random.Random(1)  # noqa: S311
    requests = 0
    while requests < 2000:
        batch = draw_batch(rng, *draw_sizes(rng, 96), rng.randint(0, 9))
        _check(batch)
        requests += len(batch.lengths)


@pytest.mark.parametrize("n", SIZES)
def test_every_change_of_layout(n: int) -> None:
    rng = random.Random(n)  # noqa: S311
    topk, depth = (5, 6) if n <= 129 else (16, 8)
    assert num_candidates(topk, depth) >= n - 1
    _check(draw_batch(rng, topk, depth, n, 2))


def test_more_candidates_than_hints() -> None:
    """A parent is found although a later id took its hint."""
    rng = random.Random(4)  # noqa: S311
    topk, depth, n = 32, 4, 1000
    batch = draw_batch(rng, topk, depth, n, 1)
    (ids,), (tree,) = batch.selected, batch.trees()
    hints = [i & HINT_MASK for i in ids]
    lost = [p for i, p in enumerate(tree.parents) if p and hints[p - 1] in hints[p : i - 1]]
    assert len(lost) > 50
    _check(batch)


def test_malformed_trees() -> None:
    rng = random.Random(2)  # noqa: S311
    kinds = {"lost": 0, "cut": 0, "found": 0}
    for _ in range(500):
        topk, depth, n = draw_sizes(rng, 40)
        batch = draw_malformed(rng, topk, depth, n, rng.randint(1, 6))
        for tree in batch.trees():
            kinds["lost"] += tree.parents[1:].count(None)
            kinds["found"] += sum(p is not None and p > 0 for p in tree.parents)
            kinds["cut"] += sum(
                tree.depths[i] != tree.depths[p] + 1 for i, p in enumerate(tree.parents) if p
            )
        _check(batch, [rng.choice(MODES_AND_DTYPES)])
    assert min(kinds.values()) > 500, kinds


def test_rows_that_do_not_ascend_harm_nobody_else() -> None:
    rng = random.Random(3)  # noqa: S311
    for _ in range(100):
        topk, depth, n = draw_sizes(rng, 40)
        batch = draw_batch(rng, topk, depth, n, 3)
        trees = batch.trees()
        highest = num_candidates(topk, depth)
        batch.selected[1][:] = [rng.randint(-2, highest + 2) for _ in range(n - 1)]
        batch.parent_list[1][:] = [rng.randint(-2, highest + 2) for _ in batch.parent_list[1]]
        for mode, dtype in MODES_AND_DTYPES:
            expected = oracle.mask(trees, batch.lengths, mode, fill_prefix=True)
            size = oracle.numel(mode, batch.lengths, n)
            buffer = poisoned(size, dtype, 1)
            found = _build(batch, buffer.mask, mode)
            begin = oracle.numel(mode, batch.lengths[:1], n)
            end = oracle.numel(mode, batch.lengths[:2], n)
            live = buffer.mask[:size].view(torch.uint8)
            expected.cells[begin:end] = live[begin:end].numpy()
            buffer.check(expected)
            for tensor, (name, want) in zip(
                found, oracle.outputs(trees, batch.lengths).items(), strict=True
            ):
                rows = tensor.view(3, n).tolist()
                wanted = torch.tensor(want).view(3, n).tolist()
                assert [rows[0], rows[2]] == [wanted[0], wanted[2]], name
            links = torch.stack([found.retrieve_next_token[1], found.retrieve_next_sibling[1]])
            assert bool(((links >= -1) & (links < n)).all())


@pytest.mark.parametrize("fill_prefix", [False, True])
def test_full_mask_above_int32(fill_prefix: bool) -> None:
    lengths, n = [540_000_000, 5], 4
    batch = Batch(2, 2, n, [[-1, 0, 1]] * 2, [[0, 1, 2]] * 2, lengths)
    size = oracle.numel(FULL, lengths, n)
    assert size > 2**31
    mask = torch.empty(size + 8, dtype=torch.uint8)
    mask[-8:] = 0xA5
    # Rows of the second request, whose cells all lie past 2**31, and the last row of the first.
    small = mask[n * (lengths[0] + n) :]
    small.fill_(0xA5)
    tree = _build(batch, mask, FULL, fill_prefix=fill_prefix)
    trees = batch.trees()
    for request, length, cells in ((0, lengths[0], mask), (1, lengths[1], small)):
        rows = cells[: n * (length + n)].view(n, length + n)
        assert rows[:, length:].tolist() == trees[request].rows
        if fill_prefix:
            bounds = [row[:length].aminmax() for row in rows]
            assert all(int(low) == int(high) == 1 for low, high in bounds)
        elif request == 1:
            assert bool((rows[:, :length] == 0xA5).all())
    assert small[n * (lengths[1] + n) :].tolist() == [0xA5] * 8
    assert tree.positions.tolist() == oracle.outputs(trees, lengths)["positions"]


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_cost_follows_the_live_cells() -> None:
    """A buffer for 256 requests at 1 Mi tokens is not touched past one request's cells."""
    capacity, n = 256 * 4 * (1_048_576 + 4), 4
    mask = torch.empty(capacity, dtype=torch.uint8)
    batch = Batch(2, 2, n, [[-1, 0, 1]], [[0, 1, 2]], [4096])
    before = _resident_bytes()
    _build(batch, mask, FULL)
    assert _resident_bytes() - before < 1 << 20
    assert bool((mask[: n * (4096 + n)] <= 1).all())
