"""The wheel holds every folder, and `import torchvm` works from it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

import torchvm

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

_PROBE = """
import sys
import torchvm.ops.tree, torchvm.passes.liveness, torchvm.tools.cli
import torch
print(torchvm.__file__)
print(torchvm.__version__, torch.ops.torchvm.build_tree.default._schema.name)
"""


def _copy_tracked_sources(root: Path, target: Path) -> None:
    """Copy what a checkout holds, the three links as links."""
    ignored = shutil.ignore_patterns(".git", "build", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(root, target, symlinks=True, ignore=ignored)


def test_the_wheel_holds_the_package(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    source, wheels, site = (tmp_path / name for name in ("source", "wheels", "site"))
    _copy_tracked_sources(pytestconfig.rootpath, source)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "-w", str(wheels), str(source)], check=True, capture_output=True)
    (wheel,) = wheels.glob("torchvm-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(site)
    assert torchvm.__version__ in wheel.name
    assert {"torchvm/py.typed", "torchvm/tools/dump_page.html"} <= set(names)
    tops = {name.split("/")[0] for name in names}
    assert tops == {"torchvm", f"torchvm-{torchvm.__version__}.dist-info"}
    run = subprocess.run(
        [sys.executable, "-c", _PROBE],
        env={"PYTHONPATH": str(site), "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    file, version = run.stdout.splitlines()
    assert file.startswith(str(site))
    assert version == f"{torchvm.__version__} torchvm::build_tree"


def test_links_are_links(pytestconfig: pytest.Config) -> None:
    package = pytestconfig.rootpath / "torchvm"
    for name in ("ops", "passes", "tools"):
        assert (package / name).readlink().as_posix() == f"../{name}"
