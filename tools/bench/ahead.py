"""Compile the GPU kernels with no GPU and show what each uses.

    python -m torchvm.tools.bench.ahead [--json]

Registers and local memory are read from the binary itself: by cuobjdump, which comes with
Triton, for NVIDIA targets, and from the code object's metadata for AMD ones.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from torchvm.ops.kernels import (
    triton_attention,
    triton_candidates,
    triton_merge,
    triton_tiles,
    triton_tree,
    triton_verify,
)
from torchvm.ops.layout import TreeMaskMode

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "SIZES",
    "TARGETS",
    "Program",
    "Usage",
    "attention_programs",
    "compile_ahead",
    "programs",
]

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SIZES = (4, 16, 64, 256)
# Query heads of a kv head in the attention kernels that are compiled.
GROUP = 4


class Program(NamedTuple):
    """One kernel with its compile-time arguments."""

    name: str
    num_draft_tokens: int
    mode: str
    source: ASTSource
    num_warps: int
    num_stages: int | None = None
    """Triton's own number, unless the launcher asks for another."""


class Usage(NamedTuple):
    """What a compiled kernel takes."""

    registers: int
    """Of a thread; on AMD its vector registers."""
    local_bytes: int
    """Of a thread: stack and spills."""
    binary_bytes: int
    shared_bytes: int
    """Of a program."""


def _source(kernel: triton.JITFunction, constants: Mapping[str, int], **types: str) -> ASTSource:
    """Specialise a kernel as its launcher does for aligned tensors; pointers default to int64."""
    signature, divisible = {}, {}
    multiple = constants.get("BLOCK_N", 0)
    for position, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name] = "constexpr"
            continue
        signature[name] = parameter.annotation_type or types.get(name, "*i64")
        is_pointer = signature[name].startswith("*")
        if not parameter.do_not_specialize and (is_pointer or multiple % 16 == 0):
            divisible[position,] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, divisible)


def _tree(n: int, mode: int, fill_prefix: bool = True, from_parents: bool = False) -> Program:
    tile = triton_tree.tree_tile(n)._asdict()
    num_warps = tile.pop("num_warps")
    constants = {
        "MODE": int(mode),
        "FILL_PREFIX": fill_prefix and mode == TreeMaskMode.FULL_MASK,
        "FROM_PARENTS": from_parents,
        **tile,
        "UNIT_BYTES": triton_tree.store_unit(mode, n, 0, 0)[0],
    }
    source = _source(triton_tree.tree_kernel, constants, tree_mask="*u8")
    name = "build_tree_from_parents" if from_parents else "build_tree"
    label = TreeMaskMode(mode).name + ("" if fill_prefix else ", no prefix")
    return Program(name, n, label, source, num_warps)


def _verify(n: int, max_accept: int = 8) -> Program:
    types = dict.fromkeys(("predicts", "accept_index", "accept_token_num"), "*i32")
    constants = {"BLOCK_N": n, "BLOCK_W": max_accept}
    source = _source(triton_verify.verify_kernel, constants, **types)
    return Program("verify_tree_greedy", n, f"max_accept {max_accept}", source, 1)


def _candidates(num_candidates: int, dtype: str) -> Program:
    block, num_warps = triton_candidates.candidates_block(num_candidates)
    source = _source(triton_candidates.candidates_kernel, {"BLOCK": block}, scores=f"*{dtype}")
    label = f"{num_candidates} candidates, {dtype}"
    return Program("select_draft_candidates", 64, label, source, num_warps)


def _attention(
    n: int, mode: int, dtype: str, head_dim: int, *, options: bool = False, shared: bool = True
) -> Program:
    itemsize = 4 if dtype == "fp32" else 2
    tile = triton_attention.attention_tile(n * GROUP, head_dim, itemsize)._asdict()
    num_warps, num_stages = tile.pop("num_warps"), tile.pop("num_stages")
    constants = {
        "GROUP": GROUP, "HEAD_DIM": head_dim, "MODE": int(mode), "WINDOWED": options,
        "CAPPED": options, "SHARED": shared, **tile,
    }  # fmt: skip
    types = dict.fromkeys(("query", "k_cache", "v_cache"), f"*{dtype}")
    types |= dict.fromkeys(("out", "peaks", "weights"), "*fp32" if shared else f"*{dtype}")
    kernel = triton_attention.attention_kernel
    source = _source(kernel, constants, **types, page_table="*i32", tree_mask="*u8")
    label = TreeMaskMode(mode).name if mode >= 0 else "chain"
    label += f", {dtype} x {head_dim}" + ", window, cap" * options + ", alone" * (not shared)
    return Program("tree_attention", n, label, source, num_warps, num_stages)


