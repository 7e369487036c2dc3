"""Files that commands write: whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from torchvm.tools.messages import CommandError

__all__ = ["refuse_unwritable", "write_file"]


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file, replacing one that is there; interrupted, it leaves the old one.

    Args:
        path: in a folder that exists. `-` is no special name.
        content: text is written as UTF-8.

    Raises:
        CommandError: when the file cannot be written there.
    """
    refuse_unwritable(path)
    data = content.encode() if isinstance(content, str) else content
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror or error}") from error
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        # mkstemp keeps everyone else out; an ordinary file follows the umask.
        umask = os.umask(0)
        os.umask(umask)
        part.chmod(0o666 & ~umask)
        part.replace(path)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


def refuse_unwritable(path: Path) -> None:
    """Say before long work what `write_file` would say after it.

    Raises:
        CommandError: when the path is a folder, or no file can be written beside it.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror or error}") from error
