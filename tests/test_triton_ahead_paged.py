"""The GPU kernel of attention without a mask compiled with no GPU: what it uses, and how often."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels cannot be compiled", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is published for Linux alone")

import triton

from tests.test_triton_ahead import _Key, _tensor
from torchvm.ops.kernels.triton_paged import paged_kernel, paged_tile
from torchvm.tools.bench.ahead import TARGETS, _amd_usage, _nvidia_usage, _source

if TYPE_CHECKING:
    from pathlib import Path

WINDOW = {"IS_CAUSAL": True, "HAS_WINDOW": True, "HAS_CAP": True}
CAUSAL = {"IS_CAUSAL": True, "HAS_WINDOW": False, "HAS_CAP": False}
PREFIX = {"IS_CAUSAL": False, "HAS_WINDOW": False, "HAS_CAP": False}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile every time, and leave nothing in the user's cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(
    ("dim", "dtype", "rows", "seen"),
    [
        (128, "bf16", 4, CAUSAL),
        (256, "fp16", 64, PREFIX),
        (512, "bf16", 64, WINDOW),
        (128, "fp32", 64, WINDOW),
    ],
)
@pytest.mark.parametrize("target", TARGETS)
def test_fits_in_registers_and_shared_memory(
    target: str, dim: int, dtype: str, rows: int, seen: dict[str, bool]
) -> None:
    is_hip = TARGETS[target].backend == "hip"
    tile = paged_tile(rows, dim, 4 if dtype == "fp32" else 2, is_hip=is_hip)
    options = {key: tile.pop(key) for key in ("num_warps", "num_stages")}
    tensors = dict.fromkeys(("query", "k_cache", "v_cache", "out"), f"*{dtype}")
    source = _source(
        paged_kernel, {"GROUP": 4, **seen, **tile}, page_table="*i32", lse="*fp32", **tensors
    )
    compiled = triton.compile(
        source, target=TARGETS[target], options=options | {"enable_fp_fusion": True}
    )
    asm = compiled.asm
    registers, local = _amd_usage(asm["amdgcn"]) if is_hip else _nvidia_usage(asm["cubin"])
    assert 0 < registers <= 255
    assert local == 0
    assert 0 < compiled.metadata.shared <= (64 if is_hip else 227) << 10


@pytest.mark.parametrize("target", TARGETS)
def test_is_compiled_once_for_any_batch(target: str) -> None:
    key, half = _Key(paged_kernel, target), _tensor(0, torch.bfloat16)
    tile: dict[str, Any] = paged_tile(64, 128, 2, is_hip=False)
    blocks = {name: size for name, size in tile.items() if name.startswith("BLOCK")}

    def attend(skip: int, *counts: float) -> str:
        return key(
            half, half, half, _tensor(skip, torch.int32), _tensor(skip), half,
            _tensor(0, torch.float32), *counts, 128, *[4096] * 6, GROUP=4, **WINDOW, **blocks,
        )  # fmt: skip

    usual = attend(0, 0.5, 128, 30.0, 4, 9, 64, 7)
    assert attend(1, 1.0, 1, 1.0, 1, 1, 1, 1) == usual
    assert attend(0, 1e9, 1 << 40, 16.0, 16, 128, 16, 64) == usual
