"""torchvm plan: what a verify mask would take in every layout, before any is allocated."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import Annotated, Any, NamedTuple

import typer

from torchvm.ops.layout import TreeMaskMode, mask_storage_numel, packed_bits_numel
from torchvm.tools.bars import Bar, Panel, check_plots, write_chart
from torchvm.tools.messages import CommandError
from torchvm.tools.quantities import format_bytes, format_count, format_seconds, parse_count

__all__ = ["Layout", "layouts", "plan"]

_MOST = (1 << 63) - 1


class Layout(NamedTuple):
    """One layout and the bytes of its buffer."""

    name: str
    formula: str
    """Of `bytes`; b requests, n draft tokens, c committed tokens."""
    bytes: int
    """Of one rank; a cell that is no bit takes one byte."""


def layouts(max_bs: int, num_draft_tokens: int, max_context_len: int) -> list[Layout]:
    """Size a mask of that capacity in every layout, largest formula first.

    The numbers come from `torchvm.ops.layout`: `mask_storage_numel` for the modes of a verify
    mask, `packed_bits_numel` for the bits that `pack_mask_bits` makes of a FULL_MASK.
    """
    sizes = (max_bs, num_draft_tokens, max_context_len)

    def of_mode(mode: TreeMaskMode, formula: str) -> Layout:
        return Layout(mode.name, formula, int(mask_storage_numel(mode, *sizes)))

    as_bits = int(packed_bits_numel(*sizes))
    row = "1, 2 or 4 up to n = 8, 16, 32, else 8 ceil(n / 64)"
    return [
        of_mode(TreeMaskMode.FULL_MASK, "b n (c + n)"),
        Layout("FULL_MASK as bits", "b ceil(n (c + n) / 8)", as_bits),
        of_mode(TreeMaskMode.QLEN_ONLY, "b n n"),
        of_mode(TreeMaskMode.QLEN_ONLY_BITPACKING, f"b n ({row})"),
    ]


def _positive(text: str | int) -> int:
    """Read a count of at least 1 that fits into 64 bits; a default comes as a number."""
    number = parse_count(str(text))
    if not 1 <= number <= _MOST:
        raise typer.BadParameter(f"{text!r} must be at least 1 and at most {_MOST:,}")
    return number


def plan(
    max_bs: Annotated[
        int, typer.Option(parser=_positive, metavar="COUNT", help="Most requests of a batch.")
    ],
    num_draft_tokens: Annotated[
        int,
        typer.Option(parser=_positive, metavar="COUNT", help="Nodes of a tree, root included."),
    ],
    max_context_len: Annotated[
        int,
        typer.Option(
            parser=_positive, metavar="COUNT", help="Most committed tokens of a request: 1Mi."
        ),
    ],
    ranks: Annotated[
        int, typer.Option(parser=_positive, metavar="COUNT", help="Ranks that each own a mask.")
    ] = 1,
    kv_cache: Annotated[
        int | None,
        typer.Option(parser=_positive, metavar="BYTES", help="One rank's key-value cache: 80Gi."),
    ] = None,
    bandwidth: Annotated[
        int | None,
        typer.Option(
            parser=_positive, metavar="BYTES", help="Memory bandwidth, bytes a second: 4.8T."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw bars into a .svg or .png (needs matplotlib)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the bytes of a verify mask in every layout, before any is allocated.

    COUNT and BYTES take units: K, M, G, T are powers of ten, Ki, Mi, Gi, Ti of two.

    \b
    Columns; the last three only where they are asked for:
      layout     FULL_MASK spans the context, QLEN_ONLY the draft tokens alone,
                 ..._BITPACKING is that with a bit a cell. FULL_MASK as bits is
                 what pack_mask_bits makes for readers of bits.
      bytes      of one rank's buffer, a byte a cell unless bits
      all ranks  with --ranks: bytes times ranks, as each rank owns a mask
      of KV      with --kv-cache: bytes of a rank by those of its KV cache
      refill     with --bandwidth: bytes by bytes a second, the least time that
                 writing every cell once takes

    \b
    Formulas: torchvm/ops/layout.py, mask_storage_numel and packed_bits_numel;
    the ops and the owner of the buffer size it by the same functions.
    """  # noqa: D301 - \b keeps the lines of a paragraph of the help.
    if plot is not None:
        check_plots("--plot", plot)
    found = layouts(max_bs, num_draft_tokens, max_context_len)
    if found[0].bytes * ranks > _MOST:
        raise CommandError(
            f"the masks must fit into {format_bytes(_MOST + 1)}, got {found[0].bytes * ranks:,} B"
        )
    asked = {
        "max_bs": max_bs,
        "num_draft_tokens": num_draft_tokens,
        "max_context_len": max_context_len,
        "ranks": ranks,
        "kv_cache_bytes": kv_cache,
        "bandwidth_bytes_per_second": bandwidth,
    }
    if plot is not None:
        write_chart(plot, [_panel(found, asked)], title=f"Verify mask: {_heading(asked)}")
    if as_json:
        typer.echo(json.dumps({**asked, "layouts": [_entry(one, asked) for one in found]}))
    else:
        typer.echo(_text(found, asked))


