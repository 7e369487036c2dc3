"""What test_triton_interpreter.py runs in a process of its own, under TRITON_INTERPRET=1."""

from __future__ import annotations

import os

import pytest
import torch

from tests import launches, oracle
from torchvm.ops import candidates, tree, verify
from torchvm.ops.kernels import triton_launch
from torchvm.tools.bench.gpu import beam_search

CPU = torch.device("cpu")
assert os.environ.get("TRITON_INTERPRET") == "1"


def test_random_trees() -> None:
    launches.check_random_trees(CPU, 2000)


def test_more_requests_than_one_scan_of_lengths() -> None:
    launches.check_many_requests(CPU, 257)


def test_malformed_trees() -> None:
    launches.check_malformed_trees(CPU, 50)


def test_parent_rows() -> None:
    launches.check_parent_rows(CPU, 30)


def test_small_buffers() -> None:
    launches.check_small_buffers(CPU, 40)


def test_lengths_out_of_range() -> None:
    launches.check_lengths_out_of_range(CPU)


def test_rows_out_of_order() -> None:
    launches.check_rows_out_of_order(CPU, 30)


def test_verifications() -> None:
    launches.check_verifications(CPU, 150)


def test_selections() -> None:
    launches.check_selections(CPU, 48)


@pytest.mark.parametrize("programs", [1, 5, 64])
def test_any_number_of_programs_does_the_work(
    programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_launch, "INTERPRETED_PROGRAMS", programs)
    triton_launch.num_programs.cache_clear()
    assert triton_launch.num_programs(CPU) == programs
    launches.check_size(CPU, 33, size=3)
    monkeypatch.undo()
    triton_launch.num_programs.cache_clear()


@pytest.mark.parametrize("mode", [oracle.FULL, oracle.QLEN, oracle.PACKED])
def test_what_the_ops_run_on_a_gpu_equals_what_they_run_on_the_cpu(mode: int) -> None:
    n, topk, depth = 16, 4, 3
    levels = beam_search(3, topk, depth, CPU)
    seq_lens = torch.tensor([20, 0, 3])
    steps = []
    for kind in ("_cpu", "_cuda"):
        mask = torch.full((3 * n * (20 + n),), launches.IMPOSSIBLE, dtype=torch.uint8)
        picked = getattr(candidates, kind)(*levels, n)
        built = getattr(tree, kind)(*picked[:2], seq_lens, mask, topk, depth, n, mode)
        drafts = torch.nn.functional.pad(picked[2], (1, 0))
        target = drafts.gather(1, built[2].clamp(min=0))
        verified = getattr(verify, kind)(drafts, *built[1:], target, depth + 1)
        parents = getattr(tree, f"{kind}_from_parents")(drafts, seq_lens, mask.clone(), n, mode)
        steps.append((*picked, *built, *verified, *parents, mask))
    assert int(steps[0][9].sum()) > 0
    assert all(torch.equal(mine, other) for mine, other in zip(*steps, strict=True))
