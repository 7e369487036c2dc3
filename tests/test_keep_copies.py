"""Copies that one call writes while it reads the original: kept, where torch drops them."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.utils import fresh_cache

import torchvm
from tests.verify_graphs import CONTEXT, batch
from torchvm import MaskRead, Reason, register_mask_reader
from torchvm.compilation import PASS_NAMES
from torchvm.ops import contracts
from torchvm.passes.keep_copies import KeepCopies
from torchvm.tracing import fake_mode, trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WITHOUT_KEEPING = [name for name in PASS_NAMES if name != "KeepCopies"]
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))

_library = torch.library.Library("torchvm_copies", "FRAGMENT")
OPS = torch.ops.torchvm_copies


def _reverse_into(source: Tensor, target: Tensor) -> None:
    for i in range(len(source)):
        target[len(source) - 1 - i] = source[i]


_library.define("reverse_into(Tensor source, Tensor(a!) target) -> ()")
_library.define("scores(Tensor mask, Tensor source, Tensor(a!) target) -> ()")
_library.impl("reverse_into", _reverse_into, "CPU")
_library.impl("scores", lambda mask, source, target: _reverse_into(source, target), "CPU")
for _name in ("reverse_into", "scores"):
    torch.library.register_fake(f"torchvm_copies::{_name}", lambda *_: None, lib=_library)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    copied = {op: dict(by_arg) for op, by_arg in contracts._READERS.items()}
    monkeypatch.setattr(contracts, "_READERS", copied)
    register_mask_reader("torchvm_copies::scores", arg="mask", reads=MaskRead.NOTHING)
    torch._dynamo.reset()
    torchvm.clear_reports()
    with fresh_cache(), torch.no_grad():
        yield
    torch._dynamo.reset()


def _mask(parents: Tensor, seq_lens: Tensor) -> Tensor:
    n = parents.shape[1]
    mask = torchvm.alloc_verify_mask(parents.shape[0], n, CONTEXT, 0)
    torch.ops.torchvm.build_tree_from_parents(parents, seq_lens, mask, n, 0)
    return mask


def _read_copy_write_mask(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _mask(parents, seq_lens)
    before = mask.clone()
    OPS.reverse_into(before, mask)
    return mask.to(torch.int64)


def _read_mask_write_copy(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _mask(parents, seq_lens)
    after = mask.clone()
    OPS.reverse_into(mask, after)
    return after.to(torch.int64)


def _contracted_op(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _mask(parents, seq_lens)
    source = parents.flatten() * 3 + 1
    target = source.clone()
    OPS.scores(mask, source, target)
    return target * 2


def _view_of_a_copy(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _mask(parents, seq_lens)
    source = parents.flatten() * 3 + 1
    OPS.scores(mask, source.clone()[1:], source[1:])
    return source * 2


def _writes_an_input(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _mask(parents, seq_lens)
    before = seq_lens.clone()
    OPS.scores(mask, before, seq_lens)
    return seq_lens * 2


SHAPES = {f.__name__[1:]: f for f in (
    _read_copy_write_mask, _read_mask_write_copy, _contracted_op, _view_of_a_copy, _writes_an_input
)}  # fmt: skip
VERDICTS = dict.fromkeys(["read_copy_write_mask", "read_mask_write_copy"], Reason.VIEWED)


def _run(function: Callable[..., Any], **options: Any) -> tuple[Tensor, Tensor]:
    """Return eager's result and the compiled one."""
    expected = function(*[a.clone() for a in batch()])
    compiled = torch.compile(function, backend="torchvm", options=options)
    return expected, compiled(*batch())


def _warned(function: Callable[..., Any]) -> list[str]:
    """Run the pass alone on the functional graph; return its warnings."""
    mode = fake_mode()
    fakes = [mode.from_tensor(arg, static_shapes=True) for arg in batch()]
    (traced,) = trace(function, fakes, {}, mode=mode, fullgraph=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        KeepCopies()(traced.module.graph)
    traced.module.graph.lint()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("name", "v2"),
    [
        ("read_copy_write_mask", True),
        ("read_mask_write_copy", True),
        ("contracted_op", False),
        ("view_of_a_copy", True),
    ],
)
def test_the_copy_is_kept_with_a_warning(name: str, v2: bool) -> None:
    with (
        inductor_config.patch(enable_auto_functionalized_v2=v2),
        pytest.warns(UserWarning, match=r"torchvm_copies::\w+ at .*copies.py:\d+ .*issue 198031"),
    ):
        expected, actual = _run(SHAPES[name])
    assert torch.equal(actual, expected)
    assert [r.verdict for r in torchvm.reports()] == [VERDICTS.get(name, Reason.ELIDED)]


@pytest.mark.parametrize("v2", [True, False], ids=["v2", "v1"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_found(name: str, v2: bool) -> None:
    with inductor_config.patch(enable_auto_functionalized_v2=v2):
        (message,) = _warned(SHAPES[name])
    assert "copies.py" in message


@pytest.mark.skipif(TORCH >= (2, 15), reason="no torch known to be wrong: is the pass needed?")
def test_this_torch_drops_the_copy() -> None:
    expected, actual = _run(SHAPES["writes_an_input"], passes=WITHOUT_KEEPING)
    assert not torch.equal(actual, expected)


def _one_tensor_twice(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _mask(parents, seq_lens)
    source = parents.flatten() * 3 + 1
    OPS.scores(mask, source, source)
    return source * 2


def _another_dtype(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _mask(parents, seq_lens)
    target = parents.flatten().to(torch.float32)
    OPS.scores(mask, parents.flatten(), target)
    return target * 2


def _two_values(parents: Tensor, seq_lens: Tensor) -> Any:
    mask = _mask(parents, seq_lens)
    after = parents.flatten().clone()
    OPS.scores(mask, parents.flatten() * 3, after)
    return after * 2


def _mutates_without_a_mask(parents: Tensor, seq_lens: Tensor) -> Any:
    source = parents.flatten() * 3 + 1
    after = source.clone()
    OPS.reverse_into(source, after)
    return after * 2


@pytest.mark.parametrize(
    "function", [_one_tensor_twice, _another_dtype, _two_values, _mutates_without_a_mask]
)
def test_other_calls_are_left_alone(function: Callable[..., Any]) -> None:
    assert _warned(function) == []


def test_nothing_happens_when_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHVM_DISABLE", "1")
    assert _warned(SHAPES["contracted_op"]) == []


def test_the_op_copies_values_and_strides() -> None:
    value = torch.arange(6).view(2, 3).t()
    torch.library.opcheck(torch.ops.torchvm.copy_value.default, (value,))
    copy = torch.ops.torchvm.copy_value(value)
    assert torch.equal(copy, value)
    assert copy.stride() == value.stride()
    assert copy.data_ptr() != value.data_ptr()
