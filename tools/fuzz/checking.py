"""Holds one compiled program against eager execution and against the oracle."""

from __future__ import annotations

import contextlib
import gc
import traceback
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
from torch._inductor import config as inductor_config
from torch.utils import _pytree as pytree

import torchvm
from torchvm.tools.fuzz.oracle import Layouts, Recorder, Relayout
from torchvm.tools.fuzz.programs import Program, make_inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torchvm.tools.fuzz.programs import Setting

__all__ = ["Failure", "Outcome", "check", "check_source"]

GARBAGE_SEEDS = (1, 2)
FULL = 0


class Failure(NamedTuple):
    """How a compiled program is wrong."""

    kind: str
    """`differs` from eager, `raises` where eager does not, `illegal` layout, `crash` in a pass."""
    message: str


class Outcome(NamedTuple):
    """What became of one program."""

    failure: Failure | None
    refused: bool = False
    """Whether the program raises eagerly, so that there is nothing to compare."""
    shrunk: int = 0
    """Masks whose layout the compiled program changed."""
    missed: tuple[str, ...] = ()
    """Verdicts of masks that stay FULL_MASK though the oracle finds nothing against QLEN_ONLY."""
    torch_fails: bool = False
    """Whether the program fails without any pass too."""


class _Result(NamedTuple):
    values: list[Any] | None
    """Results, then the arguments after the call; None when it raised."""
    error: str


def check(program: Program, *, inner: str = "aot_eager") -> Outcome:
    """Run one program compiled and eagerly, and ask the oracle about its layouts."""
    with torch.no_grad(), _quick_compilation():
        outcome = _check(program, inner)
        if outcome.failure is None or outcome.failure.kind in ("illegal", "crash"):
            return outcome
        bare = program._replace(setting=program.setting._replace(passes=()))
        if _check(bare, inner).failure is not None:
            return Outcome(None, torch_fails=True)
    return outcome


def check_source(source: str, setting: Setting, *, inner: str = "aot_eager") -> Outcome:
    """Check a program that is given as `Program.source` has it."""
    return check(Program(setting, (), (), source.strip() + "\n"), inner=inner)


def _check(program: Program, inner: str) -> Outcome:
    setting = program.setting
    function = program.function()
    variants = (0, 1, 2) if setting.dynamic else (0, 1)
    expected = [_run(function, program, variant) for variant in variants]
    recorder = Recorder()
    with _compiled(program, inner, recorder) as compiled:
        actual = [_run(compiled, program, variant) for variant in variants]
    for variant, (wanted, got) in enumerate(zip(expected, actual, strict=True)):
        failure = _compare(wanted, got, variant)
        if failure is not None:
            return Outcome(failure)
    if expected[0].values is None:
        return Outcome(None, refused=True)
    declared = Recorder()
    with declared:
        _run(function, program, 0)
    layouts = _layouts(declared, recorder)
    judge = _Judge(function, program, expected[:2])
    changed = {key for key, mode in layouts.modes.items() if mode != declared.modes[key]}
    changed |= layouts.unfilled
    if (changed or layouts.chained) and not judge.allows(layouts):
        message = f"a run with {layouts} can be told from one as declared"
        return Outcome(Failure("illegal", message))
    kept = [k for k, m in recorder.modes.items() if m == FULL and declared.modes.get(k) == FULL]
    missed = [k for k in kept if judge.allows(layouts.compact(k))]
    return Outcome(None, shrunk=len(changed), missed=_verdicts(program, missed))


def _verdicts(program: Program, masks: list[int]) -> tuple[str, ...]:
    """Look up what was reported of masks, by the line that allocates each."""
    by_line = {report.source: str(report.verdict) for report in torchvm.reports()}
    lines = program.source.splitlines()
    found = []
    for key in masks:
        number = next((i for i, line in enumerate(lines, 1) if f", {key}, " in line), 0)
        found.append(by_line.get(f"<program>:{number}", "not reported"))
    return tuple(found)


