"""The compile-cache key: one in every process, another for all that a rewrite depends on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from itertools import chain, combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import torchvm
from tests.verify_graphs import CASES, batch
from torchvm import MaskRead, Reason, register_mask_reader
from torchvm.compilation import PASS_NAMES, inductor_options, recording_pipeline
from torchvm.ops import contracts
from torchvm.passes import cache_key as module
from torchvm.passes.cache_key import cache_key

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCES = sorted(
    str(path.relative_to(Path(package.__path__[0]).parent))
    for package in (torchvm.ops, torchvm.passes)
    for path in Path(package.__path__[0]).glob("*.py")
)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    copied = {op: dict(by_arg) for op, by_arg in contracts._READERS.items()}
    monkeypatch.setattr(contracts, "_READERS", copied)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    module._source_digest.cache_clear()


_CHILD = """
import torchvm
from torchvm.compilation import recording_pipeline

NAMES = {"causal", "tree", "chain", "window"}

def make(limit):
    def reads(topk, kind="tree", **_):
        known = kind in NAMES and kind not in {"a", "b", "c"}
        return torchvm.MaskRead.NOTHING if known and topk <= limit else torchvm.MaskRead.FULL
    return reads

torchvm.register_mask_reader("elsewhere::op", arg="mask", reads=make(3), mode_arg="m",
                             modes=[2, 0, 1])
print(recording_pipeline().uuid())
"""


def test_every_process_has_the_same_key(pytestconfig: pytest.Config) -> None:
    keys = set()
    for seed in ("0", "4242"):
        run = subprocess.run(
            [sys.executable, "-c", _CHILD],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=pytestconfig.rootpath,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        keys.add(run.stdout.strip())
    assert len(keys) == 1
    assert len(keys.pop()) == 64


def test_every_selection_of_passes_has_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_schemas", list)  # The same each time, and slow.

    def keys() -> list[str]:
        chosen = chain.from_iterable(
            combinations(PASS_NAMES, n) for n in range(len(PASS_NAMES) + 1)
        )
        return [repr(_uuids(passes)) for passes in chosen]

    enabled = keys()
    assert len(set(enabled)) == len(enabled) == 2 ** len(PASS_NAMES)
    monkeypatch.setenv("TORCHVM_DISABLE", "1")
    assert not set(enabled) & set(keys())


def _uuids(passes: tuple[str, ...]) -> dict[str, Any]:
    return {hook: p.uuid() for hook, p in inductor_options(passes=passes).items()}


@pytest.mark.parametrize("source", SOURCES)
def test_a_changed_source_changes_the_key(
    source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = cache_key([])
    for package in (torchvm.ops, torchvm.passes):
        folder = Path(package.__path__[0])
        shutil.copytree(folder, tmp_path / folder.name)
        monkeypatch.setattr(package, "__path__", [str(tmp_path / folder.name)])
    module._source_digest.cache_clear()
    assert cache_key([]) == before
    with (tmp_path / source).open("a") as file:
        file.write("#\n")
    module._source_digest.cache_clear()
    assert cache_key([]) != before


def test_another_version_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache_key([])
    monkeypatch.setattr(module, "__version__", "999")
    assert cache_key([]) != before


def test_another_schema_changes_the_key() -> None:
    before = cache_key([])
    library = torch.library.Library("torchvm", "FRAGMENT")
    library.define("key_probe(Tensor x) -> Tensor")
    assert cache_key([]) != before
    library._destroy()
    assert cache_key([]) == before


@pytest.mark.parametrize(
    "change",
    [
        {"op": "elsewhere::other"},
        {"arg": "other"},
        {"reads": MaskRead.NOTHING},
        {"mode_arg": "other"},
        {"modes": [0]},
        {"causal_arg": "causal"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_part_of_a_contract_changes_the_key(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    contract: dict[str, Any] = {
        "op": "elsewhere::op",
        "arg": "mask",
        "reads": MaskRead.FULL,
        "mode_arg": "mode",
    }
    keys = set()
    for fields in (contract, {**contract, **change}):
        monkeypatch.setattr(contracts, "_READERS", {})
        register_mask_reader(**fields)
        keys.add(recording_pipeline().uuid())
    assert len(keys) == 2
    assert None not in keys


def test_flipping_options_gives_the_right_graph_and_report() -> None:
    function = CASES["tree_block_reader"].function
    both: tuple[tuple[list[str], Reason], ...] = (
        ([], Reason.PASS_OFF),
        (["CompactTreeBlockReaders"], Reason.COMPACTED),
    )
    counters.clear()
    with fresh_cache(), torch.no_grad():
        for passes, verdict in (*both, *both):
            torch._dynamo.reset()
            torchvm.clear_reports()
            options: dict[str, Any] = {"passes": passes}
            actual = torch.compile(function, backend="torchvm", options=options)(*batch())
            for a, e in zip(actual, function(*batch()), strict=True):
                assert torch.equal(a, e)
            assert [r.verdict for r in torchvm.reports()] == [verdict]
    assert counters["aot_autograd"]["autograd_cache_hit"] == 2
