"""torchvm::unified_attention: every cell of the FULL_MASK counts, prefix columns included."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import torchvm
from tests.prefix_reference import SCALE, Batch, attend, draw_batch, full_mask
from torchvm import MaskRead, Reason, TreeMaskMode, unified_attention
from torchvm.ops.contracts import mask_readers
from torchvm.testing import check_mask_contract

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

OP = torch.ops.torchvm.unified_attention
ROUNDING = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def _check(found: Tensor, batch: Batch, window: int = 0, cap: float = 0.0) -> None:
    """Float32's error of sums, and one rounding."""
    assert found.is_contiguous()
    assert found.dtype is batch.query.dtype
    expected = attend(batch, window, cap)
    actual = found.double().numpy()
    np.testing.assert_allclose(actual, expected, rtol=ROUNDING[found.dtype], atol=2e-6)


@pytest.mark.parametrize("page_size", [1, 4, 16, 300])
@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (1, 0.0), (6, 0.0), (400, 3.0)])
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_equals_the_reference(dtype: torch.dtype, window: int, cap: float, page_size: int) -> None:
    batch = draw_batch([0, 37, 1, 16, 90], 7, dtype=dtype, page_size=page_size, seed=page_size)
    options: dict[str, Any] = {"scale": SCALE, "sliding_window": window, "logit_cap": cap}
    found = unified_attention(*batch.tensors, full_mask(batch), **options)
    _check(found, batch, window, cap)
    assert torch.equal(
        unified_attention(*batch.tensors, full_mask(batch, torch.uint8), **options), found
    )


@pytest.mark.parametrize("n", [1, 2, 17, 65])
@pytest.mark.parametrize("seed", range(4))
def test_any_number_of_nodes(n: int, seed: int) -> None:
    batch = draw_batch([3, 0, 20], n, seed=seed)
    _check(unified_attention(*batch.tensors, full_mask(batch), scale=SCALE), batch)


def _tiny(cells: list[list[int]], window: int = 0) -> list[list[float]]:
    """Two nodes after two tokens, keys alike and values 1, 2, 4 and 8: means of what is seen."""
    cache = torch.zeros(1, 4, 1, 1)
    values = torch.tensor([1.0, 2, 4, 8]).view(1, 4, 1, 1)
    mask = torch.tensor(cells, dtype=torch.uint8).flatten()
    table = torch.zeros(1, 1, dtype=torch.int32)
    found = unified_attention(
        torch.ones(1, 2, 1, 1), cache, values, table, torch.tensor([2]), mask, scale=1.0,
        sliding_window=window,
    )  # fmt: skip
    means: list[list[float]] = found.flatten().tolist()
    return means


@pytest.mark.parametrize(
    ("cells", "window", "means"),
    [
        ([[1, 1, 1, 0], [1, 1, 1, 1]], 0, [7 / 3, 15 / 4]),
        ([[0, 1, 1, 0], [1, 0, 1, 1]], 0, [3.0, 13 / 3]),
        ([[0, 0, 1, 0], [0, 0, 0, 0]], 0, [4.0, 0.0]),
        ([[0, 0, 0, 0], [0, 0, 0, 9]], 0, [0.0, 8.0]),
        # Positions are 0, 1, then 2 for the root, and 3 for its child.
        ([[1, 1, 1, 0], [1, 1, 1, 1]], 2, [3.0, 6.0]),
        ([[1, 1, 1, 0], [1, 1, 1, 1]], 1, [4.0, 8.0]),
        # A node of one cell stands where the root does, whatever its row in the cache.
        ([[1, 1, 1, 0], [1, 1, 0, 1]], 2, [3.0, 5.0]),
        # A node without cells in the tree stands one before the root.
        ([[1, 1, 1, 0], [1, 1, 0, 0]], 2, [3.0, 1.5]),
    ],
)
def test_literal_cases(cells: list[list[int]], window: int, means: list[float]) -> None:
    assert _tiny(cells, window) == pytest.approx(means)


