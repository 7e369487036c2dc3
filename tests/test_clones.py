"""Copies of a whole mask in the graph that runs: found where they are, and hoisted away."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache

import torchvm
from tests.readers import READERS
from tests.verify_graphs import CASES, CONTEXT, FULL, batch
from torchvm.compilation import PASS_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

WITHOUT_HOIST = [name for name in PASS_NAMES if name != "HoistMaskReaders"]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torchvm.clear_reports()
    with fresh_cache():
        yield
    torch._dynamo.reset()


def _copied(function: Callable[..., Any], *args: Tensor, **options: Any) -> list[bool | None]:
    expected = function(*[a.clone() for a in args])
    with torch.no_grad():
        actual = torch.compile(function, backend="torchvm", options=options)(*args)
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)
    return [report.copied for report in torchvm.reports()]


@pytest.mark.parametrize("name", ["read_before_the_build", "read_between_two_builds"])
def test_a_late_reader_of_the_old_value_is_hoisted(name: str) -> None:
    assert _copied(CASES[name].function, *batch()) == [False]


@pytest.mark.parametrize("name", ["read_before_the_build", "read_between_two_builds"])
def test_without_hoisting_the_copy_is_found(name: str) -> None:
    assert _copied(CASES[name].function, *batch(), passes=WITHOUT_HOIST) == [True]


@pytest.mark.parametrize(
    "name", ["dead", "dead_after_two_builds", "tree_block_reader", "returned", "read_in_full"]
)
def test_no_copy_in_the_usual_cases(name: str) -> None:
    assert _copied(CASES[name].function, *batch()) == [False]


def test_a_reader_that_needs_the_build_stays_behind_it() -> None:
    """The old value is read at lengths that the build returns: its copy has to be."""

    def step(parents: Tensor, seq_lens: Tensor, mask: Tensor) -> Any:
        old = mask.clone()
        lengths = _build(parents, seq_lens, mask).view(parents.shape)[:, 0].contiguous()
        return READERS.block(old, lengths, parents.shape[1], FULL), lengths

    parents, seq_lens = batch()
    mask = torch.ones(parents.shape[0] * 3 * (CONTEXT + 3), dtype=torch.bool)
    assert _copied(step, parents, seq_lens, mask) == [True]


def _build(parents: Tensor, seq_lens: Tensor, mask: Tensor) -> Tensor:
    positions: Tensor = torch.ops.torchvm.build_tree_from_parents(
        parents, seq_lens, mask, parents.shape[1], FULL
    )[0]
    return positions


def _into_a_slice(parents: Tensor, seq_lens: Tensor, mask: Tensor) -> Any:
    return _build(parents, seq_lens, mask[7:]), READERS.block(mask[7:], seq_lens, 3, FULL)


@pytest.mark.parametrize(("v2", "copied"), [(True, False), (False, True)], ids=["v2", "v1"])
def test_a_slice_of_an_input_is_copied_in_v1(v2: bool, copied: bool) -> None:
    mask = torch.zeros(2 * 3 * (CONTEXT + 3) + 7, dtype=torch.bool)
    with inductor_config.patch(enable_auto_functionalized_v2=v2):
        assert copied in _copied(_into_a_slice, *batch(), mask)


@pytest.mark.parametrize(("v2", "copied"), [(True, False), (False, True)], ids=["v2", "v1"])
def test_two_inputs_of_one_storage_are_copied_in_v1(v2: bool, copied: bool) -> None:
    def step(parents: Tensor, seq_lens: Tensor, mask: Tensor, same: Tensor) -> Any:
        return _build(parents, seq_lens, mask), READERS.block(same, seq_lens, 3, FULL)

    parents, seq_lens = batch()
    mask = torch.zeros(2 * 3 * (CONTEXT + 3), dtype=torch.bool)
    with torch.no_grad(), inductor_config.patch(enable_auto_functionalized_v2=v2):
        expected = step(parents, seq_lens, (other := mask.clone()), other)
        actual = torch.compile(step, backend="torchvm")(parents, seq_lens, mask, mask[:])
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)
    assert copied in [report.copied for report in torchvm.reports()]


def test_inner_compilers_that_lower_nothing_say_nothing() -> None:
    assert _copied(CASES["dead"].function, *batch(), inner="aot_eager") == [None]
