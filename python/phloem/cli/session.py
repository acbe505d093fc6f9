"""What every command shares: opening the engine with progress on stderr, and turning errors into one line and an exit status."""

from __future__ import annotations

import functools
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from phloem.cli.flags import usage_error
from phloem.runtime.errors import PhloemError

if TYPE_CHECKING:
    import phloem

__all__ = ["DEBUG", "QUIET", "batch_progress", "fail", "one_line_errors", "open_engine"]

DEBUG = typer.Option("--debug", help="Show the traceback of an error.")
QUIET = typer.Option("--quiet", "-q", help="No progress on stderr.")


def one_line_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Phloem's errors become one line on stderr and status 1, or 2 for wrong usage; with `debug` the traceback comes first.

    Ctrl-C is status 130. A reader that went away (`phloem generate | head -1`) is no error: status 141, as SIGPIPE would give.
    """

    @functools.wraps(command)
    def guarded(**arguments: Any) -> None:
        try:
            command(**arguments)
        except BrokenPipeError:
            # The interpreter flushes stdout once more on exit: give it somewhere to go.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(141) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except (PhloemError, OSError, UnicodeError) as error:
            if arguments.get("debug"):
                traceback.print_exc()
            fail(str(error), status=2 if usage_error(error) else 1)

    return guarded


def fail(message: str, status: int) -> None:
    """One line on stderr, then the end."""
    print(f"phloem: {' '.join(message.split())}", file=sys.stderr)
    raise typer.Exit(status)


@contextmanager
def open_engine(options: dict[str, Any], quiet: bool) -> Iterator[phloem.Engine]:
    """An engine for the length of the block. On a terminal a spinner names the loading stage; else one line when it is there."""
    with _loading(quiet) as on_load:
        import phloem  # torch comes with it: seconds, which the spinner should cover

        engine = phloem.Engine(on_load=on_load, **options)
    with engine:
        yield engine


@contextmanager
def _loading(quiet: bool) -> Iterator[Callable[[str], None]]:
    start = time.perf_counter()
    if quiet:
        yield lambda stage: None
    elif sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status("loading") as status:
            yield lambda stage: status.update(f"loading: {stage}")
    else:
        stages: list[str] = []
        yield stages.append
        print(f"phloem: loaded in {time.perf_counter() - start:.1f} s", file=sys.stderr)


@contextmanager
def batch_progress(total: int, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr for a batch of more than 8, on a terminal; else nothing."""
    if quiet or total <= 8 or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("generating", total=total)
        yield lambda ended, _: bar.update(task, completed=ended)
