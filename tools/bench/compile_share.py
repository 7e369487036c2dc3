"""Measure what torchvm adds to the compile of a model's verify step, cold and from the cache.

    python -m torchvm.tools.bench.compile_share [--model FOLDER] [--json]

Times are summed over the calls into torchvm while Inductor compiles: the passes, their cache
keys, the check of the final graph, and reports read and written. The rest is AOTAutograd and
Inductor; Dynamo comes before and is not counted. A fresh compile cache is used.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

import torchvm.compilation
from torchvm.passes.hoist_mask_readers import HoistMaskReaders
from torchvm.passes.keep_copies import KeepCopies
from torchvm.passes.visibility import VisiblePipeline
from torchvm.tools.models import PACKAGED, load_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["main", "measured", "timed_parts"]

_COMPILE = "compile"
_PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    "mask passes": ((VisiblePipeline, "__call__"),),
    "KeepCopies": ((KeepCopies, "__call__"),),
    "HoistMaskReaders": ((HoistMaskReaders, "__call__"),),
    "verify_no_clone": ((torchvm.compilation, "verify_no_clone"),),
    "cache keys": tuple((p, "uuid") for p in (VisiblePipeline, KeepCopies, HoistMaskReaders)),
    "reports": tuple(
        (torchvm.compilation, name) for name in ("report_key", "save_reports", "load_reports")
    ),
    _COMPILE: ((torchvm.compilation, "_compile_inductor"),),
}


@contextmanager
def timed_parts() -> Iterator[dict[str, float]]:
    """Sum the seconds spent in each part of torchvm, and in all of a compile."""
    seconds: defaultdict[str, float] = defaultdict(float)
    with ExitStack() as stack:
        for part, places in _PARTS.items():
            for owner, name in places:
                wrapped = _timed(getattr(owner, name), part, seconds)
                stack.enter_context(mock.patch.object(owner, name, wrapped))
        yield seconds


def _timed(
    function: Callable[..., Any], part: str, seconds: dict[str, float]
) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[part] += time.perf_counter() - begin

    return call


def measured(compile_once: Callable[[], object]) -> dict[str, float]:
    """Return seconds by part, and torchvm's share of the compile in percent.

    Args:
        compile_once: compiles something with `backend="torchvm"`.
    """
    with timed_parts() as seconds:
        compile_once()
    total = seconds.pop(_COMPILE, 0.0)
    ours = sum(seconds.values())
    return {**seconds, "torchvm": ours, "compile": total, "percent": 100 * ours / total}


def _verify_step(model: str) -> Callable[[], object]:
    """Return what compiles the verify step of a model anew."""
    from torchvm.engine import PromptLookupDrafter, SpeculativeDecoder
    from torchvm.engine.steps import compiled_step
    from torchvm.ops.layout import TreeMaskMode

    lm, _ = load_model(model)
    drafter = PromptLookupDrafter(topk=2, depth=4, num_draft_tokens=8)

    def compile_once() -> object:
        torch._dynamo.reset()
        compiled_step.cache_clear()
        decoder = SpeculativeDecoder(
            lm,
            drafter,
            batch_size=1,
            max_context_len=512,
            inner="inductor",
            mask_mode=TreeMaskMode.FULL_MASK,
        )
        return decoder.warm_up()

    return compile_once


def main() -> None:
    """Print a table, or JSON."""
    from torch._inductor.utils import fresh_cache

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=PACKAGED, help="as of torchvm generate")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(1)
    compile_once = _verify_step(options.model)
    with fresh_cache():
        found = {"cold": measured(compile_once), "from the cache": measured(compile_once)}
    if options.json:
        print(json.dumps(found))
        return
    for state, seconds in found.items():
        print(f"{state}: torchvm is {seconds.pop('percent'):.2f} % of the compile")
        for part, value in seconds.items():
            print(f"  {part:<18} {value * 1e3:>10.1f} ms")


if __name__ == "__main__":
    main()
