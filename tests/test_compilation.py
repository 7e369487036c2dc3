"""The backend and the options: what they accept, chain, cache and refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache

import torchvm
from tests.verify_graphs import CASES, batch
from torchvm import MaskRead, Reason, register_mask_reader
from torchvm.compilation import PASSES
from torchvm.ops import contracts
from torchvm.passes.base import ChainedPasses, MaskPipeline
from torchvm.passes.cache_key import UnhashableError, cache_key, function_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

DEAD = CASES["dead"].function
BLOCK = CASES["tree_block_reader"].function


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torchvm.clear_reports()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def _contracts_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = {op: dict(by_arg) for op, by_arg in contracts._READERS.items()}
    monkeypatch.setattr(contracts, "_READERS", copied)


def _pipeline() -> MaskPipeline:
    return MaskPipeline([p() for p in PASSES], lambda _: None)


def _hits() -> int:
    aot = counters["aot_autograd"]["autograd_cache_hit"]
    return aot + counters["inductor"]["fxgraph_cache_hit"]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_reports_survive_a_cache_hit(dynamic: bool) -> None:
    with fresh_cache(), torch.no_grad():
        found = []
        for expected_hit in (False, True):
            torch._dynamo.reset()
            torchvm.clear_reports()
            counters.clear()
            compiled = torch.compile(BLOCK, backend="torchvm", dynamic=dynamic)
            args = batch()
            actual, expected = compiled(*args), BLOCK(*args)
            assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))
            assert bool(_hits()) == expected_hit
            found.append(torchvm.reports())
        assert found[0] == found[1]
        assert [r.verdict for r in found[0]] == [Reason.COMPACTED]


def test_lost_reports_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with fresh_cache(), torch.no_grad():
        monkeypatch.setattr(torchvm.compilation, "save_reports", lambda *_: None)
        for _ in range(2):
            torch._dynamo.reset()
            torchvm.clear_reports()
            torch.compile(DEAD, backend="torchvm")(*batch())
            assert [r.verdict for r in torchvm.reports()] == [Reason.ELIDED]


def test_disabling_after_a_compile_is_not_served_from_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fresh_cache(), torch.no_grad():
        verdicts = []
        for value in ("0", "1", "0"):
            monkeypatch.setenv("TORCHVM_DISABLE", value)
            torch._dynamo.reset()
            torchvm.clear_reports()
            torch.compile(DEAD, backend="torchvm")(*batch())
            verdicts.append([r.verdict for r in torchvm.reports()])
    assert verdicts == [[Reason.ELIDED], [Reason.DISABLED], [Reason.ELIDED]]


_CHILD = """
import json, sys, torch, torchvm
from torch._dynamo.utils import counters
from tests.verify_graphs import CASES, batch
torch.set_num_threads(1)
with torch.no_grad():
    torch.compile(CASES["tree_block_reader"].function, backend="torchvm")(*batch())
