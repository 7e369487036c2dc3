"""Plans of masks that are graph inputs: the layout before there is a buffer."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.readers import READERS
from torchvm import (
    MaskContractError,
    MaskPlan,
    Reason,
    TreeMaskMode,
    plan_verify_mask,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

FULL, QLEN, PACKED = TreeMaskMode
BS, N = 2, 3


def _inputs(mask: Tensor) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    return (mask, torch.zeros(BS, dtype=torch.int64), torch.ones(BS, N, dtype=torch.int64)), {}


def _plan(forward: Callable[..., Any], **changes: Any) -> MaskPlan:
    settings: dict[str, Any] = {
        "max_bs": BS,
        "num_draft_tokens": N,
        "max_context_len": 100,
        "device": "cpu",
    }
    return plan_verify_mask(forward, _inputs, **{**settings, **changes})


def _ignores(mask: Tensor, seq_lens: Tensor, x: Tensor) -> Tensor:
    return x * 2


def _reads_nothing(mask: Tensor, seq_lens: Tensor, x: Tensor) -> Tensor:
    result: Tensor = READERS.by_topk(mask, x.float(), 1)
    return result


def _reads_block(mask: Tensor, seq_lens: Tensor, x: Tensor) -> Tensor:
    rows: Tensor = READERS.block(mask, seq_lens, N, 0)
    return rows + 1


def _packs(mask: Tensor, seq_lens: Tensor, x: Tensor) -> Tensor:
    rows: Tensor = READERS.block_any(mask, seq_lens, N, 0)
    return rows


def _reads_full(mask: Tensor, seq_lens: Tensor, x: Tensor) -> Tensor:
    counted: Tensor = READERS.count(mask, 1)
    return counted


def _unknown(mask: Tensor, seq_lens: Tensor, x: Tensor) -> Tensor:
    return mask.sum()


def _cannot_be_told(mask: Tensor, seq_lens: Tensor, x: Tensor) -> Tensor:
    rows: Tensor = READERS.block_full_only(mask, seq_lens, N)
    return rows


def _told_otherwise(mask: Tensor, seq_lens: Tensor, x: Tensor) -> Tensor:
    rows: Tensor = READERS.block(mask, seq_lens, N, 1)
    return rows


def _builds_and_reads(mask: Tensor, seq_lens: Tensor, x: Tensor) -> Tensor:
    torch.ops.torchvm.build_tree_from_parents(x, seq_lens, mask, N, 0)
    rows: Tensor = READERS.block(mask, seq_lens, N, 0)
    return rows


def _builds_a_slice(mask: Tensor, seq_lens: Tensor, x: Tensor) -> Tensor:
    positions: Tensor = torch.ops.torchvm.build_tree_from_parents(x, seq_lens, mask[3:], N, 0)[0]
    return positions


@pytest.mark.parametrize(
    ("forward", "mode", "verdict", "is_read"),
    [
        (_ignores, QLEN, Reason.ELIDED, False),
        (_reads_nothing, QLEN, Reason.ELIDED, False),
        (_reads_block, QLEN, Reason.COMPACTED, True),
        (_packs, PACKED, Reason.COMPACTED, True),
        (_reads_full, FULL, Reason.FULL_READ, True),
        (_unknown, FULL, Reason.VIEWED, True),
        (_cannot_be_told, FULL, Reason.NO_MODE_ARG, True),
        (_told_otherwise, FULL, Reason.MODE_MISMATCH, True),
        (_builds_and_reads, QLEN, Reason.COMPACTED, True),
        (_builds_a_slice, FULL, Reason.BUILT_THROUGH_VIEW, False),
    ],
)
def test_plan(
    forward: Callable[..., Any], mode: TreeMaskMode, verdict: Reason, is_read: bool
) -> None:
    plan = _plan(forward)
    assert (plan.mode, plan.verdict, plan.is_read) == (mode, verdict, is_read)
    mask = plan.create()
    assert mask.mode is mode
    assert mask.is_read is is_read
    assert mask.buffer.numel() == plan.nbytes
    assert mask.fits(BS, N)


def test_a_batch_that_is_larger_than_planned_keeps_the_mask() -> None:
    assert _plan(_builds_and_reads, max_bs=1, num_draft_tokens=6).verdict is Reason.CAPACITY


def test_readers_are_named_with_their_line() -> None:
    (reader,) = _plan(_reads_block).readers
    assert reader.op == "torchvm_tests::block"
    assert reader.source.startswith(__file__)
    assert "torchvm_tests::block (TREE_BLOCK)" in str(_plan(_reads_block))


def test_the_mask_may_be_a_keyword_beside_tensors_of_its_size() -> None:
    numel = BS * N * (100 + N)

    def forward(*, other: Tensor, mask: Tensor, seq_lens: Tensor) -> Tensor:
        rows: Tensor = READERS.block(mask, seq_lens, N, 0)
        return rows + other.sum()

    def inputs(mask: Tensor) -> tuple[tuple[()], dict[str, Tensor]]:
        other = torch.empty(numel, dtype=torch.bool)
        return (), {"other": other, "mask": mask, "seq_lens": torch.zeros(BS, dtype=torch.int64)}

    plan = plan_verify_mask(
        forward, inputs, max_bs=BS, num_draft_tokens=N, max_context_len=100, device="cpu"
    )
    assert plan.verdict is Reason.COMPACTED


def test_a_module_with_real_weights_is_a_forward() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(N, N)

        def forward(self, mask: Tensor, seq_lens: Tensor, x: Tensor) -> Tensor:
            rows: Tensor = READERS.block(mask, seq_lens, N, 0)
            out: Tensor = self.linear(rows)
            return out

    plan = _plan(Layer())
    assert plan.verdict is Reason.COMPACTED


def test_cuda_masks_are_planned_without_cuda() -> None:
    plan = _plan(_reads_block, device="cuda:1", max_bs=256, max_context_len=1 << 20)
    assert plan.device == torch.device("cuda", 1)
    assert plan.nbytes == 256 * N * N


def test_a_false_declaration_is_an_error_that_names_the_reader() -> None:
    with pytest.raises(
        MaskContractError,
        match=r"is_read must be True.*torchvm_tests::block \(node block\) at .*planning.py:\d+",
    ):
        _plan(_reads_block, declared_is_read=False)


def test_a_needless_declaration_warns_with_the_bytes() -> None:
    saved = BS * N * 100
    with pytest.warns(UserWarning, match=f"saves {saved} bytes"):
        _plan(_ignores, declared_is_read=True)


@pytest.mark.parametrize(("forward", "declared"), [(_ignores, False), (_reads_block, True)])
def test_a_true_declaration_is_silent(forward: Callable[..., Any], declared: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _plan(forward, declared_is_read=declared).is_read is declared


def test_a_graph_break_is_an_error() -> None:
    def forward(mask: Tensor, seq_lens: Tensor, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x

    with pytest.raises(torch._dynamo.exc.Unsupported):
        _plan(forward)


def test_planning_forgets_nothing_that_is_compiled() -> None:
    compiled = torch.compile(_reads_block, backend="aot_eager")
    args = (torch.zeros(BS * N * N, dtype=torch.bool), torch.zeros(BS, dtype=torch.int64))
    x = torch.ones(BS, N, dtype=torch.int64)
    compiled(*args, x)
    _plan(_reads_block)
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(*args, x)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": torch.float32}, "dtype must be torch.bool or torch.uint8"),
        ({"max_bs": 0}, "max_bs must be >= 1, got 0"),
        ({"num_draft_tokens": 0}, "num_draft_tokens must be >= 1, got 0"),
        ({"max_context_len": -1}, "max_context_len must be >= 0, got -1"),
    ],
)
def test_bad_sizes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _plan(_ignores, **changes)


_MEMORY = """
import resource, torch
from tests.test_planning import _reads_block, plan_verify_mask

def inputs(mask):
    bs = 256
    return (mask, torch.zeros(bs, dtype=torch.int64), torch.ones(bs, 3, dtype=torch.int64)), {}

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

def plan(context):
    return plan_verify_mask(_reads_block, inputs, max_bs=256, num_draft_tokens=4,
                            max_context_len=context, device="cpu")

plan(1024)
before = peak()
assert plan(1 << 20).nbytes == 4096
print(peak() - before)
"""


def test_a_gib_is_planned_within_16_mib(pytestconfig: pytest.Config) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _MEMORY],
        cwd=pytestconfig.rootpath,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 16 * 1024
