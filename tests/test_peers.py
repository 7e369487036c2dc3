"""Static trees beside those of other packages, where they are installed."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from torchvm.tools.bench import peers
from torchvm.tools.bench.measure import QUICK, measure
from torchvm.tools.cli import app


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "mask", "--quick", "--peers", *arguments])


def _absent(name: str) -> str:
    return next((line for line in peers.missing() if line.startswith(name)), "")


@pytest.mark.parametrize("peer", peers.PEERS, ids=lambda peer: peer.name)
@pytest.mark.parametrize("n", [2, 3, 8, 33])
def test_peers_lay_out_the_same_trees(peer: peers.Peer, n: int) -> None:
    if _absent(peer.name):
        pytest.skip(_absent(peer.name))
    for seed in range(5):
        row = measure(peers.peer_case(peers.draw_tree(n, seed)), QUICK)
        assert row.differing == ()
        assert peer.name in row.times


@pytest.mark.parametrize("n", [1, 2, 9, 65])
def test_we_lay_out_what_a_walk_does(n: int) -> None:
    tree = peers.draw_tree(n, seed=n)
    assert len(tree.parents) == n
    assert all(parent < node for node, parent in enumerate(tree.parents))
    case = peers.peer_case(tree)
    row = measure(case._replace(contenders=case.contenders[:1]), QUICK)
    assert (row.base, row.differing) == ("torchvm", ())


@pytest.mark.parametrize("key", ["mask", "positions", "paths"])
def test_a_wrong_layout_is_found(key: str) -> None:
    case = peers.peer_case(peers.draw_tree(6, seed=0))
    right = case.contenders[0]

    def results() -> Any:
        assert right.results is not None
        found = right.results()
        changes = {"mask": torch.logical_not, "positions": torch.neg, "paths": lambda p: p[1:]}
        return found | {key: changes[key](found[key])}

    planted = right._replace(name="planted", results=results)
    row = measure(case._replace(contenders=(*case.contenders, planted)), QUICK)
    assert row.differing == ("planted",)


def test_absent_peers_are_told_how_to_get(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tuple(peer._replace(package=f"no-such-{peer.package}") for peer in peers.PEERS)
    monkeypatch.setattr(peers, "PEERS", gone)
    done = invoke()
    assert done.exit_code == 0
    assert done.stdout.splitlines()[-2:] == [
        (
            "EAGLE is left out (no-such-eagle-llm is not installed): pip install --no-deps "
            "no-such-eagle-llm==1.2.1 (it needs torch and transformers)"
        ),
        (
            "attention-gym is left out (no-such-attn-gym is not installed): pip install --no-deps "
            "no-such-attn-gym==0.0.17 (it needs torch)"
        ),
    ]
    found = json.loads(invoke("--json").stdout)
    assert list(found["groups"]) == ["mask"]
    assert len(found["absent_peers"]) == 2


def test_another_version_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    other = peers.PEERS[0]._replace(package="torch==0.0.1")
    monkeypatch.setattr(peers, "PEERS", (other,))
    (line,) = peers.missing()
    assert line.startswith(f"EAGLE is left out (torch is {torch.__version__.partition('+')[0]}")
