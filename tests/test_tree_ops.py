"""The tree ops as ops: opcheck, fakes on symbolic sizes, refusals, and what they leave alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, StatelessSymbolicContext

from tests import oracle
from tests.buffers import MODES_AND_DTYPES
from torchvm.ops.mask import alloc_verify_mask
from torchvm.ops.tree import build_tree, build_tree_from_parents

if TYPE_CHECKING:
    from torch import Tensor

BUILD = torch.ops.torchvm.build_tree.default
FROM_PARENTS = torch.ops.torchvm.build_tree_from_parents.default
TOPK, DEPTH, N = 2, 2, 4


def _inputs(size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """parent_list, selected_index, parents and seq_lens of `size` requests."""
    rows = ([[-1, 0, 1]], [[0, 1, 2]], [[-1, 0, 0, 1]])
    beams, selected, parents = (torch.tensor(row).repeat(size, 1) for row in rows)
    return beams, selected, parents, torch.arange(size) * 3


def _spread(tensor: Tensor) -> Tensor:
    """The same values at every other place of a larger tensor."""
    wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), -7, dtype=tensor.dtype)
    wide[..., ::2] = tensor
    return wide[..., ::2]


@pytest.mark.parametrize("size", [0, 1, 3])
@pytest.mark.parametrize(("mode", "dtype"), MODES_AND_DTYPES)
def test_opcheck(mode: int, dtype: torch.dtype, size: int) -> None:
    beams, selected, parents, seq_lens = _inputs(size)
    whole = torch.zeros(200, dtype=dtype)
    for mask, fill_prefix in ((whole, True), (whole[3:], False)):
        sizes = (TOPK, DEPTH, N, mode, fill_prefix)
        torch.library.opcheck(BUILD, (beams, selected, seq_lens, mask, *sizes))
        torch.library.opcheck(FROM_PARENTS, (parents, seq_lens, mask, N, mode, fill_prefix))
    strided = (_spread(beams), _spread(selected), _spread(seq_lens))
    assert size == 0 or not any(tensor.is_contiguous() for tensor in strided if size > 1)
    torch.library.opcheck(BUILD, (*strided, whole, TOPK, DEPTH, N, mode))
    torch.library.opcheck(FROM_PARENTS, (_spread(parents), strided[2], whole, N, mode))


@pytest.mark.parametrize("n", [1, 9, 33, 65])
def test_opcheck_of_packed_rows(n: int) -> None:
    mask = torch.zeros(2 * n * oracle.row_elements(oracle.PACKED, n), dtype=torch.uint8)
    parents = torch.arange(-1, n - 1).repeat(2, 1)
    torch.library.opcheck(FROM_PARENTS, (parents, torch.tensor([4, 0]), mask, n, oracle.PACKED))


@pytest.mark.parametrize("mode", [oracle.FULL, oracle.QLEN, oracle.PACKED])
def test_strided_inputs_give_the_same(mode: int) -> None:
    beams, selected, parents, seq_lens = _inputs(3)
    results = []
    for change in (lambda t: t, _spread):
        mask = torch.zeros(200, dtype=torch.uint8)
        inputs = [change(t) for t in (beams, selected, seq_lens, parents)]
        first, second, lengths, named = inputs
        before = [t.clone() for t in inputs]
        tree = build_tree(
            first, second, lengths, mask,
            topk=TOPK, depth=DEPTH, num_draft_tokens=N, tree_mask_mode=mode,
        )  # fmt: skip
        other = torch.zeros_like(mask)
        again = build_tree_from_parents(
            named, lengths, other, num_draft_tokens=N, tree_mask_mode=mode
        )
        assert all(torch.equal(*pair) for pair in zip(inputs, before, strict=True))
        results.append((*tree, mask))
        results.append((*again, other))
    for result in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(result, results[0], strict=True))


def test_int32_lengths_are_converted_by_the_functions_alone() -> None:
    beams, selected, parents, seq_lens = _inputs(2)
    short = seq_lens.int()
    mask, again = torch.zeros(2, 100, dtype=torch.bool)
    sizes: dict[str, Any] = {"num_draft_tokens": N, "tree_mask_mode": oracle.FULL}
    want = build_tree(beams, selected, seq_lens, mask, topk=TOPK, depth=DEPTH, **sizes)
    for found in (
        build_tree(beams, selected, short, again, topk=TOPK, depth=DEPTH, **sizes),
        build_tree_from_parents(parents, short, again, **sizes),
    ):
        assert all(torch.equal(*pair) for pair in zip(found, want, strict=True))
        assert torch.equal(mask, again)
    with pytest.raises(ValueError, match=r"seq_lens must be torch.int64, got torch.int32"):
        BUILD(beams, selected, short, mask, TOPK, DEPTH, N, oracle.FULL)
    with pytest.raises(ValueError, match=r"seq_lens must be torch.int64, got torch.int32"):
        FROM_PARENTS(parents, short, mask, N, oracle.FULL)


def test_any_width_at_depth_1() -> None:
    """Nothing of `parent_list` is read there, though its entries name a node."""
    seq_lens, selected = torch.tensor([5, 0]), torch.tensor([[0, 2, 5]] * 2)
    for width in (0, 1, 6):
        mask = torch.zeros(32, dtype=torch.bool)
        tree = build_tree(
            torch.zeros(2, width, dtype=torch.int64), selected, seq_lens, mask,
            topk=4, depth=1, num_draft_tokens=N, tree_mask_mode=oracle.QLEN,
        )  # fmt: skip
        assert tree.retrieve_next_token.tolist() == [[1, -1, -1, -1]] * 2
        assert tree.retrieve_next_sibling.tolist() == [[-1, 2, -1, -1]] * 2
        assert tree.positions.tolist() == [5, 6, 6, 6, 0, 1, 1, 1]


def _zeros(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(size, dtype=dtype)


REFUSALS = [
    ({"parent_list": _zeros(3, 4)}, r"parent_list must be of shape \[3, 3\], got \[3, 4\]"),
    ({"parent_list": _zeros(2, 3)}, r"parent_list must be of shape \[3, 3\], got \[2, 3\]"),
    ({"parent_list": _zeros(9)}, r"parent_list must be 2-D, got \[9\]"),
    ({"parent_list": _zeros(3, 3, dtype=torch.int32)}, r"parent_list must be torch.int64, got to"),
    ({"selected_index": _zeros(3, 4)}, r"selected_index must be of shape \[3, 3\], got \[3, 4\]"),
    ({"selected_index": _zeros(3, 3).float()}, r"selected_index must be torch.int64, got torch.f"),
    ({"seq_lens": _zeros(3, 1)}, r"seq_lens must be 1-D, got \[3, 1\]"),
    ({"seq_lens": _zeros(3).float()}, r"seq_lens must be torch.int64, got torch.float32"),
    ({"seq_lens": torch.tensor([4, -2, 0])}, r"seq_lens must be >= 0, got -2 for request 1"),
    ({"tree_mask": _zeros(200)}, r"tree_mask must be torch.bool or torch.uint8 .*got torch.int64"),
    ({"tree_mask": _zeros(20, 10).bool()}, r"tree_mask must be 1-D, got \[20, 10\]"),
    ({"tree_mask": _zeros(400).bool()[::2]}, r"tree_mask must be contiguous, got a stride of 2"),
    ({"tree_mask": _zeros(47).bool()}, r"tree_mask must be of at least 48 elements .*got 47"),
    ({"tree_mask": _zeros(83).bool()}, r"tree_mask must be of at least 84 elements .*got 83"),
    ({"seq_lens": torch.tensor([0, 0, 2**62])}, r"tree_mask must be of at least .*got 200"),
    ({"tree_mask": _zeros(200).bool(), "tree_mask_mode": 2}, r"tree_mask must be torch.uint8 for"),
    ({"tree_mask_mode": 3}, r"tree_mask_mode must be one of .*FULL_MASK.*got 3"),
    ({"num_draft_tokens": 0}, r"num_draft_tokens must be >= 1, got 0"),
    ({"num_draft_tokens": 5}, r"must be of shape \[3, [45]\], got \[3, [34]\]"),
    ({"topk": 0}, r"topk must be >= 1, got 0"),
    ({"depth": 0}, r"depth must be >= 1, got 0"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSALS)
def test_refusals_come_before_any_write(changes: dict[str, Any], message: str) -> None:
    beams, selected, parents, seq_lens = _inputs(3)
    mask = torch.zeros(200, dtype=torch.uint8)
    given: dict[str, Any] = {
        "parent_list": beams, "selected_index": selected, "seq_lens": seq_lens, "tree_mask": mask,
        "topk": TOPK, "depth": DEPTH, "num_draft_tokens": N, "tree_mask_mode": oracle.FULL,
        **changes,
    }  # fmt: skip
    given["tree_mask"].view(-1).fill_(1)
    before = given["tree_mask"].clone()
    with pytest.raises(ValueError, match=message):
        BUILD(**given)
    with pytest.raises(ValueError, match=message):
        build_tree(**given)
    if not changes.keys() & {"parent_list", "selected_index", "topk", "depth"}:
        for name in ("parent_list", "selected_index", "topk", "depth"):
            del given[name]
        with pytest.raises(ValueError, match=message):
            build_tree_from_parents(parents, **given)
    assert torch.equal(given["tree_mask"], before)


def test_parents_of_another_shape() -> None:
    with pytest.raises(ValueError, match=r"parents must be of shape \[2, 4\], got \[2, 3\]"):
        FROM_PARENTS(_zeros(2, 3), _zeros(2), torch.zeros(99).bool(), N, oracle.QLEN)


def test_mask_of_just_the_size() -> None:
    beams, selected, _, seq_lens = _inputs(3)
    for mode, size in ((oracle.FULL, 84), (oracle.QLEN, 48), (oracle.PACKED, 12)):
        mask = torch.full((size,), 0xA5, dtype=torch.uint8)
        BUILD(beams, selected, seq_lens, mask, TOPK, DEPTH, N, mode)
        assert 0xA5 not in mask.tolist()


def _symbolic(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    dynamic = torch.fx.experimental.symbolic_shapes.DimDynamic.DYNAMIC
    return mode.from_tensor(
        tensor,
        symbolic_context=StatelessSymbolicContext(dynamic_sizes=[dynamic] * tensor.dim()),
    )


@pytest.mark.parametrize("mode", [oracle.FULL, oracle.QLEN, oracle.PACKED])
def test_fakes_keep_sizes_symbolic(mode: int) -> None:
    fake = FakeTensorMode(shape_env=ShapeEnv())
    beams, selected, parents, seq_lens = (_symbolic(fake, tensor) for tensor in _inputs(3))
    mask = _symbolic(fake, torch.zeros(200, dtype=torch.uint8))
    with fake:
        n = parents.shape[1]
        for outputs in (
            BUILD(beams, selected, seq_lens, mask, TOPK, DEPTH, n, mode),
            FROM_PARENTS(parents, seq_lens, mask, n, mode),
        ):
            positions, *others = outputs
            assert str(positions.shape[0]) == str(seq_lens.shape[0] * n)
            for tensor in others:
                assert str(tensor.shape[1]) == str(n)
                assert tensor.stride() == (n, 1)
            for tensor in outputs:
                assert isinstance(tensor.shape[0], torch.SymInt)
                assert tensor.dtype == torch.int64
                assert tensor.device == torch.device("cpu")


def test_fake_checks_what_needs_no_data() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()):
        beams, selected, parents, seq_lens = (torch.empty_like(t) for t in _inputs(3))
        with pytest.raises(ValueError, match=r"tree_mask must be of at least 48 elements"):
            FROM_PARENTS(parents, seq_lens, torch.empty(47).bool(), N, oracle.FULL)
        with pytest.raises(ValueError, match=r"parent_list must be of shape \[3, 5\]"):
            BUILD(beams, selected, seq_lens, torch.empty(48).bool(), TOPK, 3, N, oracle.FULL)
        with pytest.raises(ValueError, match=r"seq_lens must be torch.int64"):
            FROM_PARENTS(parents, seq_lens.int(), torch.empty(48).bool(), N, oracle.FULL)


def test_one_graph_for_every_size() -> None:
    """Batch, n and lengths change; nothing is compiled again."""
    frames = 0

    def count(module: torch.fx.GraphModule, _: Any) -> Any:
        nonlocal frames
        frames += 1
        return module.forward

    @torch.compile(backend=count, dynamic=True, fullgraph=True)
    def step(parents: Tensor, seq_lens: Tensor) -> tuple[Tensor, ...]:
        size, n = parents.shape
        mask = alloc_verify_mask(size, n, 64, oracle.FULL)
        tree = build_tree_from_parents(
            parents, seq_lens, mask, num_draft_tokens=n, tree_mask_mode=oracle.FULL
        )
        return (*tree, mask)

    for size, n in ((3, 5), (4, 7), (2, 33), (7, 6)):
        parents = torch.arange(-1, n - 1).repeat(size, 1)
        lengths = [3 * b for b in range(size)]
        found = step(parents, torch.tensor(lengths))
        trees = [oracle.tree(oracle.parents_of_nodes(p), n) for p in parents.tolist()]
        wanted = oracle.outputs(trees, lengths)
        assert [t.tolist() for t in found[:4]] == list(wanted.values())
        cells = oracle.mask(trees, lengths, oracle.FULL, fill_prefix=True).cells
        assert found[4][: cells.size].int().tolist() == cells.tolist()
    assert frames == 1


def test_a_batch_whose_size_is_data() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(parents: Tensor, seq_lens: Tensor, live: Tensor) -> tuple[Tensor, Tensor]:
        rows = live.nonzero().squeeze(1)
        parents, seq_lens = parents[rows], seq_lens[rows]
        size, n = parents.shape
        mask = alloc_verify_mask(size, n, 64, oracle.QLEN)
        tree = build_tree_from_parents(
            parents, seq_lens, mask, num_draft_tokens=n, tree_mask_mode=oracle.QLEN
        )
        return tree.positions, mask

    parents = torch.tensor([[-1, 0, 0], [-1, 0, 1], [-1, -1, -1]])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found, mask = step(parents, torch.tensor([3, 9, 4]), torch.tensor([False, True, True]))
    assert found.tolist() == [9, 10, 11, 4, 5, 5]
    assert mask.int().tolist() == [1, 0, 0, 1, 1, 0, 1, 1, 1, 1, 0, 0, 1, 1, 0, 1, 0, 1]
