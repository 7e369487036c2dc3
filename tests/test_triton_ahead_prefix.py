"""GPU kernels of the readers of the prefix compiled with no GPU: what they use, and how often."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.test_triton_ahead import _Key, _tensor

if TYPE_CHECKING:
    from pathlib import Path

import triton

from torchvm.ops.kernels import triton_packing, triton_unified
from torchvm.tools.bench.ahead import TARGETS, _amd_usage, _nvidia_usage, _source

MOST_SHARED = {"sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
"""Bytes of shared memory that a program may have."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile every time, and leave nothing in the user's cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def _check_usage(kernel: Any, target: str, constants: dict[str, Any], **types: str) -> None:
    options = {"enable_fp_fusion": True, "num_warps": constants.pop("num_warps")}
    options["num_stages"] = constants.pop("num_stages")
    source = _source(kernel, constants, **types)
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    if TARGETS[target].backend == "cuda":
        registers, local_bytes = _nvidia_usage(compiled.asm["cubin"])
    else:
        registers, local_bytes = _amd_usage(compiled.asm["amdgcn"])
    assert registers > 0
    assert local_bytes == 0
    assert compiled.metadata.shared <= MOST_SHARED[target]


@pytest.mark.parametrize(
    ("dim", "dtype", "rows", "packed", "limits"),
    [
        (64, "fp16", 16, False, True),
        (128, "bf16", 64, False, False),
        (128, "bf16", 64, True, True),
        (256, "fp16", 64, True, True),
        (128, "fp32", 64, True, False),
        (128, "fp32", 64, False, True),
    ],
)
@pytest.mark.parametrize("target", TARGETS)
def test_attention_uses_no_local_memory(
    target: str, dim: int, dtype: str, rows: int, packed: bool, limits: bool
) -> None:
    tile = triton_unified.prefix_tile(rows, dim, 4 if dtype == "fp32" else 2)._asdict()
    constants = {
        "DIM": dim, "GROUP": 4, "PACKED": packed, "HAS_WINDOW": limits, "HAS_CAP": limits, **tile,
    }  # fmt: skip
    tensors = dict.fromkeys(("query", "k_cache", "v_cache", "out"), f"*{dtype}")
    _check_usage(
        triton_unified.prefix_kernel, target, constants, page_table="*i32", mask="*u8", **tensors
    )


@pytest.mark.parametrize("target", TARGETS)
def test_packing_uses_no_local_memory(target: str) -> None:
    constants = {"BLOCK": triton_packing.PACK_BLOCK, "num_warps": 4, "num_stages": 1}
    _check_usage(triton_packing.pack_kernel, target, constants, tree_mask="*u8", packed_mask="*u8")


@pytest.mark.parametrize("target", TARGETS)
def test_attention_is_compiled_once_for_any_batch(target: str) -> None:
    key, half = _Key(triton_unified.prefix_kernel, target), _tensor(0, torch.float16)
    tile = triton_unified.prefix_tile(16, 64, 2)._asdict()
    blocks = {name: value for name, value in tile.items() if name.startswith("BLOCK")}

    def attend(skip: int, width: int, pages: int, n: int, *limits: float) -> str:
        return key(
            half, half, half, _tensor(skip, torch.int32), _tensor(skip),
            _tensor(skip, torch.uint8), _tensor(skip), half, *[64 * 16] * 9, width, pages, 16, n,
            *limits, DIM=64, GROUP=4, PACKED=False, HAS_WINDOW=True, HAS_CAP=True, **blocks,
        )  # fmt: skip

    usual = attend(0, 16, 16, 16, 1 << 40, 1.0, 1, 1.0)
    assert attend(1, 1, 1, 1, 1, 0.25, 1 << 40, 30.0) == usual
    assert attend(1, 33, 70_001, 7, 33, 0.3, 16, 2.5) == usual


@pytest.mark.parametrize("target", TARGETS)
def test_packing_is_compiled_once_for_any_batch(target: str) -> None:
    key = _Key(triton_packing.pack_kernel, target)

    def pack(skip: int, *integers: int) -> str:
        inputs = (_tensor(skip, torch.uint8), _tensor(skip))
        return key(*inputs, _tensor(0, torch.uint8), _tensor(0), *integers, BLOCK=512)

    usual = pack(0, 16, 16, 64, 64)
    assert pack(1, 1, 1, 1, 1) == usual
    assert pack(1, 7, 9, 1 << 40, 3) == usual
