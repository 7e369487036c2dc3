"""Random programs that allocate, build, read and abuse verify masks, as Python source."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

import torchvm
from torchvm.tools.fuzz.readers import OPS, choose

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["INPUTS", "Line", "Program", "Setting", "make_inputs"]

INPUTS = (
    "parents",
    "lens",
    "others",
    "beams",
    "ids",
    "chain_beams",
    "chain_ids",
    "x",
    "query",
    "cache",
    "pages",
    "g0",
    "g1",
)
"""Arguments of every program; `make_inputs` says what they are."""

CHAIN_DEPTH = 8
MOST_COMMITTED = 11
PAGE_SIZE = 64


class Setting(NamedTuple):
    """How a program is run."""

    seed: int
    bs: int
    n: int
    other_bs: int
    other_n: int
    dynamic: bool = False
    v2: bool = True
    passes: tuple[str, ...] | None = None
    malformed: bool = False
    """Whether the drafts with topk = 1 are no chains."""
    aliased: bool = False
    """Whether g1 is a part of g0."""


class Line(NamedTuple):
    """A statement, the variables it makes and those it needs."""

    code: str
    makes: tuple[str, ...]

    @property
    def needs(self) -> frozenset[str]:
        """Variables that must exist before; what it makes itself is not among them."""
        return frozenset(re.findall(r"\b[a-z]\d+\b", self.code)) - {*self.makes, *INPUTS}


class Program(NamedTuple):
    """A function of `INPUTS` that returns some of its variables."""

    setting: Setting
    lines: tuple[Line, ...]
    returned: tuple[str, ...]
    text: str = ""
    """The whole function, for a program that is not made of lines."""

    @property
    def source(self) -> str:
        """The function as Python."""
        if self.text:
            return self.text
        body = ["bs, n = parents.shape", *(line.code for line in self.lines)]
        body.append(f"return [{', '.join(self.returned)}]")
        text = "\n".join(f"    {row}" for code in body for row in code.splitlines())
        return f"def program({', '.join(INPUTS)}):\n{text}\n"

    def function(self) -> Callable[..., Any]:
        """Compile the source, to a new code object each time."""
        names = namespace()
        exec(compile(self.source, "<program>", "exec"), names)  # noqa: S102
        function: Callable[..., Any] = names["program"]
        return function

    def without(self, index: int) -> Program:
        """Leave out one line and all that cannot be without it."""
        missing = set(self.lines[index].makes)
        kept = list(self.lines[:index])
        for line in self.lines[index + 1 :]:
            if line.needs & missing:
                missing.update(line.makes)
            else:
                kept.append(line)
        returned = tuple(name for name in self.returned if name not in missing)
        return self._replace(lines=tuple(kept), returned=returned)


def namespace() -> dict[str, Any]:
    """Return what a program's source refers to."""
    return {
        "torch": torch,
        "alloc": torchvm.alloc_verify_mask,
        "tree": torch.ops.torchvm.build_tree,
        "tree_of_parents": torch.ops.torchvm.build_tree_from_parents,
        "attention": torch.ops.torchvm.tree_attention,
        "convert": torch.ops.torchvm.mask_convert,
        "torchvm": torchvm,
        "region": torch.compiler.nested_compile_region,
        "F": OPS,
        "choose": choose,
        "checkpoint": checkpoint,
    }


def make_inputs(setting: Setting, variant: int) -> tuple[Tensor, ...]:
    """Draw one set of arguments in the order of `INPUTS`.

    Args:
        setting: sizes and seed.
        variant: 0 and 1 have the same sizes and other data; 2 has the other sizes.
    """
    bs, n = (setting.bs, setting.n) if variant < 2 else (setting.other_bs, setting.other_n)
    generator = torch.Generator().manual_seed(10 * setting.seed + variant)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    parents = integers(-1, n, bs, n)
    for j in range(1, n):
        parents[:, j] = torch.minimum(parents[:, j].clamp(min=0), torch.tensor(j - 1))
    chain_ids = torch.arange(n - 1).expand(bs, n - 1).contiguous()
    beams = torch.tensor([-1, 0, 1, 2, 3, 4, 5]).expand(bs, 7).contiguous()
    ids = torch.rand(bs, 14, generator=generator).argsort(1)[:, : n - 1]
    g0 = integers(0, 2, bs * n * (16 + n)).to(torch.bool)
    g1 = integers(0, 2, bs * n * (17 + n)).to(torch.uint8)
    return (
        parents,
        integers(0, MOST_COMMITTED, bs),
        integers(0, MOST_COMMITTED, bs),
        beams,
        ids.sort(1).values,
        torch.arange(-1, CHAIN_DEPTH - 1).expand(bs, CHAIN_DEPTH).contiguous(),
        chain_ids + (chain_ids > 0) if setting.malformed else chain_ids,
        torch.rand(bs, n, generator=generator),
        torch.rand(bs, n, 2, 4, generator=generator),
        torch.rand(bs, PAGE_SIZE, 1, 4, generator=generator),
        torch.arange(bs, dtype=torch.int32).view(bs, 1),
        g0,
        g0[3:] if setting.aliased else g1,
    )
