"""The GPU kernels on the CPU, under Triton's interpreter.

An interpreted kernel cannot be compiled and a compiled one not interpreted, and Triton decides
when it is imported: so this runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest


def _series(package: str) -> tuple[int, int]:
    major, minor = version(package).split(".")[:2]
    return int(major), int(minor)


HERE = Path(__file__).parent
ROOT = HERE.parent


@pytest.mark.parametrize("name", sorted(p.name for p in HERE.glob("triton_interpreted*.py")))
def test_interpreted_kernels_equal_the_oracle_and_the_cpu(name: str) -> None:
    pytest.importorskip("triton", reason="Triton is published for Linux alone")
    if _series("triton") < (3, 7) and _series("numpy") >= (2, 4):
        pytest.skip("the interpreter of Triton before 3.7 does not run with numpy 2.4 or newer")
    tests = HERE / name
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    ran = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
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
