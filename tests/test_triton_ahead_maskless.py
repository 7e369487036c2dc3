"""The attention kernels that read no mask, compiled with no GPU at the widths of large models."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels cannot be compiled", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is published for Linux alone")

import triton
from triton.compiler import ASTSource

from tests.test_triton_ahead import _Key
from torchvm.ops.kernels import triton_linear, triton_mla, triton_sparse
from torchvm.tools.bench.ahead import TARGETS, _amd_usage, _nvidia_usage

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

INDICES = {
    "page_table": "*i32", "selected": "*i32",
    "seq_lens": "*i64", "positions": "*i64",
    "retrieve_next_token": "*i64", "retrieve_next_sibling": "*i64",
    "gate": "*fp32", "beta": "*fp32", "initial_state": "*fp32", "states": "*fp32",
}  # fmt: skip


class Variant(NamedTuple):
    """A kernel, its element type and its tile by vendor."""

    kernel: Any
    dtype: str
    tile: Callable[[bool], dict[str, int]]
    registers: int
    """At most so many of a thread."""


VARIANTS = {
    "mla": Variant(
        triton_mla.mla_kernel, "bf16",
        lambda is_hip: triton_mla.mla_tile(64, 512, 64, 2, is_hip=is_hip), 255,
    ),
    "mla-float32": Variant(
        triton_mla.mla_kernel, "fp32",
        lambda is_hip: triton_mla.mla_tile(64, 128, 64, 4, is_hip=is_hip), 255,
    ),
    "sparse": Variant(
        triton_sparse.sparse_kernel, "bf16",
        lambda is_hip: triton_sparse.sparse_tile(64, 512, 2, is_hip=is_hip), 255,
    ),
    "linear": Variant(
        triton_linear.linear_kernel, "bf16",
        lambda is_hip: triton_linear.linear_tile(64, 256, 128), 255,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile every time, and leave nothing in the user's cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("target", TARGETS)
def test_fits_in_registers_and_shared_memory(name: str, target: str) -> None:
    variant, is_hip = VARIANTS[name], TARGETS[target].backend == "hip"
    constants = variant.tile(is_hip)
    options = {key: constants.pop(key) for key in ("num_warps", "num_stages") if key in constants}
    signature: dict[str, str] = {}
    aligned = {}
    for place, parameter in enumerate(variant.kernel.params):
        kind = INDICES.get(parameter.name, f"*{variant.dtype}")
        signature[parameter.name] = (
            "constexpr" if parameter.is_constexpr else parameter.annotation_type or kind
        )
        if not parameter.is_constexpr and not parameter.do_not_specialize:
            aligned[place,] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(variant.kernel, signature, constants, aligned),
        target=TARGETS[target], options=options | {"enable_fp_fusion": True},
    )  # fmt: skip
    asm = compiled.asm
    registers, local = _amd_usage(asm["amdgcn"]) if is_hip else _nvidia_usage(asm["cubin"])
    assert 0 < registers <= variant.registers
    assert local == 0
    assert 0 < compiled.metadata.shared <= (64 if is_hip else 227) << 10


@pytest.mark.parametrize("target", TARGETS)
def test_kernels_are_compiled_once_for_any_batch(target: str) -> None:
    half = torch.empty(64, dtype=torch.bfloat16)
    index, narrow = torch.empty(64, dtype=torch.int64), torch.empty(64, dtype=torch.int32)
    mla = _Key(triton_mla.mla_kernel, target)
    tile = triton_mla.mla_tile(64, 512, 64, 2, is_hip=False)
    latents = {
        mla(*[half] * 4, narrow, index, half, *counts, 512, 64, 32768, 512, 4096, 64, **tile)
        for counts in ((0.5, 4, 16, 9, 64, 7), (1.0, 16, 128, 1, 1, 1), (1e9, 1, 1, 32, 16, 64))
    }
    assert len(latents) == 1
    sparse = _Key(triton_sparse.sparse_kernel, target)
    tile = triton_sparse.sparse_tile(64, 512, 2, is_hip=False)
    windows = {
        sparse(*[half] * 5, narrow, index, narrow, half, 0.5, *counts, 512, *[4096] * 12, **tile)
        for counts in ((128, 4, 1, 64, 9, 64, 7, 5, 3), (1,) * 9, (1 << 40, *[16] * 8))
    }
    assert len(windows) == 1
    linear = _Key(triton_linear.linear_kernel, target)
    tile, single = triton_linear.linear_tile(64, 128, 128), torch.empty(64)
    trees = {
        linear(*[half] * 3, *[single] * 3, index, index, half, single, *counts, 128, 128, **tile)
        for counts in ((0.5, 60, 3), (1.0, 64, 16), (2.0, 1, 1))
    }
    assert len(trees) == 1
