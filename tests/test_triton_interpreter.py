"""The GPU kernels on the CPU, under Triton's interpreter.

An interpreted kernel cannot be compiled and a compiled one not interpreted, and Triton decides
when it is imported: so this runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


def _series(package: str) -> tuple[int, int]:
    major, minor = version(package).split(".")[:2]
    return int(major), int(minor)


HERE = Path(__file__).parent
ROOT = HERE.parent
FILES = sorted(path.name for path in HERE.glob("triton_interpreted*.py"))


def _run(name: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / name)]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, text=True,
        capture_output=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Any]]]:
    """Every file of a selected test, two at a time: a process uses one core."""
    selected = [getattr(item, "callspec", None) for item in request.session.items]
    names = [spec.params["name"] for spec in selected if spec and spec.params.get("name") in FILES]
    with ThreadPoolExecutor(max_workers=2) as pool:
        yield {name: pool.submit(_run, name) for name in names}


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is published for Linux alone")
@pytest.mark.parametrize("name", FILES)
def test_interpreted_kernels_equal_the_oracle_and_the_cpu(
    name: str, request: pytest.FixtureRequest
) -> None:
    if _series("triton") < (3, 7) and _series("numpy") >= (2, 4):
        pytest.skip("the interpreter of Triton before 3.7 does not run with numpy 2.4 or newer")
    ran = request.getfixturevalue("runs")[name].result()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout


def test_ops_import_and_run_where_there_is_no_triton() -> None:
    program = """
import sys
sys.modules["triton"] = None
import torch, torchvm.ops.candidates, torchvm.ops.tree, torchvm.ops.verify
mask = torch.zeros(1, dtype=torch.bool)
parents, seq_lens = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
torchvm.ops.tree.build_tree_from_parents(
    parents, seq_lens, mask, num_draft_tokens=1, tree_mask_mode=1
)
assert mask.item()
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
