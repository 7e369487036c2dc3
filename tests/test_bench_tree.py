"""The floors and loops of the tree benchmark compute what the ops do."""

from __future__ import annotations

import random
import shutil
from typing import TYPE_CHECKING

import pytest
import torch

from tests.trees import draw_batch, draw_malformed, draw_sizes
from torchvm.ops.candidates import DraftCandidates, select_draft_candidates
from torchvm.ops.layout import TreeMaskMode, live_mask_numel
from torchvm.ops.verify import verify_tree_greedy
from torchvm.tools.bench import floor, loops
from torchvm.tools.bench import tree as bench
from torchvm.tools.bench.floor import FloorCall
from torchvm.tools.bench.measure import QUICK, measure
from torchvm.tools.messages import CommandError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

needs_compiler = pytest.mark.skipif(not shutil.which("cc"), reason="the floor needs a C compiler")


@needs_compiler
@pytest.mark.parametrize("mode", [TreeMaskMode.FULL_MASK, TreeMaskMode.QLEN_ONLY])
def test_floor_builds_what_the_op_builds(mode: TreeMaskMode) -> None:
    """Malformed trees included."""
    rng = random.Random(30)  # noqa: S311
    for draw in (draw_batch, draw_malformed) * 60:
        batch = draw(rng, *draw_sizes(rng, 40), 3)
        parent_list, selected, seq_lens = batch.tensors()
        numel = int(live_mask_numel(mode, 3, batch.n, sum(batch.lengths)))
        case = bench.Batch(
            mode, batch.n, batch.topk, batch.depth,
            DraftCandidates(parent_list, selected, selected), seq_lens,
            torch.zeros(numel, dtype=torch.bool),
        )  # fmt: skip
        own = case._replace(mask=torch.ones_like(case.mask))
        call, outputs = bench.build_floor(own)
        call()
        assert all(map(torch.equal, outputs, case.build()))
        assert torch.equal(own.mask, case.mask)


@needs_compiler
def test_floor_refuses_a_mask_that_is_too_small() -> None:
    batch = bench.make_batch(TreeMaskMode.QLEN_ONLY, 2, (4, 2, 2), 8)
    call, _ = bench.build_floor(batch)
    call()
    arguments = list(call._arguments)
    arguments[4] = type(arguments[4])(batch.mask.numel() - 1)
    call._arguments = arguments
    with pytest.raises(ValueError, match="mask is too small"):
        call()


def _levels(topk: int, depth: int, generator: torch.Generator) -> tuple[list[Tensor], ...]:
    """Scores of few values, so that many are equal."""
    scores, tokens, parents = [], [], []
    for level in range(depth):
        beams = topk if level else 1
        drawn = torch.randint(4, (3, beams, topk), generator=generator)
        scores.append(drawn / 4)
        tokens.append(torch.randint(99, (3, beams * topk), generator=generator))
        parents.append(torch.zeros(3, topk if level else topk + 1, dtype=torch.int64))
    return scores, tokens, parents


@needs_compiler
@pytest.mark.parametrize(("topk", "depth", "n"), [(1, 3, 4), (2, 2, 7), (4, 3, 9), (3, 1, 1)])
def test_floor_and_loop_select_what_the_op_selects(topk: int, depth: int, n: int) -> None:
    scores, tokens, parents = _levels(topk, depth, torch.Generator().manual_seed(n))
    found = select_draft_candidates(scores, tokens, parents, num_draft_tokens=n)
    joined = torch.cat([s.flatten(1) for s in scores], 1), torch.cat(tokens, 1)
    wanted = (found.selected_index, found.draft_tokens)
    assert all(map(torch.equal, loops.select(*joined, n - 1), wanted))
    outputs = [torch.full_like(part, -7) for part in wanted]
    FloorCall("select_best", *joined, *joined[0].shape, n - 1, *outputs)()
    assert all(map(torch.equal, outputs, wanted))


@needs_compiler
def test_floor_and_loop_verify_what_the_op_verifies() -> None:
    """The floor with malformed links too, the loop with those of trees."""
    generator = torch.Generator().manual_seed(7)
    for n in (1, 2, 5, 9) * 10:
        built = bench.make_batch(TreeMaskMode.QLEN_ONLY, 4, (max(n, 2), 3, 3), 0).build()
        width = built.retrieve_index.shape[1]
        drawn = [torch.randint(3, (4, width), generator=generator) for _ in range(2)]
        inputs = (drawn[0], *built[1:], drawn[1])
        wanted = verify_tree_greedy(*inputs, max_accept=4)
        assert all(map(torch.equal, loops.verify(*inputs, max_accept=4), wanted))
        links = [torch.randint(-2, width + 2, (4, width), generator=generator) for _ in "ab"]
        odd = (drawn[0], built[1] + (links[0] > width), *links, drawn[1])
        for given in (inputs, odd):
            wanted = verify_tree_greedy(*given, max_accept=4)
            outputs = [torch.full_like(part, -7) for part in wanted]
            FloorCall("verify", *given, 4, width, 4, *outputs)()
            assert all(map(torch.equal, outputs, wanted))


def test_every_case_has_right_results() -> None:
    rows = [measure(case, QUICK) for case in bench.cases(bench.QUICK)]
    assert len(rows) == 2 * 2 + 2 + 2
    assert all(row.differing == () and row.base in row.times for row in rows)


@pytest.mark.parametrize("wrong", ["mask", "links"])
def test_a_wrong_build_is_found(wrong: str) -> None:
    case = bench.build_case(bench.make_batch(TreeMaskMode.FULL_MASK, 2, (4, 2, 2), 5))
    right = case.contenders[1]
    assert right.results is not None
    results = right.results()
    changed = results[-1 if wrong == "mask" else 1]
    changed[-1] = 1 - changed[-1]
    planted = right._replace(name="planted", results=lambda: results)
    row = measure(case._replace(contenders=(*case.contenders, planted)), QUICK)
    assert row.differing == ("planted",)
    assert "planted" not in row.times


def test_a_compiler_that_fails_is_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho to stdout; echo no such option >&2; exit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(CommandError, match="cc cannot compile the C loops: no such option"):
        floor._library.__wrapped__()
