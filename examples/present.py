"""What every example of the language prints when it is run: its result, what it cost, and the tree that is left."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import phloem as ph

__all__ = ["present"]


def present(main: Callable[[Any], ph.Run[Any]], doc: str | None = None) -> None:
    """main: takes a backend, gives a Run.   --url runs it on a server; without it the embedded model is loaded here."""
    parser = argparse.ArgumentParser(description=(doc or "").strip().splitlines()[0] if doc else None)
    parser.add_argument("--url", help="a phloem or SGLang server to run on")
    url = parser.parse_args().url
    with ph.RuntimeEndpoint(url) if url else ph.Engine() as backend:
        run = main(backend)
        print(run.value if run.value is not None else run.text())
        print("\n" + run.show())
