"""Random programs agree with eager, a bug planted in any pass is found, failures are cut down."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import torchvm.tools.fuzz
from torchvm.passes import (
    causal_chains,
    compact_tree_block_readers,
    elide_unread_masks,
    skip_prefix_fill,
)
from torchvm.passes.requirements import read_refusal
from torchvm.tools.fuzz.author import write_program
from torchvm.tools.fuzz.checking import check
from torchvm.tools.fuzz.oracle import Layouts, Relayout
from torchvm.tools.fuzz.programs import Program, Setting, make_inputs
from torchvm.tools.fuzz.runner import describe, fuzz, shrink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchvm import MaskRead, TreeMaskMode
    from torchvm.passes.liveness import Mask
    from torchvm.passes.report import Reason

SETTING = Setting(seed=1, bs=2, n=3, other_bs=3, other_n=4)
BUILD = "m0 = alloc(bs, n, 20, 0)\nr0 = tree_of_parents(parents, lens, m0, n, 0)[0]\n"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()


def test_no_program_is_compiled_wrongly() -> None:
    summary = fuzz(0, 300)
    assert [describe(program, failure) for program, failure in summary.failures] == []
    assert summary.counts["graphs"] == 300
    assert summary.counts["refused"] < 45
    assert summary.counts["torch_fails"] < 15
    fired = {"ELIDED", "COMPACTED", "CAUSAL_CHAIN", "PREFIX_SKIPPED"}
    assert min(summary.verdicts[verdict] for verdict in fired) >= 5


def _ask_for_the_obstacle_alone(mask: Mask, _mode: TreeMaskMode, _most: MaskRead) -> Reason | None:
    return mask.obstacle


def _forget_who_takes_the_mode(mask: Mask, _mode: TreeMaskMode, most: MaskRead) -> Reason | None:
    return mask.obstacle or read_refusal(mask, most)


@pytest.mark.parametrize(
    ("module", "helper", "planted"),
    [
        (causal_chains, "_may_be_chain", lambda _build: True),
        (causal_chains, "batch_refusal", lambda _use: None),
        (elide_unread_masks, "first_refusal", _ask_for_the_obstacle_alone),
        (compact_tree_block_readers, "first_refusal", _forget_who_takes_the_mode),
        (skip_prefix_fill, "read_refusal", lambda _mask, _most: None),
    ],
    ids=[
        "CausalChains-of-any-tree",
        "CausalChains-of-other-rows",
        "ElideUnreadMasks",
        "CompactTreeBlockReaders",
        "SkipPrefixFill",
    ],
)
def test_a_planted_bug_is_found(
    module: Any, helper: str, planted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, helper, planted)
    assert fuzz(3000, 500, stop_at=1).failures


def test_a_failure_is_cut_down_to_a_program_that_runs_by_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(skip_prefix_fill, "read_refusal", lambda _mask, _most: None)
    ((program, failure),) = fuzz(3000, 500, stop_at=1).failures
    small = shrink(program, failure.kind)
    assert len(small.lines) <= min(3, len(program.lines))
    text = describe(small, failure)
    exec(compile(text, "<reproducer>", "exec"), {})  # noqa: S102 - what a user would do
    assert f"kind='{failure.kind}'" in capsys.readouterr().out


def test_the_same_seed_writes_the_same_program() -> None:
    assert [write_program(seed) for seed in range(20)] == [write_program(s) for s in range(20)]
    assert len({write_program(seed).source for seed in range(20)}) == 20


def _program(body: str, returned: str) -> Program:
    text = f"bs, n = parents.shape\n{BUILD}{body}\nreturn [{returned}]"
    rows = "\n".join(f"    {row}" for row in text.splitlines())
    header = "parents, lens, others, beams, ids, chain_beams, chain_ids, x, query, cache, pages"
    return Program(SETTING, (), (), f"def program({header}, g0, g1):\n{rows}\n")


@pytest.mark.parametrize(
    ("body", "returned", "layouts", "legal"),
    [
        ("", "r0", Layouts({20: 1}), True),
        ("", "r0", Layouts({20: 2}), True),
        ("", "r0, m0", Layouts({20: 1}), False),
        ("r1 = F.block(m0, lens, n, 0, 1)", "r1", Layouts({20: 1}), True),
        ("r1 = F.block(m0, lens, n, 0, 1)", "r1", Layouts({20: 2}), False),
        ("r1 = F.block_any(m0, lens, n, 0, 1)", "r1", Layouts({20: 2}), True),
        ("r1 = F.block(m0, others, n, 0, 1)", "r1", Layouts({20: 1}), False),
        ("r1 = F.block_untold(m0, lens, n, 1)", "r1", Layouts({20: 1}), False),
        ("r1 = F.block_untold(m0, lens, n, 1)", "r1", Layouts({}, frozenset({20})), True),
        ("r1 = F.full(m0, 1)", "r1", Layouts({}, frozenset({20})), False),
        ("r1 = F.full(m0, 1)", "r0", Layouts({20: 1}), True),
        ("r1 = F.nothing(m0, x, 1)", "r1", Layouts({20: 1}), True),
        ("r1 = m0.new_ones(m0.shape)", "r1", Layouts({20: 1}), True),
        ("r1 = F.block_causal(m0, lens, n, 0, False, 1)", "r1", Layouts({20: 1}), True),
        (
            "r1 = F.block_causal(m0, lens, n, 0, False, 1)",
            "r1",
            Layouts({}, chained=frozenset({1})),
            False,
        ),
    ],
)
def test_what_the_oracle_allows(body: str, returned: str, layouts: Layouts, legal: bool) -> None:
    program = _program(body, returned)
    function = program.function()
    expected = function(*make_inputs(SETTING, 0))
    equal = []
    for seed in (1, 2):
        with Relayout(layouts, seed):
            actual = function(*make_inputs(SETTING, 0))
        equal.append(all(map(torch.equal, actual, expected)))
    assert all(equal) is legal


def test_a_program_that_raises_is_refused_and_not_wrong() -> None:
    program = _program("r1 = F.block(m0, lens, n + 40, 0, 1)", "r1")
    assert check(program).refused


def test_the_fuzzer_shares_nothing_with_the_passes() -> None:
    for path in Path(torchvm.tools.fuzz.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith("torchvm.passes") for name in names), path
