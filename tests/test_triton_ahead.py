"""GPU kernels compiled with no GPU: what they use, and which arguments compile them again."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels cannot be compiled", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is published for Linux alone")

from triton.backends import backends
from triton.runtime.jit import create_function_from_signature

from torchvm.ops.kernels import (
    triton_attention,
    triton_candidates,
    triton_tree,
    triton_verify,
)
from torchvm.ops.layout import TreeMaskMode
from torchvm.tools.bench.ahead import (
    SIZES,
    TARGETS,
    Program,
    attention_programs,
    compile_ahead,
    programs,
)

if TYPE_CHECKING:
    from pathlib import Path

PROGRAMS = programs()
# Heads of 64 only where they once spilled: packed rows with a window and a cap.
ATTENTION = [p for p in attention_programs() if "x 128" in p.mode or "window" in p.mode]
# Shared memory that a program may ask for.
SHARED_BYTES = {"sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile every time, and leave nothing in the user's cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def _label(program: Program) -> str:
    return f"{program.name}-{program.num_draft_tokens}-{program.mode}"


def test_every_size_and_mode_is_compiled() -> None:
    built = {(p.num_draft_tokens, p.mode) for p in PROGRAMS if p.name == "build_tree"}
    assert {(n, mode.name) for n in (4, 16, 64, 256) for mode in TreeMaskMode} <= built
    assert {p.num_draft_tokens for p in PROGRAMS if p.name == "verify_tree_greedy"} == set(SIZES)
    assert set(TARGETS) == {"sm_90", "sm_100", "gfx942"}


@pytest.mark.parametrize("program", PROGRAMS, ids=_label)
@pytest.mark.parametrize("target", TARGETS)
def test_uses_few_registers_and_no_local_memory(program: Program, target: str) -> None:
    usage = compile_ahead(program, target)
    assert 0 < usage.registers <= 128
    assert usage.local_bytes == 0
    assert 1024 < usage.binary_bytes < 128 * 1024


@pytest.mark.parametrize("program", ATTENTION, ids=_label)
@pytest.mark.parametrize("target", TARGETS)
def test_attention_keeps_its_tiles_in_registers_and_shared_memory(
    program: Program, target: str
) -> None:
    usage = compile_ahead(program, target)
    assert 0 < usage.registers <= (512 if target == "gfx942" else 255)
    assert usage.local_bytes == 0
    assert 0 < usage.shared_bytes <= SHARED_BYTES[target]


class _Key:
    """What a launch is compiled for: the specialisation that Triton's launcher looks up."""

    def __init__(self, kernel: Any, target: str) -> None:
        backend = backends[{"cuda": "nvidia", "hip": "amd"}[TARGETS[target].backend]].compiler(
            TARGETS[target]
        )
        self.bind = create_function_from_signature(kernel.signature, kernel.params, backend)

    def __call__(self, *arguments: object, **constants: object) -> str:
        return str(self.bind(*arguments, **constants)[1])


def _tensor(skip: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(64, dtype=dtype)[skip:]


@pytest.mark.parametrize("target", TARGETS)
def test_a_build_is_compiled_once_for_any_batch(target: str) -> None:
    key = _Key(triton_tree.tree_kernel, target)
    outputs = [_tensor(0) for _ in range(4)]

    def build(n: int, skip: int, *integers: int) -> str:
        batch, topk, limit, width, units, numel = integers
        inputs = [_tensor(skip) for _ in range(3)]
        return key(
            *inputs, _tensor(0, torch.uint8), *outputs, batch, n, topk, limit, width, units, numel,
            MODE=0, FILL_PREFIX=True, FROM_PARENTS=False,
            BLOCK_N=64, ROWS=32, COLUMNS=32, UNIT_BYTES=1,
        )  # fmt: skip

    usual = build(60, 0, 4, 4, 5, 17, 60, 4096)
    assert build(60, 1, 1, 1, 1, 1, 1, 1) == usual
    assert build(60, 1, 256, 16, 16, 32, 64, 1 << 40) == usual
    assert build(33, 0, 4, 4, 5, 17, 33, 4096) == usual
    # A multiple of 16 is worth its own: the rows of a compact mask are then aligned.
    assert build(64, 0, 4, 4, 5, 17, 60, 4096) != usual


@pytest.mark.parametrize("target", TARGETS)
def test_verification_and_selection_are_compiled_once_for_any_batch(target: str) -> None:
    verify = _Key(triton_verify.verify_kernel, target)
    outputs = [_tensor(0, torch.int32) for _ in range(3)]
    verifications = {
        verify(*[_tensor(skip) for _ in range(5)], *outputs, n, width, BLOCK_N=64, BLOCK_W=16)
        for skip, n, width in ((0, 60, 9), (1, 64, 16), (0, 33, 1))
    }
    assert len(verifications) == 1
    select = _Key(triton_candidates.candidates_kernel, target)
    selections = {
        select(_tensor(skip, torch.float32), _tensor(skip), _tensor(0), _tensor(0), m, s, BLOCK=64)
        for skip, m, s in ((0, 60, 9), (1, 64, 16), (0, 33, 1))
    }
    assert len(selections) == 1


@pytest.mark.parametrize("target", TARGETS)
def test_attention_is_compiled_once_for_any_batch_and_cache(target: str) -> None:
    key = _Key(triton_attention.attention_kernel, target)
    half = torch.float16
    tile = triton_attention.attention_tile(16, 64, 2)._asdict()

    def attend(skip: int, batch: int, n: int, pages: int, window: int, stride: int) -> str:
        return key(
            _tensor(0, half), _tensor(0, half), _tensor(0, half), _tensor(skip, torch.int32),
            _tensor(skip), _tensor(skip, torch.uint8), *[_tensor(0, torch.float32)] * 3,
            *[stride] * 9, pages, 1, batch * n, n, batch, pages, pages, pages * 9, n,
            batch * n * n, window, 0.5, 1.0,
            GROUP=4, HEAD_DIM=64, MODE=0, WINDOWED=False, CAPPED=False, SHARED=True,
            **{name: tile[name] for name in ("BLOCK_D", "ROWS", "KEYS")},
        )  # fmt: skip

    usual = attend(0, 5, 4, 7, 0, 4096)
    assert attend(1, 1, 1, 1, 1, 64) == usual
    assert attend(3, 64, 16, 1 << 20, 4096, 1 << 33) == usual
    # Keys that begin anywhere are loaded an element at a time.
    assert attend(0, 5, 4, 7, 0, 4097) != usual
