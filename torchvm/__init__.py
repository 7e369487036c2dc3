"""torchvm: verify masks for speculative decoding, laid out by what the compiled graph reads.

`import torchvm` registers the ops and `backend="torchvm"`. Started as the `torchvm` command it
waits with that, and with importing torch, until something asks for it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchvm.ops.version import __version__ as __version__


def _is_command() -> bool:
    arguments = sys.orig_argv
    module = arguments[arguments.index("-m") + 1] if "-m" in arguments[:-1] else ""
    return Path(sys.argv[0]).name == "torchvm" or module.startswith("torchvm.tools.cli")


if TYPE_CHECKING or not _is_command():
    from torchvm.api import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module("torchvm.api"), name)
