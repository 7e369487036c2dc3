"""Text as it comes: whole characters, and nothing of a stop string."""

from __future__ import annotations

import pytest

from torchvm.tools.text_stream import TextStream, cut


def decode(ids: list[int]) -> str:
    return bytes(ids).decode(errors="replace")


def pieces(text: str, stop: tuple[str, ...], size: int) -> list[str]:
    written: list[str] = []
    stream = TextStream(decode, stop, written.append)
    data = list(text.encode())
    for at in range(0, len(data), size):
        stream.add(data[at : at + size])
    stream.finish()
    return written


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("abcd", (), "abcd"),
        ("abSTOPcd", ("STOP",), "ab"),
        ("abSTOcd", ("STOP",), "abSTOcd"),
        ("STOP", ("STOP",), ""),
        ("one. two\n\nthree", ("\n\n", "."), "one"),
        ("größe é", (), "größe é"),
        ("größe é", ("e é",), "größ"),
        ("ab\nc", ("\n",), "ab"),
    ],
)
def test_what_is_written_is_the_text_cut(
    text: str, stop: tuple[str, ...], expected: str, size: int
) -> None:
    assert cut(text, stop) == expected
    assert "".join(pieces(text, stop, size)) == expected


def test_text_comes_before_it_ends() -> None:
    assert pieces("abcdef", (), 2) == ["ab", "cd", "ef"]
    assert pieces("abcdef", ("xyz",), 2) == ["ab", "cd", "ef"]
    # A character is written once all of its bytes are there.
    assert pieces("aé", (), 1) == ["a", "é"]