def test_keys_and_values_hidden_from_every_node_may_be_anything() -> None:
    batch = draw_batch([11], 3, page_size=4)
    hidden = [0, 5, 12]
    for row in batch.cells[0]:
        for p in hidden:
            row[p] = 0
    for p in hidden:
        page = batch.page_table[0, p // 4]
        batch.k_cache[page, p % 4] = batch.v_cache[page, p % 4] = math.nan
    _check(unified_attention(*batch.tensors, full_mask(batch), scale=SCALE), batch)


@pytest.mark.parametrize("lengths", [[3, 0], [2], []])
def test_opcheck(lengths: list[int]) -> None:
    batch = draw_batch(lengths, 3, page_size=2)
    torch.library.opcheck(OP.default, (*batch.tensors, full_mask(batch), SCALE, 2, 1.5))


def test_strided_inputs() -> None:
    batch = draw_batch([3, 0], 3)
    expected = unified_attention(*batch.tensors, full_mask(batch), scale=SCALE)
    strided = [torch.stack([t, t], -1)[..., 0] for t in batch.tensors]
    torch.library.opcheck(OP.default, (*strided, full_mask(batch), SCALE))
    assert torch.equal(OP(*strided, full_mask(batch), SCALE), expected)


def test_one_compile_serves_every_size() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def run(mask: Tensor, *tensors: Tensor) -> Tensor:
        out: Tensor = OP(*tensors, mask, SCALE)
        return out

    torch._dynamo.reset()
    compiled = torch.compile(run, backend=backend, fullgraph=True, dynamic=True)
    # No two sizes of the first batch are equal, or they would be taken for the same symbol.
    for lengths, n in (([3, 9, 40], 9), ([2, 8, 5, 4, 0], 7), ([20] * 4, 11)):
        batch = draw_batch(lengths, n)
        mask = full_mask(batch)
        assert torch.equal(compiled(mask, *batch.tensors), run(mask, *batch.tensors))
    assert len(graphs) == 1


def test_contract_says_full_and_holds() -> None:
    (reader,) = mask_readers("torchvm::unified_attention")
    assert (reader.arg, reader.mode_arg, reader.causal_arg) == ("tree_mask", None, None)
    assert reader.read({}) is MaskRead.FULL
    assert reader.modes == {TreeMaskMode.FULL_MASK}
    batch = draw_batch([5, 0, 3], 4)
    for dtype in (torch.bool, torch.uint8):
        check_mask_contract(
            OP, (*batch.tensors, full_mask(batch, dtype), SCALE), {}, mask_arg="tree_mask",
            seq_lens=batch.seq_lens, num_draft_tokens=4, tree_mask_mode=0,
        )  # fmt: skip


def test_every_live_cell_matters_and_no_other() -> None:
    """The claim of FULL is needed: a reader of the tree block alone would pass by the prefix."""
    batch = draw_batch([3, 2], 2)
    batch = batch._replace(cells=[[[1] * len(row) for row in rows] for rows in batch.cells])
    mask = full_mask(batch, spare=6)
    expected = unified_attention(*batch.tensors, mask, scale=SCALE)
    live = 2 * 5 + 2 * 4
    for cell in range(len(mask)):
        changed = mask.clone()
        changed[cell] = not changed[cell]
        found = unified_attention(*batch.tensors, changed, scale=SCALE)
        differ = (found != expected).flatten(2).any(2)
        owner = (cell // 5, 0) if cell < 10 else ((cell - 10) // 4, 1)
        want = [[cell < live and (i, b) == owner for i in range(2)] for b in range(2)]
        assert differ.tolist() == want


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_compiled_graph_keeps_the_full_mask(dynamic: bool) -> None:
    batch = draw_batch([9, 4], 3)

    def step(parents: Tensor, *tensors: Tensor) -> Tensor:
        bs, n = parents.shape
        mask = torchvm.alloc_verify_mask(bs, n, 20, 0)
        torch.ops.torchvm.build_tree_from_parents(parents, tensors[4], mask, n, 0)
        out: Tensor = OP(*tensors, mask, SCALE)
        return out

    parents = torch.tensor([[0, 0, 0], [0, 0, 1]])
    torch._dynamo.reset()
    torchvm.clear_reports()
    compiled = torch.compile(
        step, backend="torchvm", fullgraph=True, dynamic=dynamic, options={"inner": "aot_eager"}
    )
    assert torch.equal(compiled(parents, *batch.tensors), step(parents, *batch.tensors))
    (report,) = torchvm.reports()
    assert report.verdict is Reason.FULL_READ
    assert report.final_mode is report.declared_mode is TreeMaskMode.FULL_MASK
    assert report.final_bytes == report.declared_bytes
    assert [(r.op, r.reads) for r in report.readers] == [
        ("torchvm::unified_attention", MaskRead.FULL)
    ]


ERRORS: list[tuple[dict[str, Callable[[Tensor], Tensor]], dict[str, Any], str]] = [
    ({"query": lambda t: t.double()}, {}, "query must be one of float32, float16"),
    ({"k_cache": lambda t: t[0]}, {}, "k_cache must be 4-D"),
    ({"page_table": lambda t: t.long()}, {}, "page_table must be torch.int32"),
    ({"page_table": lambda t: t[:, :1]}, {}, "page_table must be of at least 4 columns"),
    ({"page_table": lambda t: t + 100}, {}, r"page_table must be of page ids in \[0, 9\)"),
    ({"seq_lens": lambda t: t.float()}, {}, "seq_lens must be torch.int64, got torch.float32"),
    ({"seq_lens": lambda t: t - 5}, {}, r"seq_lens must be >= 0, got \[0, -2\]"),
    ({}, {"sliding_window": -1}, "sliding_window must be >= 0"),
    ({}, {"logit_cap": -1.0}, "logit_cap must be >= 0"),
    ({"mask": lambda t: t.float()}, {}, "tree_mask must be torch.bool or torch.uint8"),
    ({"mask": lambda t: t.view(1, -1)}, {}, "tree_mask must be 1-D"),
    ({"mask": lambda t: t.repeat(2)[::2]}, {}, "tree_mask must be contiguous, got a stride of 2"),
    ({"mask": lambda t: t[:17]}, {}, "tree_mask must be of at least 18 elements"),
    ({"mask": lambda t: t[:41]}, {}, "at least 42 elements for FULL_MASK with these seq_lens"),
]


@pytest.mark.parametrize(("changes", "options", "message"), ERRORS)
def test_errors_say_what_was_expected_and_what_came(
    changes: dict[str, Callable[[Tensor], Tensor]], options: dict[str, Any], message: str
) -> None:
    batch = draw_batch([5, 3], 3, page_size=2)
    names = ("query", "k_cache", "v_cache", "page_table", "seq_lens", "mask")
    tensors = dict(zip(names, (*batch.tensors, full_mask(batch)), strict=True))
    changed = [changes[name](t) if name in changes else t for name, t in tensors.items()]
    with pytest.raises(ValueError, match=message):
        unified_attention(*changed, **({"scale": SCALE} | options))


def test_int32_lengths_are_converted_by_the_function_and_refused_by_the_op() -> None:
    batch = draw_batch([5, 3], 3)
    mask = full_mask(batch)
    narrow = (*batch.tensors[:4], batch.seq_lens.int())
    expected = unified_attention(*batch.tensors, mask, scale=SCALE)
    assert torch.equal(unified_attention(*narrow, mask, scale=SCALE), expected)
    with pytest.raises(ValueError, match=r"seq_lens must be torch\.int64, got torch\.int32"):
        OP(*narrow, mask, SCALE)
