"""Imports go one way, tools -> torchvm -> passes -> ops, and kernels stay by themselves."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
ORDER = ["ops", "passes", "torchvm", "tools"]


def _files(folder: str) -> list[Path]:
    links = [ROOT / "torchvm" / name for name in ("ops", "passes", "tools")]
    found = sorted((ROOT / folder).rglob("*.py"))
    return [p for p in found if not any(p.is_relative_to(link) for link in links)]


def _imports(path: Path) -> list[str]:
    """Modules that a file imports anywhere, type-checking blocks included."""
    modules: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            module = node.module or ""
            modules.append(module)
            if module == "torchvm":
                modules.extend(f"torchvm.{alias.name}" for alias in node.names)
    return modules


def _layer(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] != "torchvm":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in ORDER else "torchvm"


def test_every_folder_has_files() -> None:
    assert all(len(_files(folder)) > 3 for folder in ORDER)


def test_arrows_point_down() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for rank, folder in enumerate(ORDER)
        for path in _files(folder)
        for module in _imports(path)
        if (layer := _layer(module)) is not None and ORDER.index(layer) > rank
    ]
    assert wrong == []


def test_kernels_import_only_the_layout() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in _files("ops/kernels")
        for module in _imports(path)
        if (_layer(module) == "ops" and not module.startswith(("torchvm.ops.kernels",)))
        and module != "torchvm.ops.layout"
    ]
    assert wrong == []


def test_triton_and_numba_stay_in_the_kernels() -> None:
    kernels = ROOT / "ops" / "kernels"
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for folder in ORDER
        for path in _files(folder)
        if not path.is_relative_to(kernels) and not path.is_relative_to(ROOT / "tools" / "bench")
        for module in _imports(path)
        if module.split(".")[0] in {"triton", "numba"}
    ]
    assert wrong == []
