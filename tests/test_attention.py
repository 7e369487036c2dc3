"""torchvm::tree_attention against a float64 dense reference, in every mode and cache layout."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.attention_reference import (
    FULL,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    PACKED,
    QLEN,
    SCALE,
    Case,
    dense,
    make_case,
    write_mask,
)
from torchvm.ops.attention import tree_attention
from torchvm.ops.contracts import MaskRead, mask_readers
from torchvm.ops.kernels import cpu_attention
from torchvm.ops.kernels.threads import run_parts, split
from torchvm.ops.layout import TreeMaskMode

if TYPE_CHECKING:
    from collections.abc import Callable


def run(case: Case, mask: torch.Tensor | None, mode: int, **options: Any) -> torch.Tensor:
    options = {"is_causal_chain": False, "scale": SCALE} | options
    return tree_attention(*case[:5], mask, tree_mask_mode=mode, **options)


@pytest.mark.parametrize("page_size", [None, 16], ids=["contiguous", "paged"])
@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (5, 0.0), (1, 0.0), (300, 4.0), (0, 2.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_error_is_at_most_that_of_dense_attention_in_the_same_dtype(
    dtype: torch.dtype, window: int, cap: float, page_size: int | None
) -> None:
    case = make_case([0, 37, 1, 16, 200], 9, dtype=dtype, page_size=page_size)
    exact = dense(case, window=window, cap=cap)
    bound = (dense(case, dtype=dtype, window=window, cap=cap).double() - exact).abs().max()
    out = run(case, write_mask(case, FULL), FULL, sliding_window=window, logit_cap=cap)
    assert out.dtype == dtype
    assert out.is_contiguous()
    error = (out.double() - exact).abs().max()
    assert error <= bound * (2 if dtype == torch.float32 else 1), (error, bound)


@pytest.mark.parametrize("n", [1, 3, 8, 9, 17, 33, 65, 130])
def test_every_mode_and_mask_dtype_gives_the_same_bits(n: int) -> None:
    case = make_case([5, 0, 12], n, seed=n)
    expected = run(case, write_mask(case, FULL), FULL)
    torch.testing.assert_close(expected.double(), dense(case), atol=1e-5, rtol=0)
    for mode, dtype in ((FULL, torch.uint8), (QLEN, torch.bool), (QLEN, torch.uint8)):
        assert torch.equal(run(case, write_mask(case, mode, dtype), mode), expected)
    assert torch.equal(run(case, write_mask(case, PACKED), PACKED), expected)


@pytest.mark.parametrize("n", [9, 70])
def test_any_block_of_cells_is_followed(n: int) -> None:
    """Cells above the diagonal too, which no tree has; the diagonal keeps every row seeing."""
    case = make_case([5, 0, 90], n)
    cells = torch.rand(3, n, n, generator=torch.Generator().manual_seed(n)) < 0.3
    case = case._replace(trees=cells | torch.eye(n, dtype=torch.bool))
    for mode in TreeMaskMode:
        out = run(case, write_mask(case, mode), mode)
        torch.testing.assert_close(out.double(), dense(case), atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [0, 4500])
@pytest.mark.parametrize("page_size", [None, 64])
def test_long_contexts(window: int, page_size: int | None) -> None:
    case = make_case([8197, 3], 3, page_size=page_size)
    out = run(case, write_mask(case, QLEN), QLEN, sliding_window=window)
    torch.testing.assert_close(out.double(), dense(case, window=window), atol=1e-5, rtol=0)


def test_scores_of_very_different_size() -> None:
    """The running maximum must rescale what earlier keys gave, in both directions."""
    for factor in (1e-3, 1e3):
        case = make_case([4096 + 50], 2)
        case.k_cache[..., :4096, :, :] *= factor
        case.keys[0][:4096] *= factor
        out = run(case, write_mask(case, QLEN), QLEN)
        torch.testing.assert_close(out.double(), dense(case), atol=1e-4, rtol=0)


@pytest.mark.parametrize("window", [0, 2])
def test_a_chain_needs_no_mask(window: int) -> None:
    case = make_case([4, 0], 6)
    chain = torch.ones(2, 6, 6, dtype=torch.bool).tril()
    expected = dense(case, trees=chain, window=window)
    options = {"is_causal_chain": True, "sliding_window": window}
    out = run(case, None, FULL, **options)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)
    for mask in (torch.zeros(0, dtype=torch.bool), torch.ones(2, 2)):
        assert torch.equal(run(case, mask, FULL, **options), out)


def test_windows_of_blocks_that_are_no_trees() -> None:
    """A node that sees later ones stands behind them, however early it comes."""
    case = make_case([5, 0], 6)
    case.trees[:] = True
    case.trees[:, 3:, 0] = False
    for window in (1, 2, 4):
        out = run(case, write_mask(case, QLEN), QLEN, sliding_window=window)
        expected = dense(case, window=window)
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=0)


def test_a_row_that_sees_nothing_gives_zeros() -> None:
    case = make_case([0, 3], 2)
    case.trees[:, 1] = False
    out = run(case, write_mask(case, QLEN), QLEN)
    assert torch.equal(out[0, 1], torch.zeros(HEADS, HEAD_DIM))
    assert out[0, 0].abs().min() > 0
    assert out[1].isfinite().all()
    assert out[1, 1].abs().min() > 0


def test_scratch_does_not_grow_with_the_context() -> None:
    """A mask of n x context cells would take 32 MiB as bytes, 128 MiB as float32."""
    length, n = 1 << 20, 32
    query = torch.randn(1, n, 1, 2)
    cache = torch.randn(1, length + n, 1, 2)
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([length])
    mask = torch.ones(n, n, dtype=torch.bool).tril().flatten()

    def memory(name: str) -> int:
        (line,) = re.findall(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(line)

    Path("/proc/self/clear_refs").write_text("5")  # Resets the peak.
    before = memory("VmRSS")
    tree_attention(
        query, cache, cache, table, lengths, mask,
        tree_mask_mode=QLEN, is_causal_chain=False, scale=1.0,
    )  # fmt: skip
    assert memory("VmHWM") - before < 16 << 10


@pytest.mark.parametrize(
    ("costs", "units", "parts", "bounds"),
    [
        ([5], 4, 2, [0, 2, 4]),
        ([5], 1, 3, [0, 1]),
        ([1, 1, 1, 1], 1, 2, [0, 2, 4]),
        ([9, 1, 1, 1], 2, 2, [0, 1, 8]),
        ([1, 1, 1, 9], 2, 2, [0, 6, 8]),
        ([0, 4, 0], 3, 2, [0, 4, 9]),
        ([3, 3], 1, 1, [0, 2]),
    ],
)
def test_tasks_are_split_by_cost(
    costs: list[int], units: int, parts: int, bounds: list[int]
) -> None:
    assert split(costs, units, parts) == bounds


@pytest.mark.parametrize("n", [5, 70])
def test_threads_give_the_same_bits(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([40, 3, 0, 90], n)
    mask = write_mask(case, FULL)
    threads = torch.get_num_threads()
    parts: list[int] = []

    def noted(run: Callable[[int, int], object], bounds: list[int]) -> None:
        parts.append(len(bounds) - 1)
        run_parts(run, bounds)

    monkeypatch.setattr(cpu_attention, "_WORTH_A_THREAD", 0)
    monkeypatch.setattr(cpu_attention, "run_parts", noted)
    try:
        torch.set_num_threads(1)
        expected = run(case, mask, FULL)
        for count in (2, 3, 7):
            torch.set_num_threads(count)
            assert torch.equal(run(case, mask, FULL), expected)
    finally:
        torch.set_num_threads(threads)
    assert parts[:2] == [2, 3]
    assert parts[2] > 3


def test_not_a_number_is_passed_on() -> None:
    """By the values and keys that are seen, in float16 bit for bit an infinity or NaN."""
    case = make_case([6, 6, 6], 2, dtype=torch.float16)
    case.v_cache[case.page_table[0, 0], 3, 0, 5] = math.nan
    case.k_cache[case.page_table[1, 0], 3, 0, 5] = math.nan
    case.v_cache[case.page_table[2, 0], 3, 0, 5] = -math.inf
    out = run(case, write_mask(case, QLEN), QLEN)
    group = HEADS // KV_HEADS
    assert out[0, :, :group, 5].isnan().all()
    assert out[0, :, group:].isfinite().all()
    assert out[1, :, :group].isnan().all()
    assert (out[2, :, :group, 5] == -math.inf).all()
    assert out.isfinite().sum() == out.numel() - 2 * group * (1 + HEAD_DIM + 1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mode", list(TreeMaskMode))
@pytest.mark.parametrize("lengths", [[3, 0], [2], []])
def test_opcheck(lengths: list[int], mode: TreeMaskMode, causal: bool) -> None:
    case = make_case(lengths or [1], 3, page_size=2)
    count = len(lengths)
    mask = write_mask(case, mode)
    args = (
        case.query[:count],
        case.k_cache,
        case.v_cache,
        case.page_table[:count],
        case.seq_lens[:count],
        None if causal and mode == QLEN else mask,
        int(mode), causal, SCALE, 2, 1.5,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.torchvm.tree_attention.default, args)


def test_opcheck_on_strided_inputs() -> None:
    case = make_case([3, 0], 3)
    args = (
        case.query.transpose(1, 2).contiguous().transpose(1, 2),
        case.k_cache.transpose(1, 2).contiguous().transpose(1, 2),
        case.v_cache.flip(0).flip(0)[::1],
        torch.stack([case.page_table, case.page_table], -1)[..., 0],
        torch.stack([case.seq_lens, case.seq_lens], -1)[..., 0],
        write_mask(case, FULL),
        int(FULL), False, SCALE,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.torchvm.tree_attention.default, args)
    expected = run(case, write_mask(case, FULL), FULL)
    assert torch.equal(torch.ops.torchvm.tree_attention(*args), expected)


def test_one_compile_serves_every_size() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def attend(case: Case, mask: torch.Tensor) -> torch.Tensor:
        tensors = (case.query, case.k_cache, case.v_cache, case.page_table, case.seq_lens)
        out: torch.Tensor = torch.ops.torchvm.tree_attention(
            *tensors, mask, int(QLEN), False, SCALE
        )
        return out

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend=backend, fullgraph=True, dynamic=True)
    # No two sizes of the first batch are equal, or they would be taken for the same symbol.
    for lengths, n in (([3, 9, 40], 9), ([2, 8, 5, 4, 0], 7), ([20] * 4, 11)):
        case = make_case(lengths, n, page_size=4)
        mask = write_mask(case, QLEN)
        assert torch.equal(compiled(case, mask), attend(case, mask))
    assert len(graphs) == 1


def test_contract_says_what_is_read() -> None:
    (reader,) = mask_readers("torchvm::tree_attention")
    assert (reader.arg, reader.mode_arg, reader.causal_arg) == (
        "tree_mask", "tree_mask_mode", "is_causal_chain",
    )  # fmt: skip
    assert reader.modes == frozenset(TreeMaskMode)
    constants = {"tree_mask_mode": 0, "scale": 1.0, "sliding_window": 0, "logit_cap": 0.0}
    assert reader.read(constants | {"is_causal_chain": True}) is MaskRead.NOTHING
    assert reader.read(constants | {"is_causal_chain": False}) is MaskRead.TREE_BLOCK


def _with(case: Case, **changes: Any) -> Case:
    return case._replace(**changes)


ERRORS: list[tuple[Callable[[Case], Case], dict[str, Any], str]] = [
    (lambda c: _with(c, query=c.query[0]), {}, "query must be 4-D"),
    (lambda c: _with(c, query=c.query.double()), {}, "query must be one of float32, float16"),
    (lambda c: _with(c, query=c.query[:, :0]), {}, "query must be of at least one draft token"),
    (lambda c: _with(c, query=c.query[..., :3]), {}, "k_cache must be of query's head_dim 3"),
    (lambda c: _with(c, query=c.query[:, :, :5]), {}, "multiple of k_cache's 2 heads"),
    (lambda c: _with(c, k_cache=c.k_cache[0]), {}, "k_cache must be 4-D"),
    (lambda c: _with(c, v_cache=c.v_cache[:1]), {}, "v_cache must be of k_cache's shape"),
    (lambda c: _with(c, v_cache=c.v_cache.half()), {}, "v_cache must be of query's dtype"),
    (lambda c: _with(c, page_table=c.page_table.long()), {}, "page_table must be torch.int32"),
    (lambda c: _with(c, page_table=c.page_table[:1]), {}, "page_table must be 2-D with"),
    (lambda c: _with(c, page_table=c.page_table[:, :1]), {}, "page_table must be of at least 4"),
    (
        lambda c: _with(c, page_table=c.page_table - 1),
        {},
        r"ids in \[0, 10\), got ids from -1",
    ),
    (
        lambda c: _with(c, page_table=c.page_table + 1),
        {},
        r"ids in \[0, 10\), got ids from 1 to",
    ),
    (lambda c: _with(c, seq_lens=c.seq_lens.float()), {}, "seq_lens must be torch.int64"),
    (lambda c: _with(c, seq_lens=c.seq_lens - 5), {}, r"seq_lens must be >= 0, got \[0, -2\]"),
    (lambda c: c, {"sliding_window": -1}, "sliding_window must be >= 0"),
    (lambda c: c, {"logit_cap": -1.0}, "logit_cap must be >= 0"),
    (lambda c: c, {"mode": 7}, "tree_mask_mode must be one of"),
    (lambda c: c, {"mask": None}, "tree_mask must be a tensor unless is_causal_chain"),
    (lambda c: c, {"mask": torch.ones(99)}, "tree_mask must be torch.bool or torch.uint8"),
    (lambda c: c, {"mask": torch.ones(9, 9) > 0}, "tree_mask must be 1-D"),
    (lambda c: c, {"mask": torch.ones(41) > 0}, "of at least 42 elements for FULL_MASK with"),
    (lambda c: c, {"mask": torch.ones(17) > 0, "mode": 1}, "at least 18 elements for QLEN_ONLY"),
    (lambda c: c, {"mask": torch.ones(99) > 0, "mode": 2}, "uint8 for QLEN_ONLY_BITPACKING"),
    (lambda c: c, {"mask": torch.ones(5).byte(), "mode": 2}, "at least 6 elements"),
]


@pytest.mark.parametrize(("change", "options", "message"), ERRORS)
def test_errors_say_what_was_expected_and_what_came(
    change: Callable[[Case], Case], options: dict[str, Any], message: str
) -> None:
    # Page ids 0..9; those in use cover 0 and 9, so shifting them by one leaves the range.
    case = make_case([5, 3], 3, page_size=2, seed=1)
    arguments: dict[str, Any] = {"mask": write_mask(case, FULL), "mode": int(FULL)} | options
    with pytest.raises(ValueError, match=message):
        run(change(case), **arguments)


def test_int32_lengths_are_converted_by_the_function_and_refused_by_the_op() -> None:
    case = make_case([5, 3], 3)
    mask = write_mask(case, FULL)
    narrow = _with(case, seq_lens=case.seq_lens.int())
    assert torch.equal(run(narrow, mask, FULL), run(case, mask, FULL))
    with pytest.raises(ValueError, match=r"seq_lens must be torch\.int64, got torch\.int32"):
        torch.ops.torchvm.tree_attention(*narrow[:5], mask, int(FULL), False, SCALE)


def test_devices_must_agree() -> None:
    """A GPU's launcher would take the address of a tensor on another device for its own."""
    case = make_case([5, 3], 3)
    for name in ("k_cache", "v_cache", "page_table", "seq_lens"):
        moved = _with(case, **{name: getattr(case, name).to("meta")})
        with pytest.raises(ValueError, match=f"{name} must be on cpu, got meta"):
            torch.ops.torchvm.tree_attention(*moved[:5], None, int(FULL), True, SCALE)
    with pytest.raises(ValueError, match="tree_mask must be on cpu, got meta"):
        run(case, write_mask(case, FULL).to("meta"), FULL)
