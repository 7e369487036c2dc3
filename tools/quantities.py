"""Counts and bytes as people write and read them: K, M, G, T of ten and Ki, Mi, Gi, Ti of two."""

from __future__ import annotations

import re
from fractions import Fraction

import typer

__all__ = ["format_bytes", "format_count", "format_seconds", "parse_count"]

_UNITS = {"": 1} | {
    prefix + binary: base**power
    for binary, base in (("", 1000), ("i", 1024))
    for power, prefix in enumerate("KMGT", start=1)
}
_WRITTEN = re.compile(r"(\d{1,99}(?:\.\d{1,99})?)\s*([KMGT]i?)?B?", re.ASCII)


def parse_count(text: str) -> int:
    """Read a whole number: `4096`, `1Mi` (1,048,576), `1.5G` (1,500,000,000), `80GiB`.

    A B behind the unit is allowed, and so is a k for K. As an option's `parser` it reports what
    it cannot read as wrong usage.

    Raises:
        typer.BadParameter: for another form, or a fraction of one.
    """
    match = _WRITTEN.fullmatch(text.strip().replace("_", "").replace("k", "K"))
    if match is None:
        raise typer.BadParameter(
            f"{text!r} must be a number with or without a unit: K, M, G, T are powers of ten, "
            "Ki, Mi, Gi, Ti of two"
        )
    exact = Fraction(match[1]) * _UNITS[match[2] or ""]
    if exact.denominator != 1:
        raise typer.BadParameter(f"{text!r} must be a whole number")
    return int(exact)


def format_count(number: int) -> str:
    """Write a count in the largest unit of two that divides it: `1 Mi`, `768`, `1,000`."""
    for unit in ("Ti", "Gi", "Mi", "Ki"):
        if number and number % _UNITS[unit] == 0:
            return f"{number // _UNITS[unit]:,} {unit}"
    return f"{number:,}"


def format_bytes(number: float) -> str:
    """Write bytes to three digits, in units of two from 1 Ki on: `512 B`, `1.00 GiB`."""
    for unit in ("Ti", "Gi", "Mi", "Ki"):
        # What would round to 1,024 of a unit is 1 of the next.
        if number >= _UNITS[unit] * 1023.5 / 1024:
            value = number / _UNITS[unit]
            return f"{value:,.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}B"
    return f"{number:,.0f} B"


def format_seconds(number: float) -> str:
    """Write seconds to three digits, and to 0.01 ns at most: `224 us`, `1.50 s`, `0.21 ns`."""
    units = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
    unit = next((unit for unit, size in units.items() if number >= 0.9995 * size), "ns")
    value = number / units[unit]
    return f"{value:,.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"
