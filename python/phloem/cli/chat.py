"""`phloem chat`: a conversation in the terminal. Each turn sends the whole history; the radix tree computes only what is new."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phloem.cli.flags import with_flags
from phloem.cli.session import DEBUG, QUIET, one_line_errors, open_engine

if TYPE_CHECKING:
    import phloem

__all__ = ["register"]

REPLY_TOKENS = 1024  # where the context has the room: an answer should end by itself


def register(app: typer.Typer) -> None:
    app.command("chat")(one_line_errors(with_flags(sampling=True)(chat)))


def chat(
    system: Annotated[
        str | None, typer.Option("--system", help="A system message for the conversation.", show_default=False)
    ] = None,
    quiet: Annotated[bool, QUIET] = False,
    debug: Annotated[bool, DEBUG] = False,
    *,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Talk to the model. Ctrl-C ends an answer, Ctrl-D the conversation. Without a terminal, each line of stdin is a turn."""
    from phloem.runtime.config import make_config
    from phloem.runtime.request import SamplingParams

    SamplingParams(**sampling)
    make_config(**engine)
    history: list[dict[str, Any]] = [{"role": "system", "content": system}] if system is not None else []
    with open_engine(engine, quiet) as session:
        while (text := _ask()) is not None:
            if text.strip():
                _turn(session, history, text, sampling, quiet)


def _ask() -> str | None:
    """The user's next line, None at the end."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline()
        return line.rstrip("\n") if line else None
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() its line editing and history
    while True:
        try:
            return input("> ")
        except EOFError:
            print(file=sys.stderr)
            return None
        except KeyboardInterrupt:
            print("  (Ctrl-D ends the conversation)", file=sys.stderr)


def _turn(session: phloem.Engine, history: list[dict[str, Any]], text: str, sampling: dict[str, Any], quiet: bool) -> None:
    """Ask, print the answer as it comes, and keep both. A turn that is refused leaves the history as it was."""
    from phloem.runtime.errors import RequestError

    messages = [*history, {"role": "user", "content": text}]
    start = time.perf_counter()
    first: float | None = None
    answer, num_tokens = "", 0
    stream = None
    try:
        prompt = session.encode_chat(messages)
        room = min(session.resolved.max_context, session.resolved.num_pages * session.config.page_size) - len(prompt)
        params = {"max_tokens": max(1, min(REPLY_TOKENS, room)), **sampling}
        stream = session.stream(prompt, params)
        for delta in stream:
            first = first or time.perf_counter()
            num_tokens += len(delta.token_ids)
            answer += delta.text
            sys.stdout.write(delta.text)
            sys.stdout.flush()
    except RequestError as error:
        print(f"phloem: {error} This turn was not kept; a new conversation starts with 'phloem chat'.", file=sys.stderr)
        return
    except KeyboardInterrupt:
        if stream is not None:
            stream.close()  # what was said so far stays said
    sys.stdout.write("\n")
    sys.stdout.flush()
    history += [messages[-1], {"role": "assistant", "content": answer}]
    if not quiet and stream is not None:
        _report(stream, num_tokens, start, first)


def _report(stream: Any, num_tokens: int, start: float, first: float | None) -> None:
    usage = stream.output.usage
    seconds = time.perf_counter() - (first or start)
    # The first token comes with the prompt, so the rate is of those after it.
    rate = f"{(num_tokens - 1) / seconds:.1f} tok/s" if num_tokens > 1 and seconds > 0 else "-- tok/s"
    waited = f"first token after {(first or time.perf_counter()) - start:.2f} s"
    line = f"{rate} · {waited} · {usage.cached_tokens}/{usage.prompt_tokens} prompt tokens cached"
    print(f"\033[2m{line}\033[0m" if sys.stderr.isatty() else line, file=sys.stderr)
