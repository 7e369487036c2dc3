"""Reports of graphs that a compile cache keeps: a file each, beside Inductor's own cache.

When both compile caches hit, no pass runs. The file then says what the passes did when the
artifact was made.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch.fx import GraphModule

from torchvm.passes.graph import source_line
from torchvm.passes.report import MaskReport

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["load_reports", "report_key", "save_reports"]


def report_key(
    gm: GraphModule, example_inputs: Sequence[Any], uuid: str | None, passes: Sequence[str]
) -> str | None:
    """Identify the reports of a Dynamo graph across processes.

    Args:
        gm: the graph, nested graphs included; the user's lines of its op calls count, so that a
            report never names a line that has moved.
        example_inputs: of each, dtype, shape, strides and device count.
        uuid: the key of the mask passes; None means that nothing is cached, and so does the
            result.
        passes: names of all selected passes.
    """
    if uuid is None:
        return None
    from torch._inductor import config

    parts = [uuid, repr(tuple(passes)), str(config.enable_auto_functionalized_v2)]
    for name, module in gm.named_modules():
        if isinstance(module, GraphModule):
            lines = [source_line(n) for n in module.graph.nodes if n.op == "call_function"]
            code = module.graph.python_code("self").src  # `module.code` would compile it.
            parts.append(f"{name}:{code}{lines}")
    parts.extend(_metadata(value) for value in example_inputs)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def save_reports(key: str | None, reports: Sequence[MaskReport]) -> None:
    """Store reports, whole or not at all; a cache folder that cannot be written stores none."""
    if key is None:
        return
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(msgspec.json.encode(list(reports)))
        Path(file.name).replace(path)
    except OSError:
        return


def load_reports(key: str | None) -> list[MaskReport] | None:
    """Return stored reports; None when there are none that can be read."""
    if key is None:
        return None
    try:
        return msgspec.json.decode(_path(key).read_bytes(), type=list[MaskReport])
    except (OSError, msgspec.DecodeError):
        return None


def _path(key: str) -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(os.fspath(cache_dir())) / "torchvm" / f"{key}.json"


def _metadata(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}{tuple(value.stride())}{value.device}"
    return f"{type(value).__name__}:{value}"
