"""Text that ends at a stop string, whole or as it comes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["TextStream", "cut"]

# What a decoder shows for bytes of a character whose rest is yet to come.
_INCOMPLETE = "\ufffd"


def cut(text: str, stop: Sequence[str]) -> str:
    """Return the text up to where the first of the stop strings begins."""
    found = [at for at in map(text.find, stop) if at >= 0]
    return text[: min(found)] if found else text


class TextStream:
    """Writes text as tokens come, and never a part of what may become a stop string.

    Args:
        decode: text of tokens.
        stop: strings that end the text and are not written.
        write: is given each piece.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        stop: Sequence[str],
        write: Callable[[str], None],
    ) -> None:
        self._decode = decode
        self._stop = stop
        self._write = write
        self._tokens: list[int] = []
        self._written = 0
        self._held = max(map(len, stop), default=1) - 1

    def add(self, tokens: Sequence[int]) -> None:
        """Take tokens, and write what is certain."""
        self._tokens.extend(tokens)
        text = self._decode(self._tokens)
        whole = cut(text, self._stop)
        if whole == text:
            whole = text.rstrip(_INCOMPLETE)
            whole = whole[: max(len(whole) - self._held, 0)]
        self._put(whole)

    def finish(self) -> None:
        """Write the rest."""
        self._put(cut(self._decode(self._tokens), self._stop))

    def _put(self, text: str) -> None:
        if len(text) > self._written:
            self._write(text[self._written :])
            self._written = len(text)