def _merge(dtype: str, head_dim: int) -> Program:
    types = dict.fromkeys(("sums", "peaks", "weights"), "*fp32")
    constants = {"HEAD_DIM": head_dim, "BLOCK_D": triton.next_power_of_2(head_dim)}
    source = _source(triton_merge.merge_kernel, constants, **types, out=f"*{dtype}")
    return Program("merge", 64, f"{dtype} x {head_dim}", source, triton_merge.MERGE_WARPS)


def attention_programs() -> list[Program]:
    """The attention kernels of common head sizes, for few rows and for many."""
    full, qlen, packed = TreeMaskMode
    chain = int(triton_tiles.CHAIN)
    found = []
    for head_dim in (64, 128):
        for n in (4, 64):
            found += [_attention(n, full, "bf16", head_dim)]
            found += [_attention(n, packed, "bf16", head_dim, options=True)]
        found += [_attention(4, qlen, "fp32", head_dim, options=some) for some in (False, True)]
        found += [_attention(16, chain, "fp16", head_dim, shared=False)]
        found += [_merge("bf16", head_dim)]
    return found


def programs() -> list[Program]:
    """Every kernel but attention in the sizes kept within bounds: n of SIZES, each mode."""
    found = [_tree(n, mode) for n in SIZES for mode in TreeMaskMode]
    found += [_tree(n, TreeMaskMode.FULL_MASK, fill_prefix=False) for n in SIZES]
    found += [_tree(n, mode, from_parents=True) for n in (64, 256) for mode in TreeMaskMode]
    found += [_verify(n) for n in SIZES]
    found += [_candidates(64, "fp32"), _candidates(710, "fp32"), _candidates(7232, "fp64")]
    return found


def _nvidia_usage(binary: bytes) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return used["REG"], used["STACK"] + used["LOCAL"]


def _amd_usage(assembly: str) -> tuple[int, int]:
    def value(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", assembly)
        assert found is not None, name
        return int(found[1])

    return value("vgpr_count"), value("private_segment_fixed_size")


def compile_ahead(program: Program, target: str) -> Usage:
    """Compile a program for one of TARGETS and read what it uses."""
    options = {"enable_fp_fusion": True, "num_warps": program.num_warps}
    if program.num_stages is not None:
        options["num_stages"] = program.num_stages
    compiled = triton.compile(program.source, target=TARGETS[target], options=options)
    if TARGETS[target].backend == "cuda":
        binary = compiled.asm["cubin"]
        used = _nvidia_usage(binary)
    else:
        binary = compiled.asm["hsaco"]
        used = _amd_usage(compiled.asm["amdgcn"])
    return Usage(*used, len(binary), compiled.metadata.shared)


def main() -> int:
    """Print the table of every program on every target."""
    parser = argparse.ArgumentParser(prog="python -m torchvm.tools.bench.ahead")
    parser.add_argument("--json", action="store_true", help="rows as JSON")
    as_json = parser.parse_args().json
    line = "{:<24} {:>4} {:<46} {:<7} {:>9} {:>11} {:>8} {:>8}"
    rows = []
    if not as_json:
        names = ("registers", "local bytes", "binary", "shared")
        print(line.format("kernel", "n", "mode", "target", *names))
    for program in programs() + attention_programs():
        for target in TARGETS:
            usage = compile_ahead(program, target)
            cells = (program.name, program.num_draft_tokens, program.mode, target, *usage)
            if as_json:
                fields = ("kernel", "num_draft_tokens", "mode", "target", *Usage._fields)
                rows.append(dict(zip(fields, cells, strict=True)))
            else:
                print(line.format(*cells), flush=True)
    if as_json:
        print(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
