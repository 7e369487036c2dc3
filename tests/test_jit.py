"""The kernels' compiler: where it keeps its cache, and that it does without."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent

PROBE = """
import torch, torchvm.ops.tree as tree
from torchvm.ops.kernels import cpu_tree
mask = torch.zeros(9, dtype=torch.bool)
tree.build_tree_from_parents(
    torch.tensor([[-1, 0, 1]]), torch.tensor([4]), mask, num_draft_tokens=3, tree_mask_mode=1
)
print(tree.__file__, mask.int().tolist(), cpu_tree._build.stats.cache_path, sep="|")
"""


def _run(site: Path, home: str) -> tuple[str, str, str]:
    result = subprocess.run(
        [sys.executable, "-B", "-c", PROBE],
        cwd=site,
        env={"PYTHONPATH": str(site), "HOME": home, "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    file, cells, cache = result.stdout.strip().split("|")
    assert Path(file).is_relative_to(site)
    assert cells == "[1, 0, 0, 1, 1, 0, 1, 1, 1]"
    return file, cells, cache


def _copy(site: Path) -> Path:
    """Copy the ops alone, with a file where each cache directory would be made."""
    package = site / "torchvm"
    package.mkdir()
    (package / "__init__.py").touch()
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "ops", package / "ops", ignore=ignore)
    return package / "ops" / "kernels"


def test_runs_where_no_cache_can_be_kept(tmp_path: Path) -> None:
    """Neither `__pycache__` nor a directory in HOME can be made, whoever runs the test."""
    kernels = _copy(tmp_path)
    (kernels / "__pycache__").touch()
    _, _, cache = _run(tmp_path, "/dev/null")
    assert cache == "None"


def test_keeps_a_cache_beside_the_kernels(tmp_path: Path) -> None:
    kernels = _copy(tmp_path)
    _, _, cache = _run(tmp_path, "/dev/null")
    assert Path(cache) == kernels / "__pycache__"
    assert list(Path(cache).glob("cpu_tree._build*.nbc"))


def test_keeps_a_cache_in_home_where_the_package_is_read_only(tmp_path: Path) -> None:
    site, home = tmp_path / "site", tmp_path / "home"
    site.mkdir()
    home.mkdir()
    (_copy(site) / "__pycache__").touch()
    _, _, cache = _run(site, str(home))
    assert Path(cache).is_relative_to(home)
    assert list(Path(cache).glob("cpu_tree._build*.nbc"))
