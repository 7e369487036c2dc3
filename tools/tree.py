"""torchvm tree: a draft tree drawn with its mask, positions, links, bytes and accepted path."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import Annotated

import typer

from torchvm.tools.files import write_file
from torchvm.tools.messages import CommandError
from torchvm.tools.quantities import parse_count
from torchvm.tools.tree_choices import from_choices
from torchvm.tools.tree_input import (
    Given,
    from_parents,
    from_record,
    parse_accepted,
    parse_texts,
)
from torchvm.tools.tree_text import ASCII, UNICODE, Part, as_text

__all__ = ["tree"]

_SEQ_LEN = 4
_MOST_SEQ_LEN = 1 << 40


class ModeName(StrEnum):
    """Values of --mode."""

    full = "full"
    qlen = "qlen"
    packed = "packed"
    all = "all"


def tree(
    parents: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="The parent of node 0, 1, 2, ...: node 0 is the root and has -1, as in "
            '"-1,0,0,1,1,2".',
        ),
    ] = None,
    choices: Annotated[
        str | None,
        typer.Option(
            metavar="LIST|FILE[:NAME]",
            help="Paths of ranks as Medusa and EAGLE write them, JSON or Python: "
            '"[[0],[1],[0,0],[0,1]]". Nodes are numbered by length of path, then by rank.',
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Steps from `torchvm generate --record`."),
    ] = None,
    step: Annotated[int, typer.Option(min=0, help="Which step of the recording.")] = 0,
    request: Annotated[int, typer.Option(min=0, help="Which request of the recording.")] = 0,
    seq_len: Annotated[
        int | None,
        typer.Option(
            parser=parse_count,
            metavar="L",
            help=f"Committed tokens before the tree, such as 1Mi; {_SEQ_LEN} by default.",
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="TEXTS",
            help='Each node\'s token: "the,cat,dog", or a JSON list where a text has a comma.',
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="TEXTS",
            help="The target's choice after each node, in the form of --tokens: verifies.",
        ),
    ] = None,
    accepted: Annotated[
        str | None,
        typer.Option(metavar="LIST", help='Nodes that were accepted: "0,1,4".'),
    ] = None,
    mode: Annotated[
        ModeName | None, typer.Option(help="Show the mask's bytes in this layout.")
    ] = None,
    only: Annotated[
        list[Part] | None,
        typer.Option(help="Print this part alone; may be given several times."),
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw all of it in a picture, too.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Draw a draft tree as the ops lay it out: mask, positions, links, and the accepted path.

    The tree is given by exactly one of --parents, --choices and --record. A parent that is not
    an earlier node is not found: its node hangs from nobody, and a note says so.
    """
    given = _given(parents, choices, record, step, request, seq_len)
    if given.seq_len > _MOST_SEQ_LEN:
        raise CommandError(
            f"committed tokens must be at most {_MOST_SEQ_LEN:,}, got {given.seq_len:,}"
        )
    given = _with_texts(given, tokens, target, accepted)
    if only and as_json:
        raise CommandError("--only chooses parts of the text: leave --json out")
    if only and Part.bytes in only and mode is None:
        raise CommandError("--only bytes needs --mode: which layout?")
    if only and Part.walk in only and given.accepted is None and given.target is None:
        raise CommandError("--only walk needs --target, --accepted or --record")

    from torchvm.ops.layout import TreeMaskMode
    from torchvm.tools.tree_layout import lay_out
    from torchvm.tools.tree_svg import as_svg

    layouts = dict(zip(("full", "qlen", "packed"), TreeMaskMode, strict=True))
    wanted = [layout for name, layout in layouts.items() if mode in (name, ModeName.all)]
    picture = lay_out(given, wanted)
    if svg is not None:
        write_file(svg, as_svg(picture))
    if as_json:
        import json

        import msgspec

        # Tokens of the command line need not be text: what is none is written as an escape.
        typer.echo(json.dumps(msgspec.to_builtins(picture)))
        return
    text = as_text(picture, UNICODE, only or Part)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = as_text(picture, ASCII, only or Part)
    if text:
        typer.echo(text)


def _given(
    parents: str | None,
    choices: str | None,
    record: Path | None,
    step: int,
    request: int,
    seq_len: int | None,
) -> Given:
    """Read the tree from where it comes."""
    if [parents, choices, record].count(None) != 2:
        raise typer.BadParameter("give one of --parents, --choices and --record")
    if record is not None:
        if seq_len is not None:
            raise CommandError("--seq-len is in the recording: leave it out")
        return from_record(record, step, request)
    if (step, request) != (0, 0):
        raise CommandError("--step and --request are for a recording: give --record")
    length = _SEQ_LEN if seq_len is None else seq_len
    if parents is not None:
        return from_parents(parents, length)
    assert choices is not None
    return from_choices(choices, length)


def _with_texts(
    given: Given, tokens: str | None, target: str | None, accepted: str | None
) -> Given:
    """Add what is known of the tokens."""
    options = {"--tokens": tokens, "--target": target, "--accepted": accepted}
    if given.source is not None:
        for option, value in options.items():
            if value is not None:
                raise CommandError(f"{option} is in the recording: leave it out")
        return given
    if target is not None and tokens is None:
        raise CommandError("--target needs --tokens, which it is compared with")
    if target is not None and accepted is not None:
        raise CommandError("--target finds the accepted nodes: leave --accepted out")
    count = len(given.parents)
    return given._replace(
        tokens=None if tokens is None else parse_texts("--tokens", tokens, count),
        target=None if target is None else parse_texts("--target", target, count),
        accepted=None if accepted is None else parse_accepted(accepted),
    )
