"""The command `phloem`: one file a command. Nothing heavy is imported before a command runs, so `phloem --help` is quick.

main ── typer ── generate.py · chat.py · run.py · serve.py · models.py · doctor.py · bench.py ── session.py (the engine, errors) ── flags.py (fields -> flags)
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from phloem.cli import bench, chat, doctor, generate, models, run, serve

__all__ = ["app", "main"]


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"phloem {version('phloem')}")
        raise typer.Exit


app = typer.Typer(
    name="phloem",
    help="Structured generation on a radix tree of paged KV. Without --model, the embedded SmolLM2-135M-Instruct answers.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # rich's help costs an import, and a pipe gets the same plain text
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


for module in (generate, chat, run, serve, bench, models, doctor):
    module.register(app)


def main() -> None:
    """The entry point. Exit status: 0, 1 for an error, 2 for wrong usage, 130 after Ctrl-C, 141 when the reader went away."""
    if sys.stderr is None:  # closed (`2>&-`): print(file=None) would write to stdout, among the output
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the life of the process
    if sys.stdout is None:
        print(
            "phloem: stdout is closed, and there is nowhere to write the output. Redirect it to /dev/null instead.",
            file=sys.stderr,
        )
        sys.exit(1)
    if sys.argv[1:2] == ["serve"]:
        sys.exit(serve.main(sys.argv[2:]))
    app()
