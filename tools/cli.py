"""The `torchvm` command. Importing this module does not import torch; sub-commands do."""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated

import typer

from torchvm.ops.version import __version__
from torchvm.tools.bench.command import bench
from torchvm.tools.dump import dump
from torchvm.tools.env import env
from torchvm.tools.generate import generate
from torchvm.tools.messages import CommandError, one_line
from torchvm.tools.plan import plan
from torchvm.tools.reasons import reasons
from torchvm.tools.tree import tree

__all__ = ["app", "main"]

app = typer.Typer(
    name="torchvm",
    help="Verify masks for speculative decoding, laid out by what the compiled graph reads.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"torchvm {__version__}")
        raise typer.Exit


@app.callback(epilog="Example: torchvm generate --check 'Say the alphabet three times.'")
def _options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


app.command(
    short_help="Decode with draft trees, and see what became of the mask.",
    epilog="Example: torchvm generate --topk 2 --depth 4 --check 'List three colours, twice.'",
)(generate)
app.command(
    short_help="What becomes of every verify mask of a graph.",
    epilog="Example: torchvm dump hf:LlamaConfig --max-bs 256 --max-context-len 1Mi",
)(dump)
app.command(
    short_help="Bytes of a verify mask in every layout.",
    epilog="Example: torchvm plan --max-bs 256 --num-draft-tokens 4 --max-context-len 1Mi "
    "--ranks 8 --kv-cache 80Gi --bandwidth 4.8T",
)(plan)
app.command(
    short_help="Draw a draft tree: mask, positions, links, bytes.",
    epilog='Example: torchvm tree --parents "-1,0,0,1,1,2" --mode all',
)(tree)
app.command(
    short_help="What a reason code means, and what helps.",
    epilog="Example: torchvm reasons NO_CONTRACT",
)(reasons)
app.command(
    short_help="Measure beside floors and peers of the same results.",
    epilog="Example: torchvm bench tree mask --peers --json",
)(bench)
app.command(
    short_help="Versions and machine, for a report of a problem.",
    epilog="Example: torchvm env --json",
)(env)


def main() -> None:
    """Run the command line; a mistake of the user's is one line on stderr and exit status 2."""
    try:
        app()
    except CommandError as error:
        typer.echo(f"torchvm: {one_line(str(error))}", err=True)
        sys.exit(2)
    except OSError as error:
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EIO):
            raise
        typer.echo(f"torchvm: cannot write the output: {error.strerror}", err=True)
        # Python would try to write the rest once more on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


if __name__ == "__main__":
    main()
