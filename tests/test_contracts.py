"""Contracts: what may be registered, and what a call is said to read."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.readers import READERS
from torchvm import MaskRead, TreeMaskMode, register_mask_reader
from torchvm.ops import contracts
from torchvm.ops.contracts import mask_readers


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = {op: dict(by_arg) for op, by_arg in contracts._READERS.items()}
    monkeypatch.setattr(contracts, "_READERS", copied)


def test_an_op_without_a_contract_has_none() -> None:
    assert mask_readers("nobody::knows") == ()


def test_defaults_without_a_mode_argument() -> None:
    register_mask_reader("nobody::knows", arg="mask", reads=MaskRead.NOTHING)
    (reader,) = mask_readers("nobody::knows")
    assert reader.modes == {TreeMaskMode.FULL_MASK}
    assert reader.mode_arg is None


def test_defaults_with_a_mode_argument() -> None:
    register_mask_reader("nobody::knows", arg="mask", reads=MaskRead.FULL, mode_arg="tree_mode")
    (reader,) = mask_readers("nobody::knows")
    assert reader.modes == {TreeMaskMode.FULL_MASK, TreeMaskMode.QLEN_ONLY}


@pytest.mark.parametrize(
    "op", ["torchvm_tests::block", "torchvm_tests::block.default", READERS.block.default]
)
def test_every_spelling_of_an_op_is_the_same_op(op: Any) -> None:
    register_mask_reader(op, arg="mask", reads=MaskRead.FULL, mode_arg="mask_mode")
    (reader,) = mask_readers(torch.ops.torchvm_tests.block.default)
    assert reader.reads is MaskRead.FULL


def test_overloads_have_contracts_of_their_own() -> None:
    register_mask_reader("aten::add.Tensor", arg="self", reads=MaskRead.FULL)
    assert mask_readers(torch.ops.aten.add.Tensor)
    assert not mask_readers(torch.ops.aten.add.Scalar)


def test_a_later_contract_for_the_same_argument_replaces_the_earlier() -> None:
    for reads in (MaskRead.FULL, MaskRead.NOTHING):
        register_mask_reader("nobody::knows", arg="mask", reads=reads)
    register_mask_reader("nobody::knows", arg="other_mask", reads=MaskRead.TREE_BLOCK)
    assert [(r.arg, r.reads) for r in mask_readers("nobody::knows")] == [
        ("mask", MaskRead.NOTHING),
        ("other_mask", MaskRead.TREE_BLOCK),
    ]


def _wants_causal(causal: bool, **_: object) -> MaskRead:
    return MaskRead.NOTHING


def _fails(**_: object) -> MaskRead:
    raise RuntimeError


@pytest.mark.parametrize(
    ("reads", "expected"),
    [
        (MaskRead.TREE_BLOCK, MaskRead.TREE_BLOCK),
        (lambda topk, **_: MaskRead.NOTHING if topk == 1 else MaskRead.FULL, MaskRead.NOTHING),
        (_wants_causal, MaskRead.FULL),
        (lambda **_: "NOTHING", MaskRead.FULL),
        (lambda **_: None, MaskRead.FULL),
        (lambda **_: 0, MaskRead.NOTHING),
        (_fails, MaskRead.FULL),
    ],
)
def test_what_a_call_reads(reads: Any, expected: MaskRead) -> None:
    register_mask_reader("nobody::knows", arg="mask", reads=reads)
    (reader,) = mask_readers("nobody::knows")
    assert reader.read({"topk": 1}) is expected


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"op": "no_namespace"}, ValueError, "op must be an OpOverload or"),
        ({"op": "::name"}, ValueError, "op must be an OpOverload or"),
        ({"op": torch.add}, TypeError, "op must be an OpOverload or"),
        ({"reads": "FULL"}, TypeError, "reads must be a MaskRead or a callable, got 'FULL'"),
        ({"arg": None}, TypeError, "arg must be the name of an argument, got None"),
        ({"arg": "masks"}, ValueError, "arg must be an argument of .* got 'masks'"),
        ({"mode_arg": "mode"}, ValueError, "mode_arg must be an argument of .* got 'mode'"),
        ({"causal_arg": "causal"}, ValueError, "causal_arg must be an argument of .*'causal'"),
        ({"mode_arg": 3}, TypeError, "mode_arg must be the name of an argument, got 3"),
        ({"modes": [7], "mode_arg": "mask_mode"}, ValueError, "tree_mask_mode must be one of"),
        ({"modes": [0, 1]}, ValueError, "modes must be FULL_MASK alone without a mode_arg"),
    ],
)
def test_bad_contracts_are_refused_and_change_nothing(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    before = mask_readers()
    good = {"op": "torchvm_tests::block", "arg": "mask", "reads": MaskRead.TREE_BLOCK}
    with pytest.raises(error, match=message):
        register_mask_reader(**{**good, **arguments})
    assert mask_readers() == before
