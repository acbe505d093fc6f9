"""`phloem generate`: a prompt in, text out. stdout gets the output and nothing else; everything about it goes to stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phloem.cli.flags import with_flags
from phloem.cli.session import DEBUG, QUIET, batch_progress, fail, one_line_errors, open_engine

if TYPE_CHECKING:
    from phloem.runtime.request import Delta, Output, TokenLogprob

__all__ = ["register"]

FORMATS = ("text", "json", "jsonl")


def register(app: typer.Typer) -> None:
    app.command("generate")(one_line_errors(with_flags(sampling=True)(generate)))


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt. Absent or '-': read from stdin.", show_default=False)
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="Read the prompt from this file.", show_default=False)
    ] = None,
    lines: Annotated[
        bool, typer.Option("--lines", help="Each line of the input is a prompt of its own; empty lines are left out.")
    ] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user's message, through the chat template.")
    ] = False,
    n: Annotated[int, typer.Option("--n", "-n", help="Samples a prompt.")] = 1,
    format: Annotated[
        str,
        typer.Option("--format", help="text: the text, and a newline, of each output. json: one value. jsonl: a line each."),
    ] = "text",
    stream: Annotated[bool, typer.Option("--stream", help="Write text, or jsonl deltas, as they come.")] = False,
    json_schema: Annotated[
        Path | None,
        typer.Option("--json-schema", help="The output is JSON that this file's schema accepts.", show_default=False),
    ] = None,
    regex: Annotated[
        str | None, typer.Option("--regex", help="The output matches this as a whole.", show_default=False)
    ] = None,
    choices: Annotated[
        list[str] | None,
        typer.Option("--choices", help="The output is one of these: give the flag once for each.", show_default=False),
    ] = None,
    grammar: Annotated[
        Path | None,
        typer.Option(
            "--grammar",
            help="The output follows this file's EBNF, whose first rule is root; or its Lark, if that opens with %llguidance.",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option("--timeout", help="Seconds; then the requests are aborted.", show_default=False)
    ] = None,
    quiet: Annotated[bool, QUIET] = False,
    debug: Annotated[bool, DEBUG] = False,
    *,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Continue a prompt.

    Examples:  phloem generate "Once upon a time" --max-tokens 64 --temperature 0
               cat notes.txt | phloem generate --n 4 --format jsonl
               phloem generate --chat "Is water wet?" --choices yes --choices no
    """
    from phloem.runtime.config import make_config
    from phloem.runtime.engine.constraint import grammar_spec
    from phloem.runtime.request import SamplingParams

    params = SamplingParams(**sampling)
    make_config(**engine)  # before the model is loaded, so that a wrong flag answers at once
    if format not in FORMATS:
        fail(f"--format is {format!r}; expected one of {', '.join(FORMATS)}.", status=2)
    if stream and format == "json":
        fail("--stream with --format json: one JSON value cannot be written piece by piece. Use jsonl or text.", status=2)
    text = read_prompt(prompt, file)
    # Not splitlines(): a form feed or a U+2028 inside a prompt ends no line.
    prompts = [line for line in text.split("\n") if line.strip()] if lines else [text]
    if stream and (len(prompts) > 1 or (n > 1 and format == "text")):
        fail("--stream writes one output: leave out --lines, and --n unless the format is jsonl.", status=2)
    if not prompts:
        fail("the input has no line with a prompt.", status=2)

    constraint: dict[str, Any] = {
        "json_schema": read_source("--json-schema", json_schema),
        "regex": regex,
        "choices": choices or None,
        "grammar": read_source("--grammar", grammar),
    }
    if any(value is not None for value in constraint.values()):
        constraint["trusted"] = True  # the program's own, which is the user's
    grammar_spec(**constraint)  # more than one kind answers at once, too

    with open_engine(engine, quiet) as session:

        def spell(token_id: int) -> str:
            return session.tokenizer.decode([token_id], skip_special_tokens=False)

        inputs = [[{"role": "user", "content": p}] for p in prompts] if chat else prompts
        if stream:
            one: Any = inputs[0]
            deltas = (session.stream_chat if chat else session.stream)(one, params, n=n, timeout=timeout, **constraint)
            write_stream(deltas, format, spell)
            return
        with batch_progress(len(prompts) * n, quiet) as progress:
            call: Any = session.chat if chat else session.generate
            results = call(inputs, params, n=n, timeout=timeout, progress=progress, **constraint)
    write(results if n > 1 else [[output] for output in results], format, not lines, spell)


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The argument, the file, or stdin. A trailing newline of a file or a pipe is not part of the prompt."""
    if file is not None:
        if prompt not in (None, "-"):
            fail("both a PROMPT and --file were given; expected one of them.", status=2)
        return file.read_text(encoding="utf-8").removesuffix("\n")
    if prompt is not None and prompt != "-":
        return prompt
    if sys.stdin.isatty():
        print("phloem: reading the prompt from the terminal; end it with Ctrl-D.", file=sys.stderr)
    return sys.stdin.read().removesuffix("\n")


def read_source(flag: str, file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        why = "is no UTF-8 text"
    fail(f"{flag}: {file} {why}.", status=2)
    return None


def write_stream(deltas: Iterable[Delta], format: str, spell: Callable[[int], str]) -> None:
    for delta in deltas:
        if format == "jsonl":
            _line(as_data(delta))
        else:
            sys.stdout.write(delta.text)
            sys.stdout.flush()
            print_logprobs(delta.logprobs or (), spell)
    if format == "text":
        sys.stdout.write("\n")
    sys.stdout.flush()


def write(results: list[list[Output]], format: str, single: bool, spell: Callable[[int], str]) -> None:
    """results: [prompt][sample].   spell: a token's text."""
    if format == "text":
        for outputs in results:
            for output in outputs:
                sys.stdout.write(output.text + "\n")
                print_logprobs([*(output.prompt_logprobs or ()), *(output.logprobs or ())], spell)
    elif format == "jsonl":
        for number, outputs in enumerate(results):
            for sample, output in enumerate(outputs):
                _line({"prompt": number, "sample": sample, **as_data(output)})
    else:
        shaped: Any = [[as_data(o) for o in outputs] if len(outputs) > 1 else as_data(outputs[0]) for outputs in results]
        _line(shaped[0] if single else shaped)
    sys.stdout.flush()


def print_logprobs(entries: Iterable[TokenLogprob | None], spell: Callable[[int], str]) -> None:
    """Beside text they go to stderr, a line a token."""
    for entry in entries:
        if entry is not None:
            print(f"{entry.logprob:.4f}  {spell(entry.token_id)!r}", file=sys.stderr)


def as_data(record: Any) -> dict[str, Any]:
    """An Output or a Delta as JSON values: fields without a value are left out, an error is its name and message."""
    import msgspec

    data = {name: value for name, value in msgspec.structs.asdict(record).items() if value is not None and value != ()}
    if isinstance(data.get("error"), Exception):
        data["error"] = {"name": type(data["error"]).__name__, "message": str(data["error"])}
    built: dict[str, Any] = msgspec.to_builtins(data)
    return built


def _line(data: Any) -> None:
    import json

    sys.stdout.write(json.dumps(data, ensure_ascii=False, allow_nan=False) + "\n")
    sys.stdout.flush()
