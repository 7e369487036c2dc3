"""Writes random programs: which lines there are, and how they are chosen."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, TypeVar

from torchvm.tools.fuzz.programs import Line, Program, Setting
from torchvm.tools.fuzz.readers import FULL, PACKED, QLEN
from torchvm.tools.fuzz.templates import (
    ALIASES,
    ATEN_READS,
    LENGTHS,
    OUT_READS,
    PAIR_READS,
    PARTS,
    READS,
    ROOTS,
    SHAPE_READS,
    WHOLE,
    WHOLE_BODY,
    WRITES,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["write_program"]

T = TypeVar("T")

PASSES = ("CausalChains", "ElideUnreadMasks", "CompactTreeBlockReaders", "SkipPrefixFill")


class _Mask:
    """A variable that holds a mask, and how it was last built."""

    def __init__(self, name: str, mode: int, dtype: str) -> None:
        self.name, self.mode, self.dtype = name, mode, dtype
        self.lengths, self.n = "lens", "n"
        self.is_chain = False


class _Author:
    """The state of a program that is being written."""

    def __init__(self, rng: random.Random, setting: Setting) -> None:
        self._rng = rng
        self._setting = setting
        self._masks: list[_Mask] = []
        self._parts: list[_Mask] = []
        self._lengths = ["lens", "others"]
        self._one_row: set[str] = set()
        self._results: list[str] = []
        self._numbers: set[str] = set()
        self._lines: list[Line] = []
        self._counts: dict[str, int] = {}
        self._oddity = rng.choice((0.0, 0.7, 1.0, 2.0))

    def write(self) -> Program:
        """Write all lines and choose what is returned."""
        self._add_mask()
        self._add_build()
        kinds: dict[Callable[[], None], float] = {
            self._add_mask: 3,
            self._add_build: 6,
            self._add_read: 12,
            self._add_out_read: 2,
            self._add_shape_read: 5 if self._setting.dynamic else 1,
            self._add_lengths: 2,
            self._add_aten_read: 0.6 * self._oddity,
            self._add_write: 0.6 * self._oddity,
            self._add_part: 0.6 * self._oddity,
            self._add_whole: 1 if self._chance(0.05) else 0,
        }
        for _ in range(self._rng.choice((1, 2, 2, 3, 3, 4, 4, 5, 6, 8))):
            self._choose(kinds)()
        returned = [name for name in self._results if self._chance(0.85)]
        kept = [m.name for m in (*self._masks, *self._parts) if self._chance(0.04)]
        return Program(self._setting, tuple(self._lines), (*returned, *kept))

    def _choose(self, weighted: Mapping[T, float]) -> T:
        return self._rng.choices(list(weighted), list(weighted.values()))[0]

    def _chance(self, share: float) -> bool:
        return self._rng.random() < share

    def _oddly(self, share: float) -> bool:
        """Whether something unusual is done; some programs do none of it."""
        return self._chance(share * self._oddity)

    def _new(self, letter: str) -> str:
        self._counts[letter] = self._counts.get(letter, -1) + 1
        return f"{letter}{self._counts[letter]}"

    def _tag(self) -> int:
        return int(self._new("t")[1:]) + 1

    def _add(self, code: str, *makes: str) -> None:
        self._lines.append(Line(code, makes))

    def _result(self, code: str) -> None:
        name = self._new("r")
        self._add(f"{name} = {code}", name)
        self._results.append(name)

    def _mask(self) -> _Mask:
        return self._rng.choice(self._masks)

    def _source(self) -> _Mask:
        """A mask to read: a variable of one, rarely a part of one."""
        return self._rng.choice(self._parts) if self._parts and self._chance(0.1) else self._mask()

    def _expression(self, mask: _Mask) -> str:
        alias = self._rng.choice(ALIASES) if self._oddly(0.07) else "{m}"
        return alias.format(m=mask.name)

    def _add_mask(self) -> None:
        if self._oddly(0.1) or (self._setting.aliased and self._chance(0.7)):
            given = self._rng.choice(["g0", "g1"])
            same = "torch.bool" if given == "g0" or self._setting.aliased else "torch.uint8"
            self._masks.append(_Mask(given, FULL, same))
            return
        mode = self._choose({FULL: 20, QLEN: 1, PACKED: 1})
        dtype = self._choose({"torch.bool": 3, "torch.uint8": 1})
        if mode == PACKED:
            dtype = "torch.uint8"
        code = self._alloc(mode, dtype)
        if self._oddly(0.1):
            root = self._rng.choice(ROOTS)
            code = root.format(alloc=code, dtype=dtype)
            dtype = "torch.bool" if "True" in root or "not" in root else dtype
        mask = _Mask(self._new("m"), mode, dtype)
        self._add(f"{mask.name} = {code}", mask.name)
        self._masks.append(mask)

    def _alloc(self, mode: int, dtype: str) -> str:
        """Allocate; `max_context_len` is never the same twice, so that it names the mask."""
        context = 20 + int(self._new("c")[1:])
        sizes = self._choose(
            {"bs, n": 20, "8, 16": 2, "bs + 1, n": self._oddity, "bs, n + 1": self._oddity}
        )
        if self._oddly(0.08):
            sizes = self._rng.choice(("1, 1", "bs, 1", "1, n"))
            context += 900
        if self._oddly(0.03):
            context -= 19
        given = "" if dtype == "torch.bool" and self._chance(0.7) else f", dtype={dtype}"
        return f"alloc({sizes}, {context}, {mode}{given})"

    def _add_build(self) -> None:
        mask = self._mask()
        mask.lengths = self._rng.choice(self._lengths) if self._oddly(0.4) else mask.lengths
        mask.n = "2" if self._setting.n >= 2 and self._oddly(0.05) else "n"
        rows = ":1" if mask.lengths in self._one_row else ":"
        mode = self._rng.choice([FULL, QLEN]) if self._oddly(0.04) else mask.mode
        to = self._expression(mask)
        if self._oddly(0.04):
            to = self._rng.choice(PARTS[:4]).format(m=mask.name)
        fill = self._choose({"": 8, ", True": 2, ", False": 1})
        rest = f"{mask.lengths}, {to}, {{}}{mask.n}, {mode}{fill}"
        short = 0 if self._setting.dynamic else self._oddity
        forms = {"parents": 4, "scores": 2, "chain": 4, "wrapper": 1, "short chain": short}
        form = self._choose(forms)
        mask.is_chain = "chain" in form
        nodes = "" if mask.n == "n" else ", :1"
        if form == "wrapper":
            nodes = "" if mask.n == "n" else ", :2"
            given = f"num_draft_tokens={mask.n}, tree_mask_mode={mode}"
            args = f"parents[{rows}{nodes}], {mask.lengths}, {to}, {given}"
            code = f"torchvm.build_tree_from_parents({args})"
        elif form == "parents":
            flip = ".flip(0)" if self._chance(0.2) else ""
            nodes = "" if mask.n == "n" else ", :2"
            code = f"tree_of_parents(parents{flip}[{rows}{nodes}], {rest.format('')})"
        elif form == "scores":
            code = f"tree(beams[{rows}], ids[{rows}{nodes}], {rest.format('2, 4, ')})"
        elif form == "chain":
            rest = rest.format("1, 8, ")
            code = f"tree(chain_beams[{rows}], chain_ids[{rows}{nodes}], {rest})"
        else:  # Deeper nodes than two have no parent.
            rest = rest.format("1, 2, ")
            code = f"tree(chain_beams[{rows}, :2], chain_ids[{rows}{nodes}], {rest})"
        self._result(f"{code.replace('[:]', '')}[{self._choose({0: 5, 1: 1, 2: 2, 3: 1})}]")

    def _fields(self, mask: _Mask) -> dict[str, object]:
        """Values for the placeholders of a line that reads `mask`, as a rule as it was built."""
        lengths = self._rng.choice(self._lengths[-3:]) if self._oddly(0.25) else mask.lengths
        n = self._rng.choice(["2", "n"]) if self._oddly(0.04) else mask.n
        n = "n" if self._setting.n < 2 else n
        row = ":1" if lengths in self._one_row else ":"
        other, tag, other_tag = self._source(), self._tag(), self._tag()
        condition = f"{self._rng.choice(self._lengths)}.sum() > 9"
        return {
            "m": self._expression(mask),
            "o": self._expression(other),
            "l": lengths,
            "n": n,
            "mode": self._rng.choice([FULL, QLEN]) if self._oddly(0.04) else mask.mode,
            "other_mode": other.mode,
            "t": tag,
            "u": other_tag,
            "scale": 0.5 + tag / 4096,
            "r": "" if row == ":" else f"[{row}]",
            "rn": f"[{row}{', :2' if n == '2' else ''}]".replace("[:]", ""),
            "if": condition,
        }

    def _add_read(self) -> None:
        mask = self._source()
        causal = mask.is_chain and self._chance(0.4)
        reads = {k: v for k, v in READS.items() if "False, {" in k} if causal else READS
        if self._chance(0.25 if len(self._masks) > 1 else 0.05):
            reads = PAIR_READS
        self._result(self._choose(reads).format(**self._fields(mask)))

    def _add_out_read(self) -> None:
        made = [self._new("r"), self._new("r")]
        code = self._choose(OUT_READS).format(**self._fields(self._source()), y=made[0], z=made[1])
        makes = [name for name in made if name in code]
        self._add(code, *makes)
        self._results.extend(makes)

    def _add_aten_read(self) -> None:
        self._result(self._rng.choice(ATEN_READS).format(**self._fields(self._source())))

    def _add_shape_read(self) -> None:
        self._result(self._rng.choice(SHAPE_READS).format(m=self._mask().name))
        self._numbers.add(self._results[-1])

    def _add_write(self) -> None:
        result = self._new("r")
        template = self._rng.choice(WRITES)
        fields = self._fields(self._source())
        self._add(template.format(**fields, y=result), *([result] if "{y}" in template else []))
        if "{y}" in template:
            self._results.append(result)

    def _add_part(self) -> None:
        mask = self._mask()
        template = self._rng.choice((*ALIASES, *PARTS))
        part = _Mask(self._new("v"), mask.mode, mask.dtype)
        part.lengths, part.n, part.is_chain = mask.lengths, mask.n, mask.is_chain
        self._add(f"{part.name} = {template.format(m=mask.name)}", part.name)
        self._parts.append(part)

    def _add_lengths(self) -> None:
        old = self._rng.choice([*self._lengths, self._mask().lengths, "lens"])
        if old.startswith("l") and old != "lens" and self._chance(0.3):
            self._add(f"{old}.add_(1)")
            return
        if self._chance(0.03):
            self._add("lens.add_(1)")
            return
        template, name = self._choose(LENGTHS), self._new("l")
        code = template.format(l=old)
        if self._results[-1] not in self._numbers and self._chance(0.1):
            code = f"{old} + ({self._results[-1]}.sum() > 3).to(torch.int64)"
        self._add(f"{name} = {code}", name)
        self._lengths.append(name)
        if old in self._one_row or "[:1]" in code:
            self._one_row.add(name)

    def _add_whole(self) -> None:
        result = self._new("r")
        read = self._choose(
            {"F.block(mask, b, n, 0, {t})": 2, "0.5": 1, "F.block_untold(mask, b, n, {t})": 1}
        ).format(t=self._tag())
        code = (WHOLE_BODY + self._choose(WHOLE)).format(
            f=self._new("f"),
            y=result,
            read=read,
            context=20 + int(self._new("c")[1:]),
            **{"if": "others.sum() > 9"},
        )
        self._add(code, result)
        self._results.append(result)


def write_program(seed: int) -> Program:
    """Write the program of a seed; the same seed always gives the same program."""
    rng = random.Random(seed)  # noqa: S311 - repeatable, not secret
    passes = None
    if rng.random() < 0.25:
        passes = tuple(name for name in PASSES if rng.random() < 0.6)
    chains = passes is None or "CausalChains" in passes
    dynamic = rng.random() < 0.12
    ones = [] if dynamic else [1]  # torch compiles sizes of 0 and 1 anew.
    none = [0] if not dynamic and rng.random() < 0.1 else []
    setting = Setting(
        seed=seed,
        bs=rng.choice([*none, *ones, 2, 2, 3]),
        n=rng.choice([*ones, 2, 3, 3, 4, 5, 9]),
        other_bs=rng.choice([2, 3, 4]),
        other_n=rng.choice([2, 3, 4, 5]),
        dynamic=dynamic,
        v2=rng.random() < 0.7,
        passes=passes,
        malformed=not chains and rng.random() < 0.7,
        aliased=rng.random() < 0.05,
    )
    return _Author(rng, setting).write()