class _Judge(NamedTuple):
    """Finds out by execution whether other layouts can be told from the declared ones."""

    function: Callable[..., Any]
    program: Program
    expected: list[_Result]

    def allows(self, layouts: Layouts) -> bool:
        """Whether every result stays as it is, whatever lies where there are no cells."""
        return all(
            self._same(layouts, variant, seed)
            for variant in range(len(self.expected))
            for seed in GARBAGE_SEEDS
        )

    def _same(self, layouts: Layouts, variant: int, seed: int) -> bool:
        wanted = self.expected[variant]
        if wanted.values is None:
            return True
        with Relayout(layouts, seed):
            got = _run(self.function, self.program, variant)
        return got.values is not None and _equal(wanted.values, got.values)


def _layouts(declared: Recorder, compiled: Recorder) -> Layouts:
    """What the compiled program does otherwise than the program says."""
    unfilled = frozenset(
        key
        for key, fills in compiled.fills.items()
        if compiled.modes[key] == FULL
        and len(fills) == len(declared.fills.get(key, ()))
        and any(declared.fills[key])
        and not any(fills)
    )
    modes = {k: m for k, m in compiled.modes.items() if k in declared.modes}
    return Layouts(modes, unfilled, frozenset(compiled.chained - declared.chained))


@contextlib.contextmanager
def _compiled(program: Program, inner: str, recorder: Recorder) -> Iterator[Callable[..., Any]]:
    """Compile with the backend torchvm; the first call of what it made is recorded."""
    setting = program.setting
    options: dict[str, Any] = {"inner": inner}
    if setting.passes is not None:
        options["passes"] = list(setting.passes)
    recorders = [recorder]

    def backend(gm: Any, example_inputs: list[Any], **settings: Any) -> Callable[..., Any]:
        made = torch._dynamo.lookup_backend("torchvm")(gm, example_inputs, **settings)

        def call(*args: Any) -> Any:
            with recorders.pop() if recorders else contextlib.nullcontext():
                return made(*args)

        return call

    torch._dynamo.reset()
    with inductor_config.patch(enable_auto_functionalized_v2=setting.v2):
        yield torch.compile(
            program.function(),
            backend=backend,
            fullgraph=True,
            dynamic=setting.dynamic,
            options=options,
        )


def _run(function: Callable[..., Any], program: Program, variant: int) -> _Result:
    inputs = make_inputs(program.setting, variant)
    try:
        values = function(*inputs)
    except Exception:
        return _Result(None, traceback.format_exc())
    return _Result([*values, *inputs], "")


def _compare(wanted: _Result, got: _Result, variant: int) -> Failure | None:
    if got.values is None:
        if "/passes/" in got.error:
            return Failure("crash", got.error)
        return None if wanted.values is None else Failure("raises", got.error)
    if wanted.values is None or _equal(wanted.values, got.values):
        return None
    pairs = zip(wanted.values, got.values, strict=True)
    different = [i for i, (w, g) in enumerate(pairs) if not _equal(w, g)]
    return Failure("differs", f"results {different} differ for the arguments of variant {variant}")


def _equal(wanted: Any, got: Any) -> bool:
    left, right = pytree.tree_leaves(wanted), pytree.tree_leaves(got)
    if len(left) != len(right):
        return False
    return all(map(_same_value, left, right))


def _same_value(wanted: Any, got: Any) -> bool:
    if not isinstance(wanted, torch.Tensor):
        return bool(wanted == got)
    # A fake tensor that leaks out of a compiler is no result.
    return type(got) is torch.Tensor and wanted.dtype is got.dtype and torch.equal(wanted, got)


@contextlib.contextmanager
def _quick_compilation() -> Iterator[None]:
    """Leave out what half of the time of a small compilation goes to.

    That is Dynamo's measurement of its guards, and collecting the cycles that it makes too often.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, 50, 50)
    try:
        with mock.patch("torch._dynamo.guards.profile_guard_manager", return_value=0.0):
            yield
    finally:
        gc.set_threshold(*thresholds)
