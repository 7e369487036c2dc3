"""compact: exported programs with mask layouts derived from their graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchvm.compilation import recording_pipeline
from torchvm.passes.graph import graph_modules

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.export import ExportedProgram

__all__ = ["compact"]


def compact(program: ExportedProgram, *, passes: Sequence[str] | None = None) -> ExportedProgram:
    """Give every mask of an exported program the smallest layout that its readers allow.

    The result can be run, saved, or compiled by
    `torch._inductor.aoti_compile_and_package`; whoever loads it needs the ops, so `import
    torchvm` first. `torchvm.reports()` says what became of each mask.

    Args:
        program: from `torch.export.export`, decomposed or not; it is left as it is.
        passes: names of the passes to run, out of `PASS_NAMES`; all by default. Those that only
            order Inductor's graph do nothing here.

    Returns:
        A functional program of the same signature. Composite ops stay as they are; call
        `run_decompositions()` before or after for core ops.

    Raises:
        ValueError: when a name in `passes` is not that of a pass.
    """
    pipeline = recording_pipeline(passes)
    compacted: ExportedProgram = program.run_decompositions({})
    for module in graph_modules(compacted.graph_module):
        pipeline(module.graph)
        module.recompile()
    return compacted
