"""check_mask_contract: honest ops pass in every layout, a planted liar of each kind is caught."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.readers import READERS
from torchvm import MaskContractError, MaskRead, TreeMaskMode, register_mask_reader
from torchvm.ops.tree import build_tree_from_parents
from torchvm.testing import check_mask_contract

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

FULL, QLEN, PACKED = TreeMaskMode
LENGTHS = [5, 0, 3]
N = 4
LAYOUTS = [(FULL, torch.bool), (FULL, torch.uint8), (QLEN, torch.bool), (QLEN, torch.uint8)]
LAYOUTS += [(PACKED, torch.uint8)]

_library = torch.library.Library("torchvm_liars", "FRAGMENT")


def _op(schema: str, kernel: Callable[..., Any], **contract: Any) -> Any:
    """Define an op and what it claims."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, kernel, "CPU")
    register_mask_reader(f"torchvm_liars::{name}", **contract)
    return getattr(torch.ops.torchvm_liars, name).default


def _mask(mode: TreeMaskMode = FULL, dtype: torch.dtype = torch.bool, spare: int = 7) -> Tensor:
    """A batch of random trees, with some elements to spare."""
    numel = {FULL: N * sum(LENGTHS) + 3 * N * N, QLEN: 3 * N * N, PACKED: 3 * N}[mode]
    mask = torch.zeros(numel + spare, dtype=dtype)
    parents = torch.tensor([[0, 0, 0, 1], [0, 0, 1, 2], [0, 0, 1, 1]])
    build_tree_from_parents(
        parents, torch.tensor(LENGTHS), mask, num_draft_tokens=N, tree_mask_mode=mode
    )
    return mask


def _check(op: Any, *args: Any, mode: int = FULL, mask_arg: str = "mask", **kwargs: Any) -> None:
    check_mask_contract(
        op,
        args,
        kwargs,
        mask_arg=mask_arg,
        seq_lens=torch.tensor(LENGTHS),
        num_draft_tokens=N,
        tree_mask_mode=mode,
    )


def _attention_arguments(mask: Tensor | None, mode: int, *, is_chain: bool) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "query": torch.randn(3, N, 2, 8, generator=generator),
        "k_cache": torch.randn(3, 16, 1, 8, generator=generator),
        "v_cache": torch.randn(3, 16, 1, 8, generator=generator),
        "page_table": torch.arange(3, dtype=torch.int32).view(3, 1),
        "seq_lens": torch.tensor(LENGTHS),
        "tree_mask": mask,
        "tree_mask_mode": int(mode),
        "is_causal_chain": is_chain,
        "scale": 0.3,
    }


@pytest.mark.parametrize(("mode", "dtype"), LAYOUTS)
@pytest.mark.parametrize("is_chain", [False, True])
@pytest.mark.parametrize("window", [0, 3])
def test_tree_attention_keeps_its_contract(
    mode: TreeMaskMode, dtype: torch.dtype, is_chain: bool, window: int
) -> None:
    arguments = _attention_arguments(_mask(mode, dtype), mode, is_chain=is_chain)
    before = {k: v.clone() for k, v in arguments.items() if isinstance(v, torch.Tensor)}
    _check(
        torch.ops.torchvm.tree_attention,
        mode=mode,
        mask_arg="tree_mask",
        sliding_window=window,
        **arguments,
    )
    assert all(torch.equal(arguments[k], v) for k, v in before.items())


@pytest.mark.parametrize(("mode", "dtype"), LAYOUTS)
def test_honest_readers_of_the_block(mode: TreeMaskMode, dtype: torch.dtype) -> None:
    mask, lengths = _mask(mode, dtype), torch.tensor(LENGTHS)
    _check(READERS.block_any, mask, lengths, N, int(mode), mode=mode)
    _check("torchvm_tests::block_any", mask, lengths, n=N, mask_mode=mode, mode=mode)


def test_an_honest_reader_that_writes_its_result() -> None:
    result = torch.full((3, N), 5.0)
    _check(READERS.block_out, _mask(), torch.tensor(LENGTHS), N, 0, result)
    assert result.eq(5).all()