print(json.dumps({
    "hits": counters["aot_autograd"]["autograd_cache_hit"],
    "reports": [str(r) for r in torchvm.reports()],
}))
"""


def test_another_process_hits_the_cache_and_has_the_report(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    import os

    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONHASHSEED": "random"}
    found = []
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "-c", _CHILD],
            env=env,
            cwd=pytestconfig.rootpath,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        found.append(json.loads(run.stdout.splitlines()[-1]))
    assert [f["hits"] for f in found] == [0, 1]
    assert found[0]["reports"] == found[1]["reports"]
    assert "COMPACTED" in found[0]["reports"][0]


def test_inductor_options_rewrite_and_report() -> None:
    with fresh_cache(), torch.no_grad():
        compiled = torch.compile(DEAD, options=torchvm.inductor_options())
        args = batch()
        assert torch.equal(compiled(*args), DEAD(*args))
    assert [r.verdict for r in torchvm.reports()] == [Reason.ELIDED]


class _Spy(CustomGraphPass):  # type: ignore[misc, unused-ignore]
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.calls += 1

    def uuid(self) -> str:
        return "spy"


@pytest.mark.parametrize("where", ["options", "config", "list"])
def test_a_users_own_pass_is_chained(where: str) -> None:
    spy = _Spy()
    theirs: Any = [spy] if where == "list" else spy
    options = {} if where == "config" else {"joint_custom_pre_pass": theirs}
    patch = {"joint_custom_pre_pass": theirs} if where == "config" else {}
    with fresh_cache(), torch.no_grad(), torch._inductor.config.patch(patch):
        torch.compile(DEAD, backend="torchvm", options=options)(*batch())
        assert spy.calls == 1
        torch._dynamo.reset()
        torch.compile(DEAD, options=torchvm.inductor_options(options=options))(*batch())
        assert spy.calls <= 2
    assert Reason.ELIDED in [r.verdict for r in torchvm.reports()]


def test_a_users_pass_without_a_key_turns_caching_off() -> None:
    assert ChainedPasses([_Spy(), _pipeline()]).uuid() is not None
    assert ChainedPasses([lambda graph: None, _pipeline()]).uuid() is None


def test_a_mode_is_mapped_to_inductors_options() -> None:
    args = batch()
    with fresh_cache(), torch.no_grad():
        compiled = torch.compile(DEAD, backend="torchvm", mode="max-autotune-no-cudagraphs")
        assert torch.equal(compiled(*args), DEAD(*args))
    assert [r.verdict for r in torchvm.reports()] == [Reason.ELIDED]


@pytest.mark.parametrize(
    ("options", "mode", "message"),
    [
        ({"no_such_option": 1}, None, "no_such_option"),
        ({"inner": "eager"}, None, "inner must be .* got 'eager'"),
        ({"passes": ["Nope"]}, None, "passes must be .* got \\['Nope'\\]"),
        ({"passes": "ElideUnreadMasks"}, None, "passes must be a list"),
        ({"inner": "aot_eager", "max_autotune": True}, None, "max_autotune"),
        ({"inner": "aot_eager"}, "max-autotune", "mode must be left out"),
    ],
)
def test_bad_settings_are_refused_by_name(
    options: dict[str, Any], mode: str | None, message: str
) -> None:
    # torch.compile itself refuses a mode together with options, so call the backend.
    def backend(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return torchvm.torchvm_backend(gm, inputs, mode=mode, options=options)

    with pytest.raises(BackendCompilerFailed, match=message):
        torch.compile(DEAD, backend=backend)(*batch())
    assert torchvm.reports() == ()


@pytest.mark.usefixtures("_contracts_restored")
def test_the_cache_key_follows_contracts() -> None:
    def key() -> str | None:
        return cache_key(["x"])

    first = key()
    assert first is not None
    assert key() == first
    assert cache_key(["y"]) != first
    register_mask_reader("elsewhere::op", arg="mask", reads=MaskRead.TREE_BLOCK)
    second = key()
    register_mask_reader("elsewhere::op", arg="mask", reads=MaskRead.NOTHING)
    third = key()
    assert len({first, second, third}) == 3

    def make(limit: int) -> Callable[..., MaskRead]:
        return lambda topk, **_: MaskRead.NOTHING if topk <= limit else MaskRead.FULL

    keys = []
    for limit in (1, 2):
        register_mask_reader("elsewhere::op", arg="mask", reads=make(limit))
        keys.append(key())
    assert keys[0] != keys[1]
    register_mask_reader("elsewhere::op", arg="mask", reads=make(1))
    assert key() == keys[0]

    unknown = object()

    def reads(**_: object) -> MaskRead:
        return MaskRead.FULL if unknown else MaskRead.NOTHING

    register_mask_reader("elsewhere::op", arg="mask", reads=reads)
    assert key() is None
    assert _pipeline().uuid() is None


_LIMIT = 1


def _reads_a_global(topk: int) -> bool:
    return topk == _LIMIT


def test_function_keys_follow_code_defaults_and_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    first = function_key(_reads_a_global)
    monkeypatch.setattr(sys.modules[__name__], "_LIMIT", 2)
    assert function_key(_reads_a_global) != first

    def with_default(topk: int = 1) -> int:
        return topk

    before = function_key(with_default)
    with_default.__defaults__ = (2,)
    assert function_key(with_default) != before

    def recursive(k: int) -> int:
        return recursive(k - 1) if k else 0

    assert function_key(recursive) == function_key(recursive)

    items = object()
    with pytest.raises(UnhashableError):
        function_key(lambda: items)