def _entry(layout: Layout, asked: dict[str, Any]) -> dict[str, Any]:
    """Every figure of a layout; None for what was not asked for."""
    kv_cache, bandwidth = asked["kv_cache_bytes"], asked["bandwidth_bytes_per_second"]
    return {
        "layout": layout.name,
        "formula": layout.formula,
        "bytes": layout.bytes,
        "bytes_all_ranks": layout.bytes * asked["ranks"],
        "kv_cache_share": layout.bytes / kv_cache if kv_cache else None,
        "refill_seconds": layout.bytes / bandwidth if bandwidth else None,
    }


def _heading(asked: dict[str, Any]) -> str:
    requests, nodes, ranks = (
        f"{format_count(asked[key])} {noun}{'s' * (asked[key] > 1)}"
        for key, noun in (
            ("max_bs", "request"), ("num_draft_tokens", "draft token"), ("ranks", "rank")
        )
    )  # fmt: skip
    text = f"{requests} x {nodes} x {format_count(asked['max_context_len'])} context"
    return f"{text}, {ranks}" if asked["ranks"] > 1 else text


def _text(found: list[Layout], asked: dict[str, Any]) -> str:
    """A table with the columns that were asked for."""
    entries = [_entry(layout, asked) for layout in found]
    columns = [
        ["layout", *(entry["layout"] for entry in entries)],
        ["bytes", *(f"{entry['bytes']:,}" for entry in entries)],
        ["", *(format_bytes(entry["bytes"]) for entry in entries)],
    ]
    if asked["ranks"] > 1:
        columns.append(["all ranks", *(format_bytes(e["bytes_all_ranks"]) for e in entries)])
    if asked["kv_cache_bytes"]:
        columns.append(["of KV", *(_share(entry["kv_cache_share"]) for entry in entries)])
    if asked["bandwidth_bytes_per_second"]:
        columns.append(["refill", *(format_seconds(e["refill_seconds"]) for e in entries)])
    widths = [max(map(len, column)) for column in columns]
    lines = [
        "  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]).rstrip()
        for name, *cells in zip(*columns, strict=True)
    ]
    return "\n".join([_heading(asked), "", *lines])


def _share(share: float) -> str:
    """A share in percent, to three digits."""
    return f"{100 * share:.3g} %" if share < 1 else f"{100 * share:,.0f} %"


def _panel(found: list[Layout], asked: dict[str, Any]) -> Panel:
    ranks, kv_cache = asked["ranks"], asked["kv_cache_bytes"]

    def bars(layout: Layout) -> tuple[Bar, ...]:
        parts = [("one rank", 1)] + [(f"{format_count(ranks)} ranks", ranks)] * (ranks > 1)
        return tuple(
            Bar(name, float(layout.bytes * times), format_bytes(layout.bytes * times))
            for name, times in parts
        )

    groups = tuple((layout.name, bars(layout)) for layout in found)
    mark = (float(kv_cache), f"KV cache of a rank, {format_bytes(kv_cache)}") if kv_cache else None
    return Panel("", "size of the buffer", format_bytes, groups, base=1024, mark=mark)
