"""torchvm dump TARGET: what a graph does with masks, before and after the passes."""

from __future__ import annotations

import json
import re
import shutil
import sys
from contextlib import redirect_stdout
from pathlib import Path  # noqa: TC003 - typer reads the annotation
from typing import TYPE_CHECKING, Annotated

import typer

from torchvm.tools.files import refuse_unwritable, write_file
from torchvm.tools.messages import CommandError, printable, progress
from torchvm.tools.quantities import parse_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchvm.inspection import TracedGraph
    from torchvm.tools.dump_target import Request

__all__ = ["dump", "dump_json"]

_DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?", re.ASCII)


def dump(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="file.py:function or module:function, which returns (callable, example_args) or "
            "(callable, example_args, example_kwargs); FILE.pt2, a saved torch.export program; "
            "hf:FOLDER with a model's config.json; hf:CONFIG, a config class of transformers "
            "such as hf:LlamaConfig, at a small size.",
        ),
    ],
    every_node: Annotated[
        bool, typer.Option("--all", help="Every node, not only torchvm's and their neighbours.")
    ] = False,
    fake_device: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            help="cpu, cuda or cuda:N, which need not be there: the target function itself runs "
            "on fake tensors too, and allocates nothing.",
        ),
    ] = None,
    max_bs: Annotated[
        int | None,
        typer.Option(
            parser=parse_count,
            metavar="COUNT",
            help="Requests in a batch. This and the next two go to the target function, as "
            "keyword arguments of these names, or size the step of a model.",
        ),
    ] = None,
    num_draft_tokens: Annotated[
        int | None,
        typer.Option(parser=parse_count, metavar="COUNT", help="Nodes of a tree, root included."),
    ] = None,
    max_context_len: Annotated[
        int | None,
        typer.Option(
            parser=parse_count, metavar="COUNT", help="Most committed tokens, such as 1Mi."
        ),
    ] = None,
    dynamic: Annotated[
        bool, typer.Option("--dynamic", help="Trace a function with symbolic sizes.")
    ] = False,
    imports: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="MODULE",
            help="A module or file.py that registers ops of yours; may be given several times.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of graphs.")] = False,
    as_dot: Annotated[bool, typer.Option("--dot", help="Print the graphs for Graphviz.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write one self-contained page, with the graphs drawn."),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="End with status 1 when there are findings.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of a target that fails.")
    ] = False,
) -> None:
    """Show what becomes of every verify mask of a graph: ops, layouts, bytes, readers, findings.

    The target is traced under fake tensors, and the passes run on its graphs: nothing is computed
    and no mask is allocated. Findings are uses that disagree with a mask's contract, copies of a
    whole mask, and what stands against CUDA-graph capture.
    """
    from torchvm.tools.dump_target import Request

    if as_json and as_dot:
        raise CommandError("--json and --dot both print: leave one out")
    request = Request(
        target, max_bs, num_draft_tokens, max_context_len, fake_device, dynamic, every_node, debug
    )
    _check(request)
    if html is not None:
        refuse_unwritable(html)
    # What modules and traced functions print is no result.
    with progress("Tracing"), redirect_stdout(sys.stderr):
        graphs = _graphs(request, imports or [])
    if html is not None:
        from torchvm.tools.dump_html import dump_html

        write_file(html, dump_html(graphs, target))
    typer.echo(_printed(graphs, html, as_json=as_json, as_dot=as_dot))
    if strict and any(graph.findings for graph in graphs):
        raise typer.Exit(1)


def dump_json(graphs: Sequence[TracedGraph]) -> str:
    """Write all graphs as one JSON list."""
    import msgspec

    # Names of files need not be text: what is none is written as an escape.
    return json.dumps(msgspec.to_builtins(list(graphs)), indent=2)


def _check(request: Request) -> None:
    for name, size in request.sizes.items():
        least = 0 if name == "max_context_len" else 1
        if size < least:
            option = "--" + name.replace("_", "-")
            raise CommandError(f"{option} must be >= {least}, got {size}")
    if request.device is not None and not _DEVICE.fullmatch(request.device):
        raise CommandError(f"--fake-device must be cpu, cuda or cuda:N, got {request.device!r}")


def _graphs(request: Request, imports: Sequence[str]) -> list[TracedGraph]:
    import torchvm.api  # noqa: F401 - targets find every op registered, as after import torchvm
    from torchvm.tools.dump_target import graphs_of, load_module, shown_device

    for place in imports:
        load_module(place, debug=request.debug)
    if shown_device(request.device):
        typer.echo(
            f"torchvm: this torch has no CUDA: traced on the CPU, shown on {request.device}; a "
            "CPU tensor among CUDA tensors would not be found",
            err=True,
        )
    return graphs_of(request)


def _printed(
    graphs: Sequence[TracedGraph], html: Path | None, *, as_json: bool, as_dot: bool
) -> str:
    """What goes to standard output."""
    from torchvm.tools.dump_text import dump_text, summary

    if as_json:
        return dump_json(graphs)
    if as_dot:
        from torchvm.tools.dump_dot import dump_dot

        return dump_dot(graphs)
    if html is not None:
        return printable(f"{html}: {summary(graphs)}")
    width = shutil.get_terminal_size((120, 40)).columns if sys.stdout.isatty() else None
    return printable(dump_text(graphs, width))
