"""torchvm::expand_tree_pages: page tables of nodes, and attention through them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.attention_reference import SCALE, Case, dense, make_case, write_mask
from torchvm.backends.base import VerifyBatch, VerifyConfig
from torchvm.backends.flash_attention import FlashAttentionBackend
from torchvm.backends.layers import GroupedQuery
from torchvm.ops import tree_pages
from torchvm.ops.attention import tree_attention
from torchvm.ops.contracts import MaskRead, mask_readers
from torchvm.ops.layout import TreeMaskMode
from torchvm.ops.tree_pages import expand_tree_pages
from torchvm.testing import check_mask_contract

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

OP = torch.ops.torchvm.expand_tree_pages
FULL, QLEN, PACKED = TreeMaskMode
MODES_AND_DTYPES = [
    (FULL, torch.bool), (FULL, torch.uint8), (QLEN, torch.bool), (QLEN, torch.uint8),
    (PACKED, torch.uint8),
]  # fmt: skip
WILD = (2**62, -(2**62), 2**63 - 1, -(2**63), -1, 10**6)


def expected(case: Case, page_size: int) -> tuple[list[list[int]], list[int]]:
    """Slots and counts by plain loops."""
    slots, counts = [], []
    n, table = case.trees.shape[1], case.page_table.tolist()
    for b, length in enumerate(case.seq_lens.tolist()):
        for row in case.trees[b].tolist():
            seen = [length + j for j in range(n) if row[j]]
            places = [table[b][p // page_size] * page_size + p % page_size for p in seen]
            slots.append(places + [0] * (n - len(seen)))
            counts.append(len(seen))
    return slots, counts


def check(case: Case, page_size: int, found: tuple[Tensor, Tensor]) -> None:
    slots, counts = found
    assert (slots.dtype, counts.dtype) == (torch.int32, torch.int64)
    assert slots.is_contiguous()
    assert (slots.tolist(), counts.tolist()) == expected(case, page_size)


@pytest.mark.parametrize(("mode", "dtype"), MODES_AND_DTYPES)
@pytest.mark.parametrize("page_size", [1, 4, 16, 300])
def test_equals_plain_loops(page_size: int, mode: TreeMaskMode, dtype: torch.dtype) -> None:
    for n in (1, 2, 8, 9, 17, 33, 70):
        case = make_case([5, 0, 37, 16], n, page_size=page_size, seed=n)
        mask = write_mask(case, mode, dtype)
        if dtype is torch.uint8 and mode is not PACKED:
            mask *= torch.tensor([1, 255, 2])[torch.arange(len(mask)) % 3].byte()
        found = expand_tree_pages(
            mask, case.seq_lens, case.page_table,
            num_draft_tokens=n, page_size=page_size, tree_mask_mode=mode,
        )  # fmt: skip
        check(case, page_size, found)


def test_a_small_case_by_hand() -> None:
    """Three committed tokens in pages of two, then a root, two children and a child of node 2."""
    cells = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
    slots, counts = expand_tree_pages(
        torch.tensor(cells, dtype=torch.bool).flatten(), torch.tensor([3]),
        torch.tensor([[4, 9, 2, 7]], dtype=torch.int32),
        num_draft_tokens=4, page_size=2, tree_mask_mode=QLEN,
    )  # fmt: skip
    # Nodes stand at positions 3 .. 6: second of page 9, both of page 2, first of page 7.
    assert slots.tolist() == [[19, 0, 0, 0], [19, 4, 0, 0], [19, 5, 0, 0], [19, 5, 14, 0]]
    assert counts.tolist() == [1, 2, 2, 3]


def test_any_block_of_cells_is_followed() -> None:
    """Cells above the diagonal, rows that see nothing, and rows that see everything."""
    case = make_case([5, 0, 9], 6, page_size=4)
    case.trees.copy_(torch.rand(3, 6, 6, generator=torch.Generator().manual_seed(0)) < 0.4)
    case.trees[0, 3], case.trees[1, 2] = False, True
    for mode in TreeMaskMode:
        found = expand_tree_pages(
            write_mask(case, mode), case.seq_lens, case.page_table,
            num_draft_tokens=6, page_size=4, tree_mask_mode=mode,
        )  # fmt: skip
        check(case, 4, found)


@pytest.mark.parametrize("mode", list(TreeMaskMode))
@pytest.mark.parametrize("lengths", [[3, 0], []])
def test_opcheck(lengths: list[int], mode: TreeMaskMode) -> None:
    case = make_case(lengths or [1], 3, page_size=2)
    count = len(lengths)
    arguments = (
        write_mask(case, mode), case.seq_lens[:count], case.page_table[:count], 3, 2, int(mode),
    )  # fmt: skip
    torch.library.opcheck(OP.default, arguments)
    assert [part.shape for part in OP(*arguments)] == [(count * 3, 3), (count * 3,)]


def test_lengths_may_be_int32_and_inputs_strided() -> None:
    case = make_case([3, 0], 3, page_size=2)
    mask, sizes = write_mask(case, FULL), {"num_draft_tokens": 3, "page_size": 2}
    narrow = expand_tree_pages(
        mask, case.seq_lens.int(), torch.stack([case.page_table] * 2, -1)[..., 0],
        **sizes, tree_mask_mode=FULL,
    )  # fmt: skip
    check(case, 2, narrow)
    strided = torch.stack([case.seq_lens] * 2, -1)[..., 0]
    check(case, 2, OP(mask, strided, case.page_table, 3, 2, int(FULL)))
    with pytest.raises(ValueError, match=r"seq_lens must be torch\.int64, got torch\.int32"):
        OP(mask, case.seq_lens.int(), case.page_table, 3, 2, int(FULL))


@pytest.mark.parametrize("mode", list(TreeMaskMode))
def test_one_compile_serves_every_size(mode: TreeMaskMode) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def expand(query: Tensor, cache: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = OP(*tensors, query.shape[1], cache.shape[1], int(mode))
        return found

    torch._dynamo.reset()
    compiled = torch.compile(expand, backend=backend, fullgraph=True, dynamic=True)
    # No two sizes of the first batch are equal, or they would be taken for the same symbol. A row
    # of packed cells takes as many bytes for every n here.
    for lengths, n, page_size in (([3, 9, 40], 7, 5), ([2, 8, 5, 4, 0], 6, 16), ([20] * 4, 8, 3)):
        case = make_case(lengths, n, page_size=page_size)
        tensors = (case.query, case.k_cache, write_mask(case, mode), case.seq_lens)
        check(case, page_size, compiled(*tensors, case.page_table))
    assert len(graphs) == 1


def test_contract_says_tree_block_and_holds() -> None:
    (reader,) = mask_readers("torchvm::expand_tree_pages")
    assert (reader.arg, reader.mode_arg, reader.causal_arg) == (
        "tree_mask", "tree_mask_mode", None,
    )  # fmt: skip
    assert reader.modes == frozenset(TreeMaskMode)
    assert reader.read({"tree_mask_mode": 0}) is MaskRead.TREE_BLOCK
    case = make_case([5, 0, 3], 4, page_size=2)
    for mode, dtype in MODES_AND_DTYPES:
        mask = write_mask(case, mode, dtype)
        check_mask_contract(
            OP, (mask, case.seq_lens, case.page_table, 4, 2, int(mode)), {},
            mask_arg="tree_mask", seq_lens=case.seq_lens, num_draft_tokens=4, tree_mask_mode=mode,
        )  # fmt: skip


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"num_draft_tokens": 0}, "num_draft_tokens must be >= 1, got 0"),
    ({"page_size": 0}, "page_size must be >= 1, got 0"),
    ({"tree_mask_mode": 3}, "tree_mask_mode must be one of FULL_MASK"),
    ({"seq_lens": lambda t: t.float()}, r"seq_lens must be torch\.int64"),
    ({"seq_lens": lambda t: t.view(2, 1)}, "seq_lens must be 1-D"),
    ({"seq_lens": lambda t: t[0]}, "seq_lens must be 1-D"),
    ({"seq_lens": lambda t: t - 5}, r"seq_lens must be >= 0, got \[0, -2\]"),
    ({"page_table": lambda t: t.long()}, r"page_table must be torch\.int32"),
    ({"page_table": lambda t: t[0]}, "page_table must be 2-D"),
    ({"page_table": lambda t: t[0, 0]}, "page_table must be 2-D"),
    ({"page_table": lambda t: t[:1]}, r"page_table must be of shape \[2, 5\]"),
    ({"page_table": lambda t: t[:, :3]}, "page_table must be of at least 3 positions behind"),
    ({"page_table": lambda t: t[:, :0]}, "got 0 positions"),
    ({"page_table": lambda t: t.to("meta")}, "page_table must be on cpu, got meta"),
    ({"tree_mask": lambda t: t.float()}, r"tree_mask must be torch\.bool or torch\.uint8"),
    ({"tree_mask": lambda t: t.view(1, -1)}, "tree_mask must be 1-D"),
    ({"tree_mask": lambda t: t.to("meta")}, "tree_mask must be on cpu, got meta"),
    ({"tree_mask": lambda t: t[:17]}, "tree_mask must be of at least 18 elements"),
    ({"tree_mask": lambda t: t[:41]}, "at least 42 elements for FULL_MASK with these seq_lens"),
    ({"tree_mask_mode": 2}, r"tree_mask must be torch\.uint8 for QLEN_ONLY_BITPACKING"),
]


@pytest.mark.parametrize(("changes", "message"), ERRORS)
def test_errors_name_the_argument(changes: dict[str, Any], message: str) -> None:
    case = make_case([5, 3], 3, page_size=2)
    given: dict[str, Any] = {
        "tree_mask": write_mask(case, FULL), "seq_lens": case.seq_lens,
        "page_table": case.page_table, "num_draft_tokens": 3, "page_size": 2,
        "tree_mask_mode": int(FULL),
    }  # fmt: skip
    for name, change in changes.items():
        given[name] = change(given[name]) if callable(change) else change
    with pytest.raises(ValueError, match=message):
        expand_tree_pages(given.pop("tree_mask"), given.pop("seq_lens"), **given)


@pytest.mark.parametrize("mode", list(TreeMaskMode))
def test_a_gpu_is_never_waited_for(mode: TreeMaskMode) -> None:
    """Fake tensors have no data: to read a number of them raises, as it would wait on a GPU."""
    for n, batch in ((5, 3), (40, 0)):
        with FakeTensorMode():
            case = (
                torch.empty(batch * n * (64 + n), dtype=torch.uint8),
                torch.empty(batch, dtype=torch.int64),
                torch.empty(batch, 4, dtype=torch.int32),
            )
            slots, counts = tree_pages._cuda(*case, n, 16, int(mode))
            assert (slots.shape, counts.shape) == ((batch * n, n), (batch * n,))
            with pytest.raises(Exception, match="_local_scalar_dense"):
                counts.sum().item()


@pytest.mark.parametrize(("mode", "dtype"), MODES_AND_DTYPES)
def test_lengths_that_nobody_checked_index_nothing_outside(
    mode: TreeMaskMode, dtype: torch.dtype
) -> None:
    """As a GPU expands: their nodes are seen by nobody, and requests before them stay."""
    case = make_case([5, 9, 3], 4, page_size=4)
    mask, want = write_mask(case, mode, dtype), expected(case, 4)
    for wild in WILD:
        lengths = torch.tensor([5, wild, wild])
        slots, counts = tree_pages._cuda(mask, lengths, case.page_table, 4, 4, int(mode))
        assert (slots[:4].tolist(), counts[:4].tolist()) == (want[0][:4], want[1][:4])
        if wild != -1:
            assert counts[4:].tolist() == [0] * 8
            assert not slots[4:].any()
        elif mode is not FULL:
            # From -1 on, all nodes but the root stand in the table.
            assert counts[4:].tolist() == [count - 1 for count in want[1][4:]]


def test_a_negative_length_counts_as_none_in_the_layout() -> None:
    """So that requests behind it are found where they were built."""
    case = make_case([5, 0, 3], 4, page_size=4)
    slots, counts = tree_pages._cuda(
        write_mask(case, FULL), torch.tensor([5, -9, 3]), case.page_table, 4, 4, int(FULL)
    )
    want = expected(case, 4)
    for rows in (slice(4), slice(8, 12)):
        assert (slots[rows].tolist(), counts[rows].tolist()) == (want[0][rows], want[1][rows])
    assert counts[4:8].tolist() == [0] * 4


@pytest.mark.parametrize("columns", [0, 1, 2])
def test_a_table_that_is_too_short_holds_what_it_holds(columns: int) -> None:
    case = make_case([5, 0, 3], 4, page_size=4)
    table = case.page_table[:, :columns].contiguous()
    slots, counts = tree_pages._cuda(write_mask(case, QLEN), case.seq_lens, table, 4, 4, int(QLEN))
    for b, length in enumerate(case.seq_lens.tolist()):
        case.trees[b, :, max(columns * 4 - length, 0) :] = False
    assert (slots.tolist(), counts.tolist()) == expected(case, 4)
    empty = tree_pages._cuda(
        write_mask(case, QLEN)[:0], case.seq_lens[:0], table[:0], 4, 4, int(QLEN)
    )
    assert [part.shape for part in empty] == [(0, 4), (0,)]


def attend_in_two_parts(case: Case, mask: Tensor, mode: int, cap: float) -> Tensor:
    """The back end's own composition: the prefix, the tree's pages, and both joined."""
    n, page_size = case.query.shape[1], case.k_cache.shape[1]
    backend = FlashAttentionBackend(
        VerifyConfig(num_draft_tokens=n, max_context_len=1 << 10, topk=2)
    )
    positions = case.seq_lens[:, None] + case.trees.sum(-1) - 1
    batch = VerifyBatch(case.page_table, page_size, case.seq_lens, positions, mask, mode)
    layer = GroupedQuery(case.query, case.k_cache, case.v_cache, SCALE, logit_cap=cap)
    return backend.forward_verify(layer, backend.init_forward_metadata(batch))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", list(TreeMaskMode))
def test_attention_in_two_parts_equals_attention_to_the_tree(
    mode: TreeMaskMode, dtype: torch.dtype
) -> None:
    """Cache past the tree is NaN; prefix and spare cells of the mask are garbage."""
    rng = random.Random(int(mode))  # noqa: S311
    for seed in range(6):
        lengths = [rng.choice((0, 1, rng.randint(2, 60))) for _ in range(rng.randint(1, 5))]
        n, page_size, cap = rng.randint(1, 20), rng.choice((1, 4, 16, 128)), rng.choice((0.0, 3.0))
        case = make_case(lengths, n, dtype=dtype, page_size=page_size, seed=seed)
        mask = write_mask(case, mode, torch.uint8)
        if mode is FULL:
            mask[mask == 1] = 255
        out = attend_in_two_parts(case, mask, mode, cap)
        whole = tree_attention(
            *case[:5], mask,
            tree_mask_mode=mode, is_causal_chain=False, scale=SCALE, logit_cap=cap,
        )  # fmt: skip
        assert out.dtype == dtype
        bound = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
        torch.testing.assert_close(out, whole, rtol=bound, atol=bound)
        want = dense(case, cap=cap)
        torch.testing.assert_close(out.double(), want, rtol=bound, atol=bound)
