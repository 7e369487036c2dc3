"""Examples in docstrings, and those of the README, do what they show."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from typing import TYPE_CHECKING

import pytest
import torch

import torchvm

if TYPE_CHECKING:
    from pathlib import Path

DOCUMENTED = (
    "alloc_verify_mask", "build_tree", "build_tree_from_parents", "expand_tree_pages",
    "mask_convert", "maybe_create_verify_mask", "pack_mask_bits",
    "sampling_probs", "select_draft_candidates", "verify_tree_greedy",
)  # fmt: skip
"""Functions whose docstrings must have an example."""


def _found() -> list[doctest.DocTest]:
    """Examples of every module, but for kernels and tools, whose import may do things."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    tests = []
    for info in pkgutil.walk_packages(torchvm.__path__, "torchvm."):
        if not info.name.startswith(("torchvm.ops.kernels", "torchvm.tools")):
            tests += finder.find(importlib.import_module(info.name), info.name, globs={})
    return [test for test in tests if test.examples]


@pytest.mark.parametrize("example", _found(), ids=lambda test: str(test.name))
def test_an_example(example: doctest.DocTest) -> None:
    assert doctest.DocTestRunner().run(example).failed == 0


def test_the_main_functions_have_examples() -> None:
    assert [name for name in DOCUMENTED if ">>>" not in getattr(torchvm, name).__doc__] == []


def _blocks(root: Path, language: str) -> list[str]:
    text = (root / "README.md").read_text()
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [block for name, block in found if name == language]


def test_the_readme(pytestconfig: pytest.Config) -> None:
    """Its function is one that would compile as it says, and its mistake is told as it says."""
    (code,) = _blocks(pytestconfig.rootpath, "python")
    namespace: dict[str, object] = {}
    exec(compile(code, "verify_step.py", "exec"), namespace)  # noqa: S102 - our own page
    n, heads, dim, pages = 4, 2, 8, 3
    seq_lens = torch.full((256,), 5)
    parents = torch.tensor([[-1, 0, 0, 1]]).expand(256, -1).contiguous()
    cache = torch.zeros(pages, 16, heads, dim)
    table = torch.zeros(256, 1, dtype=torch.int32)
    query = torch.zeros(256, n, heads, dim)
    function = namespace["verify"]
    assert callable(function)
    (mask,) = torchvm.explain(function, parents, seq_lens, query, cache, cache, table).masks
    outputs = _blocks(pytestconfig.rootpath, "")
    assert [str(mask.report)] == [block.strip() for block in outputs if "(readers: " in block]
    (session,) = [block for block in outputs if block.startswith(">>>")]
    made, built, shown = session.strip().split("\n")
    globs = {"torch": torch, "torchvm": torchvm, "parents": parents, "seq_lens": seq_lens}
    exec(made.removeprefix(">>> "), globs)  # noqa: S102 - our own page
    with pytest.raises(ValueError, match=re.escape(shown.removeprefix("ValueError: "))):
        exec(built.removeprefix(">>> "), globs)  # noqa: S102 - our own page
