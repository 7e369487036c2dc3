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
        path: in a folder that exists; a link stays one, and what it leads to is replaced. `-` is
            no special name.
        content: text is written as UTF-8.

    Raises:
        CommandError: when the file cannot be written there.
    """
    refuse_unwritable(path)
    place = _place(path)
    data = content.encode() if isinstance(content, str) else content
    try:
        handle, name = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.")
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
        part.replace(place)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


def refuse_unwritable(path: Path) -> None:
    """Say before long work what `write_file` would say after it.

    Raises:
        CommandError: when the path is a folder, a device or the like, or no file can be written
            beside it.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        special = path.exists() and not path.is_file()
        with tempfile.TemporaryFile(dir=_place(path).parent):
            pass
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror or error}") from error
    if special:
        raise CommandError(f"cannot write {path}: it is no regular file")


def _place(path: Path) -> Path:
    """Where a path leads."""
    return Path(os.path.realpath(path))
