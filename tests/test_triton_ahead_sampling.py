"""The sampling kernel compiled with no GPU, at the vocabularies of large models."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels cannot be compiled", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is published for Linux alone")

import triton
from triton.compiler import ASTSource

from tests.test_triton_ahead import _Key
from torchvm.ops.kernels.triton_sampling import sampling_kernel, sampling_tile
from torchvm.ops.sampling import MOST_TOKENS
from torchvm.tools.bench.ahead import TARGETS, _amd_usage, _nvidia_usage

if TYPE_CHECKING:
    from pathlib import Path

POINTERS = {
    "target_probs": "*fp32", "coins": "*fp32", "coins_for_final": "*fp32",
    "predicts": "*i32", "accept_index": "*i32", "accept_token_num": "*i32",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile every time, and leave nothing in the user's cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize(("n", "vocab"), [(4, 200), (16, 32_000), (64, 152_064), (256, 262_144)])
@pytest.mark.parametrize("target", TARGETS)
def test_uses_few_registers_and_no_local_memory(target: str, n: int, vocab: int) -> None:
    is_hip = TARGETS[target].backend == "hip"
    constants = sampling_tile(n, 8, vocab)
    num_warps = constants.pop("num_warps")
    signature: dict[str, str] = {}
    aligned = {}
    for place, parameter in enumerate(sampling_kernel.params):
        kind = parameter.annotation_type or POINTERS.get(parameter.name, "*i64")
        signature[parameter.name] = "constexpr" if parameter.is_constexpr else kind
        if not parameter.is_constexpr and not parameter.do_not_specialize:
            aligned[place,] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        ASTSource(sampling_kernel, signature, constants, aligned), target=TARGETS[target],
        options={"enable_fp_fusion": True, "num_warps": num_warps},
    )  # fmt: skip
    asm = compiled.asm
    registers, local = _amd_usage(asm["amdgcn"]) if is_hip else _nvidia_usage(asm["cubin"])
    assert 0 < registers <= 255
    assert local == 0
    assert compiled.metadata.shared <= (64 if is_hip else 227) << 10


def test_tiles_cover_every_vocabulary() -> None:
    for vocab in (1, 2, 255, 256, 257, 4096, 4097, 152_064, MOST_TOKENS):
        tile = sampling_tile(5, 3, vocab)
        assert tile["BLOCK"] * tile["TILES"] >= vocab
        assert (tile["BLOCK_N"], tile["BLOCK_W"]) == (8, 4)
    assert sampling_tile(1, 1, MOST_TOKENS)["TILES"] == 1024


@pytest.mark.parametrize("target", TARGETS)
def test_compiled_once_for_any_batch(target: str) -> None:
    key = _Key(sampling_kernel, target)
    probs, narrow = torch.empty(64), [torch.empty(64, dtype=torch.int32)] * 3

    def launch(skip: int, n: int, max_accept: int, *thresholds: float) -> str:
        index, coins = torch.empty(64, dtype=torch.int64)[skip:], torch.empty(64)[skip:]
        return key(
            *[index] * 4, probs, coins, coins, *narrow, n, 32_000, max_accept, *thresholds,
            BLOCK_N=64, BLOCK_W=16, BLOCK=4096, TILES=8,
        )  # fmt: skip

    usual = launch(0, 60, 9, 1.0, 1.0)
    assert launch(1, 64, 16, 0.5, 0.25) == usual
    assert launch(1, 33, 1, 1.0, 0.9) == usual
