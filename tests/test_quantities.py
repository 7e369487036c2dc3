"""Counts and bytes as the command line reads and writes them."""

from __future__ import annotations

import pytest
import typer

from torchvm.tools.quantities import format_bytes, format_count, format_seconds, parse_count


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4096", 4096), ("0", 0), ("1Mi", 1 << 20), ("1M", 10**6), ("4k", 4000), ("4K", 4000),
        ("64Ki", 65536), ("1.5G", 1_500_000_000), ("80GiB", 80 << 30), ("80 GB", 80 * 10**9),
        ("2Ti", 2 << 40), ("1_000", 1000), ("0.5Ki", 512), (" 7 ", 7),
    ],
)  # fmt: skip
def test_parse_count(text: str, number: int) -> None:
    assert parse_count(text) == number


@pytest.mark.parametrize(
    "text",
    ["", "Mi", "-1", "1mi", "1.0001K", "1e6", "1MiB/s", "4 4", "0x10", "1KK", "٣", "9" * 5000],
)
def test_what_is_no_count_is_wrong_usage(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="must be a"):
        parse_count(text)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"), (512, "512 B"), (1023, "1,023 B"),
        (1_048_575, "1.00 MiB"), (1_048_064, "1.00 MiB"), (1_047_000, "1,022 KiB"),
        (1024, "1.00 KiB"),
        (1_073_745_920, "1.00 GiB"), (17_180_983_296, "16.0 GiB"), (200 << 20, "200 MiB"),
        (10_235, "10.0 KiB"), (1023 << 30, "1,023 GiB"), ((1 << 50), "1,024 TiB"), (0.5, "0 B"),
    ],
)  # fmt: skip
def test_format_bytes(number: float, text: str) -> None:
    assert format_bytes(number) == text


def test_format_count() -> None:
    shown = [format_count(n) for n in (0, 256, 1024, 1 << 20, 3 << 20, 10**6 + 1, 1 << 40)]
    assert shown == ["0", "256", "1 Ki", "1 Mi", "3 Mi", "1,000,001", "1 Ti"]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0.00 ns"), (2.1e-10, "0.21 ns"), (8.5e-9, "8.50 ns"), (2.237e-4, "224 us"),
        (9.996e-5, "100 us"), (9.9994e-4, "1.00 ms"), (0.02, "20.0 ms"), (1.5, "1.50 s"),
        (4321.0, "4,321 s"),
    ],
)  # fmt: skip
def test_format_seconds(number: float, text: str) -> None:
    assert format_seconds(number) == text
