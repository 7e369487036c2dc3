"""What commands tell the user besides their result."""

from __future__ import annotations

from torchvm.tools.messages import printable


def test_what_a_terminal_would_obey_is_written_out() -> None:
    family = "\U0001f469\u200d\U0001f467"
    assert (
        printable(f"a\tb\nc [bold] \u00e9 \u3000{family}")
        == f"a\tb\nc [bold] \u00e9 \u3000{family}"
    )
    assert (
        printable("\x1b[31m\r\x00\x9b\x7f\u202e\u2028\udce9")
        == r"\x1b[31m\r\x00\x9b\x7f\u202e\u2028\udce9"
    )