@pytest.mark.parametrize("topk", [1, 2])
def test_a_contract_that_depends_on_an_argument(topk: int) -> None:
    _check(READERS.by_topk, _mask(), torch.ones(3), topk)


def test_a_claim_of_full_cannot_be_broken() -> None:
    _check(READERS.count, _mask(), 2)


@pytest.mark.parametrize("to_mode", TreeMaskMode)
def test_mask_convert_keeps_its_contract(to_mode: TreeMaskMode) -> None:
    _check(torch.ops.torchvm.mask_convert, _mask(), torch.tensor(LENGTHS), FULL, to_mode, N, 9)


def _refuse_small(mask: Tensor, x: Tensor, *_: Any) -> Tensor:
    if mask.numel() < 80:
        raise ValueError("mask must be of at least 80 elements")
    return x + 1


def _fill(mask: Tensor, result: Tensor) -> None:
    result[1] = mask.sum()


_calls: list[None] = []


def _count_calls(mask: Tensor, x: Tensor) -> Tensor:
    _calls.append(None)
    return x + len(_calls)


# A kernel, what it claims (NOTHING where it does not say) and what the check says of it.
LIARS: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "reads all": (
        lambda mask, x: x + mask.sum(),
        {},
        r"claims to read NOTHING of mask, but element \d+ \(.*\) set to \d changes its results",
    ),
    "reads a cell of the block": (
        lambda mask, x: x + mask[N * (5 + N) + 5],
        {},
        r"element 41 \(request 1, node 1, tree column 1\)",
    ),
    "reads a cell past the batch": (
        lambda mask, x: x + mask[-1],
        {"reads": MaskRead.TREE_BLOCK},
        r"claims to read TREE_BLOCK of mask, but element 86 \(past the batch\)",
    ),
    "reads a prefix cell": (
        lambda mask, x: x + mask[4],
        {"reads": MaskRead.TREE_BLOCK},
        r"element 4 \(request 0, node 0, prefix column 4\) set to 0",
    ),
    "reads whether a prefix is all ones": (
        lambda mask, x: x + mask[:5].all(),
        {"reads": MaskRead.TREE_BLOCK},
        r"element \d \(request 0, node 0, prefix column \d\) set to 0",
    ),
    "reads two cells past the batch together": (
        lambda mask, x: x + (mask[-1] & mask[-5]),
        {"reads": MaskRead.TREE_BLOCK},
        r"element 82 \(past the batch\), element 86 \(past the batch\) set to",
    ),
    "differs in the sign of a zero": (
        lambda mask, x: torch.zeros(2) * (1.0 if mask[0] else -1.0),
        {"reads": MaskRead.TREE_BLOCK},
        r"element 0 \(request 0",
    ),
    "changes its shape": (
        lambda mask, x: x.new_zeros(int(mask.sum())),
        {},
        "changes its results",
    ),
    "returns the size": (lambda mask, x: x + mask.numel(), {}, "an empty mask changes its"),
    "checks the size": (
        _refuse_small,
        {},
        "an empty mask makes it raise ValueError: mask must be of at least 80 elements",
    ),
    "fails on other cells": (
        lambda mask, x: x + 1 / int(mask[0]),
        {"reads": MaskRead.TREE_BLOCK},
        "element 0 .* set to 0 makes it raise ZeroDivisionError",
    ),
}


def _planted(number: int) -> Any:
    kernel, contract, _ = list(LIARS.values())[number]
    schema = f"liar_{number}(Tensor mask, Tensor x) -> Tensor"
    return _op(schema, kernel, arg="mask", **{"reads": MaskRead.NOTHING, **contract})


