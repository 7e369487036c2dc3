"""Each way a mask can be used: fires or declines, the right code, eager's numbers, real bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache

import torchvm
from tests.found_graphs import FOUND
from tests.readers import READERS
from tests.verify_graphs import CASES, CONTEXT, FULL, batch
from torchvm import Reason, TreeMaskMode, mask_storage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

SHRUNK = (Reason.ELIDED, Reason.COMPACTED, Reason.CAUSAL_CHAIN)
BUILDS = ("torchvm::build_tree", "torchvm::build_tree_from_parents")
ALL_CASES = {**CASES, **FOUND}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torchvm.clear_reports()
    yield
    torch._dynamo.reset()


def _compile(function: Callable[..., Any], inner: str, *, dynamic: bool = False) -> Any:
    return torch.compile(
        function, backend="torchvm", fullgraph=True, dynamic=dynamic, options={"inner": inner}
    )


def _flat(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple) else [result]


def _assert_equal(actual: Any, expected: Any) -> None:
    for a, e in zip(_flat(actual), _flat(expected), strict=True):
        assert torch.equal(a, e) if isinstance(e, torch.Tensor) else a == e


def _built_mask_sizes(function: Callable[..., Any], *args: Tensor) -> list[int]:
    """Elements of the mask that each build is really given when `function` runs."""
    from torch.profiler import ProfilerActivity, profile

    with (
        torch.no_grad(),
        profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as prof,
    ):
        function(*args)
    position = {"torchvm::build_tree": 3, "torchvm::build_tree_from_parents": 2}
    events = prof.events() or []
    return [e.input_shapes[position[e.name]][0] for e in events if e.name in BUILDS]


def _check(name: str, inner: str, *, dynamic: bool) -> None:
    case = ALL_CASES[name]
    args = batch()
    expected = case.function(*args)
    compiled = _compile(case.function, inner, dynamic=dynamic)
    with torch.no_grad():
        _assert_equal(compiled(*args), expected)
    reports = torchvm.reports()
    assert [r.verdict for r in reports] == list(
        case.dynamic_verdicts if dynamic else case.verdicts
    )
    if dynamic:  # The same code at other sizes.
        other = batch(5, 4, seed=1)
        with torch.no_grad():
            _assert_equal(compiled(*other), case.function(*other))
        assert torchvm.reports() == reports
        args = other
    bs, n = args[0].shape
    # Inductor has turned new_ones into a full of its own dtype by then.
    freed = inner == "inductor" and name == "packing_reader_beside_a_use_of_the_dtype"
    packed = (name == "packing_readers" or freed) and not dynamic
    mode = TreeMaskMode.QLEN_ONLY_BITPACKING if packed else TreeMaskMode.QLEN_ONLY
    compact = mask_storage(mode, bs, n, CONTEXT)[0]
    if all(r.verdict in SHRUNK for r in reports) and "fixed" not in name:
        sizes = _built_mask_sizes(compiled, *args)
        assert sizes
        assert set(sizes) == {compact}
        assert {r.final_mode for r in reports} == {mode}
    for report in reports:
        fired = report.verdict in SHRUNK
        assert (report.final_mode != report.declared_mode) == fired
        assert (report.final_bytes != report.declared_bytes) == fired
        assert case.function.__code__.co_filename in report.source


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("v2", [True, False], ids=["v2", "v1"])
@pytest.mark.parametrize("name", ALL_CASES)
def test_rewritten_graph_run_op_by_op(name: str, v2: bool, dynamic: bool) -> None:
    with inductor_config.patch(enable_auto_functionalized_v2=v2):
        _check(name, "aot_eager", dynamic=dynamic)


@pytest.mark.parametrize(
    ("v2", "dynamic"), [(True, False), (False, True)], ids=["v2-static", "v1-dynamic"]
)
@pytest.mark.parametrize("name", ALL_CASES)
def test_rewritten_graph_in_inductor(name: str, v2: bool, dynamic: bool) -> None:
    with fresh_cache(), inductor_config.patch(enable_auto_functionalized_v2=v2):
        _check(name, "inductor", dynamic=dynamic)


@pytest.mark.parametrize("v2", [True, False], ids=["v2", "v1"])
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_mask_that_is_a_graph_input_is_kept(inner: str, v2: bool) -> None:
    def step(parents: Tensor, seq_lens: Tensor, mask: Tensor) -> Any:
        positions = torch.ops.torchvm.build_tree_from_parents(
            parents, seq_lens, mask, parents.shape[1], FULL
        )[0]
        return positions, READERS.block(mask, seq_lens, parents.shape[1], FULL)

    args = batch()
    numel = mask_storage(FULL, 2, 3, CONTEXT)[0]
    eager_mask = torch.zeros(numel, dtype=torch.bool)
    expected = step(*args, eager_mask)
    mask = torch.zeros(numel, dtype=torch.bool)
    with (
        fresh_cache(),
        inductor_config.patch(enable_auto_functionalized_v2=v2),
        torch.no_grad(),
    ):
        _assert_equal(_compile(step, inner)(*args, mask), expected)
    assert torch.equal(mask, eager_mask)
    (report,) = torchvm.reports()
    assert report.verdict is Reason.GRAPH_INPUT
    assert [(r.op, r.reads.name) for r in report.readers] == [
        ("torchvm_tests::block", "TREE_BLOCK")
    ]


def test_writing_an_input_back_is_not_a_read() -> None:
    def step(parents: Tensor, seq_lens: Tensor, mask: Tensor) -> Any:
        return torch.ops.torchvm.build_tree_from_parents(
            parents, seq_lens, mask, parents.shape[1], FULL
        )[0]

    with torch.no_grad():
        _compile(step, "aot_eager")(*batch(), torch.zeros(500, dtype=torch.bool))
    (report,) = torchvm.reports()
    assert report.readers == ()
    assert report.declared_bytes == 500


def test_a_mask_across_a_graph_break_is_kept_on_both_sides() -> None:
    def step(parents: Tensor, seq_lens: Tensor) -> Any:
        mask = torchvm.alloc_verify_mask(2, 3, CONTEXT, FULL)
        first = torch.ops.torchvm.build_tree_from_parents(parents, seq_lens, mask, 3, FULL)[0]
        torch._dynamo.graph_break()
        second = torch.ops.torchvm.build_tree_from_parents(parents, seq_lens, mask, 3, FULL)[0]
        return first + second, READERS.count(mask, 1)

    args = batch()
    compiled = torch.compile(step, backend="torchvm", options={"inner": "aot_eager"})
    with torch.no_grad():
        _assert_equal(compiled(*args), step(*args))
    verdicts = [r.verdict for r in torchvm.reports()]
    assert verdicts == [Reason.RETURNED, Reason.GRAPH_INPUT]


def test_only_selected_passes_run() -> None:
    function = CASES["tree_block_reader"].function
    args = batch()
    options: dict[str, Any] = {"inner": "aot_eager", "passes": ["ElideUnreadMasks"]}
    compiled = torch.compile(function, backend="torchvm", options=options)
    _assert_equal(compiled(*args), function(*args))
    assert [r.verdict for r in torchvm.reports()] == [Reason.TREE_BLOCK_READ]


def test_no_selected_pass_keeps_every_mask() -> None:
    options: dict[str, Any] = {"inner": "aot_eager", "passes": []}
    compiled = torch.compile(CASES["dead"].function, backend="torchvm", options=options)
    compiled(*batch())
    assert [r.verdict for r in torchvm.reports()] == [Reason.PASS_OFF]


def test_disabled_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHVM_DISABLE", "1")
    _compile(CASES["dead"].function, "aot_eager")(*batch())
    (report,) = torchvm.reports()
    assert report.verdict is Reason.DISABLED
    assert report.final_mode is TreeMaskMode.FULL_MASK


def test_a_training_graph_is_rewritten_too() -> None:
    def step(parents: Tensor, seq_lens: Tensor, weight: Tensor) -> Tensor:
        mask = torchvm.alloc_verify_mask(2, 3, CONTEXT, FULL)
        positions = torch.ops.torchvm.build_tree_from_parents(parents, seq_lens, mask, 3, FULL)[0]
        loss: Tensor = (positions * weight).sum()
        return loss

    parents, seq_lens = batch()
    weight = torch.ones(6, requires_grad=True)
    loss = _compile(step, "inductor")(parents, seq_lens, weight)
    loss.backward()
    assert weight.grad is not None
    expected = torch.ones(6, requires_grad=True)
    step(parents, seq_lens, expected).backward()
    _assert_equal(weight.grad, expected.grad)
    assert {r.verdict for r in torchvm.reports()} == {Reason.ELIDED}


def test_a_long_chain_of_builds_is_walked_without_recursion() -> None:
    def steps(parents: Tensor, seq_lens: Tensor) -> Tensor:
        mask = torchvm.alloc_verify_mask(2, 3, CONTEXT, FULL)
        total = torch.zeros(6, dtype=torch.int64)
        for _ in range(300):
            total = (
                total
                + torch.ops.torchvm.build_tree_from_parents(parents, seq_lens, mask, 3, FULL)[0]
            )
        return total

    args = batch()
    _assert_equal(_compile(steps, "aot_eager")(*args), steps(*args))
    assert [r.verdict for r in torchvm.reports()] == [Reason.ELIDED]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("inner", "verdict"), [("aot_eager", Reason.SHAPE_READ), ("inductor", Reason.ELIDED)]
)
def test_a_tensor_made_like_the_mask_keeps_its_size(
    inner: str, verdict: Reason, dynamic: bool
) -> None:
    """Inductor has written the size out before the passes run; elsewhere it is still asked."""

    def step(parents: Tensor, seq_lens: Tensor) -> Any:
        bs, n = parents.shape
        mask = torchvm.alloc_verify_mask(bs, n, CONTEXT, FULL)
        positions = torch.ops.torchvm.build_tree_from_parents(parents, seq_lens, mask, n, FULL)[0]
        return positions, torch.zeros_like(mask)

    args = batch()
    with fresh_cache(), torch.no_grad():
        _assert_equal(_compile(step, inner, dynamic=dynamic)(*args), step(*args))
    assert [r.verdict for r in torchvm.reports()] == [verdict]