PLANTED = {name: _planted(number) for number, name in enumerate(LIARS)}


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
@pytest.mark.parametrize("name", LIARS)
def test_a_planted_liar_is_caught(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(MaskContractError, match=LIARS[name][2]) as caught:
        _check(PLANTED[name], _mask(dtype=dtype), torch.ones(2))
    assert str(caught.value).startswith("torchvm_liars::liar_")


TOLD = "(Tensor mask, Tensor x, int mask_mode) -> Tensor"
_refuses_small_told = _op(
    f"refuses_small_told{TOLD}",
    _refuse_small,
    arg="mask",
    reads=MaskRead.NOTHING,
    mode_arg="mask_mode",
)
_reads_high_bits = _op(
    f"reads_high_bits{TOLD}",
    lambda mask, x, mask_mode: x + (mask[-1] > 200),
    arg="mask",
    reads=MaskRead.TREE_BLOCK,
    mode_arg="mask_mode",
    modes=[0, 1, 2],
)
_needs_a_tensor = _op(
    "needs_a_tensor(Tensor? mask, Tensor x, bool causal) -> Tensor",
    lambda mask, x, causal: x + 0 * mask.dim(),
    arg="mask",
    reads=lambda causal, **_: MaskRead.NOTHING if causal else MaskRead.TREE_BLOCK,
    causal_arg="causal",
)
_writes_the_sum = _op(
    "writes_the_sum(Tensor mask, Tensor(a!) result) -> ()",
    _fill,
    arg="mask",
    reads=MaskRead.NOTHING,
)
_nothing_but_for_two = _op(
    "nothing_but_for_two(Tensor mask, Tensor x, int topk=1) -> Tensor",
    lambda mask, x, topk=1: x + (mask.sum() if topk > 1 else 0),
    arg="mask",
    reads=lambda topk, **_: MaskRead.FULL if topk == 2 else MaskRead.NOTHING,
)
_counts_calls = _op(
    "counts_calls(Tensor mask, Tensor x) -> Tensor",
    _count_calls,
    arg="mask",
    reads=MaskRead.NOTHING,
)
_drops_out = _op(
    "drops_out(Tensor mask, Tensor x) -> Tensor",
    lambda mask, x: torch.nn.functional.dropout(x),
    arg="mask",
    reads=MaskRead.NOTHING,
)
_writes_mask = _op(
    "writes_mask(Tensor(a!) mask, Tensor x) -> Tensor",
    lambda mask, x: x + 1,
    arg="mask",
    reads=MaskRead.NOTHING,
)


def test_a_liar_that_is_told_the_mode_is_caught_in_another_mode() -> None:
    with pytest.raises(MaskContractError, match="a QLEN_ONLY mask of 48 elements makes it raise"):
        _check(_refuses_small_told, _mask(), torch.ones(2), 0)


def test_a_liar_in_packed_bytes_is_caught() -> None:
    arguments = (_mask(PACKED, torch.uint8), torch.ones(2), 2)
    with pytest.raises(MaskContractError, match=r"element 18 \(past the batch\) set to 255"):
        _check(_reads_high_bits, *arguments, mode=PACKED)


def test_a_cell_of_a_packed_mask_is_named() -> None:
    """The lengths say that the batch is smaller than what the op reads."""
    with pytest.raises(MaskContractError, match=r"element \d+ \(past the batch\)"):
        check_mask_contract(
            READERS.block_any,
            (_mask(PACKED, torch.uint8), torch.tensor(LENGTHS), N, 2),
            {},
            mask_arg="mask",
            seq_lens=torch.tensor(LENGTHS[:2]),
            num_draft_tokens=N,
            tree_mask_mode=PACKED,
        )


def test_a_causal_op_that_needs_a_mask_is_caught() -> None:
    with pytest.raises(MaskContractError, match="but no mask makes it raise AttributeError"):
        _check(_needs_a_tensor, _mask(), torch.ones(2), True)
    _check(_needs_a_tensor, _mask(), torch.ones(2), False)


def test_a_liar_is_caught_by_what_it_writes() -> None:
    result = torch.full((3,), 5.0)
    with pytest.raises(MaskContractError, match="NOTHING of mask, but element"):
        _check(_writes_the_sum, _mask(), result)
    assert result.eq(5).all()


def test_a_callable_contract_is_held_to_the_argument_at_hand() -> None:
    _check(_nothing_but_for_two, _mask(), torch.ones(2))
    _check(_nothing_but_for_two, _mask(), torch.ones(2), topk=2)
    with pytest.raises(MaskContractError, match="claims to read NOTHING"):
        _check(_nothing_but_for_two, _mask(), torch.ones(2), topk=3)


def test_random_ops_are_given_the_same_numbers_and_leave_the_generator_alone() -> None:
    state = torch.get_rng_state()
    _check(_drops_out, _mask(), torch.ones(1000))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_reader_that_looks_elsewhere_is_caught() -> None:
    arguments = _attention_arguments(_mask(), FULL, is_chain=False)
    arguments["seq_lens"] = torch.tensor([2, 0, 3])  # The mask was built for 5, 0, 3.
    with pytest.raises(MaskContractError, match=r"request \d, node \d, prefix column \d"):
        _check("torchvm::tree_attention", mask_arg="tree_mask", **arguments)


GOOD: dict[str, Any] = {
    "op": READERS.block_any,
    "args": (_mask(), torch.tensor(LENGTHS), N, 0),
    "kwargs": {},
    "mask_arg": "mask",
    "seq_lens": torch.tensor(LENGTHS),
    "num_draft_tokens": N,
    "tree_mask_mode": FULL,
}


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"op": print}, TypeError, "op must be a registered op"),
        ({"op": "nobody::knows"}, ValueError, "op must be a registered op, got 'nobody::knows'"),
        ({"op": "knows"}, ValueError, "op must be a registered op, got 'knows'"),
        ({"args": (_mask(),)}, TypeError, r"args and kwargs must fit .* none for \['seq_lens'"),
        ({"kwargs": {"n": 4}}, TypeError, "args and kwargs must fit"),
        ({"kwargs": {"m": 4}}, TypeError, "args and kwargs must fit"),
        ({"mask_arg": "seq_lens"}, ValueError, r"out of \['mask'\], got 'seq_lens'"),
        ({"tree_mask_mode": QLEN}, ValueError, "mask_mode must be tree_mask_mode, 1, got 0"),
        ({"tree_mask_mode": 7}, ValueError, "tree_mask_mode must be one of"),
        ({"seq_lens": LENGTHS}, TypeError, "seq_lens must be a tensor"),
        ({"seq_lens": torch.ones(3)}, ValueError, "seq_lens must be 1-D and int64 or int32"),
        ({"seq_lens": torch.tensor([-1])}, ValueError, r"seq_lens must be >= 0, got \[-1\]"),
        ({"num_draft_tokens": 9}, ValueError, "mask must be of at least 315 elements"),
        ({"num_draft_tokens": 0}, ValueError, "num_draft_tokens must be >= 1, got 0"),
        ({"op": _writes_mask, "args": (_mask(), torch.ones(2))}, ValueError, "does not write"),
        ({"op": _counts_calls, "args": (_mask(), torch.ones(2))}, ValueError, "same results"),
        (
            {"args": (_mask().view(1, -1), torch.tensor(LENGTHS), N, 0)},
            ValueError,
            "mask must be 1-D and of torch.bool or torch.uint8 for FULL_MASK, got 2-D of torch.b",
        ),
        (
            {"op": READERS.block_causal, "args": (None, torch.tensor(LENGTHS), N, 0, True)},
            TypeError,
            "mask must be a tensor, got None",
        ),
        (
            {
                "op": READERS.block,
                "args": (_mask(PACKED, torch.uint8), torch.tensor(LENGTHS), N, 2),
                "tree_mask_mode": PACKED,
            },
            ValueError,
            r"tree_mask_mode must be out of \['FULL_MASK', 'QLEN_ONLY'\], got QLEN_ONLY_BITP",
        ),
    ],
)
def test_bad_usage_is_refused(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments = {**GOOD, **changed}
    with pytest.raises(error, match=message):
        check_mask_contract(arguments.pop("op"), **arguments)
