"""`phloem run file.py:program --arg k=v`: a program of the language, its value on stdout, its tree and its trace on request.

file.py  --imported by path-->  program  --run(**args)-->  value on stdout;  --show: the tree on stderr;  --trace: every request
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phloem.cli.flags import with_flags
from phloem.cli.session import DEBUG, QUIET, fail, one_line_errors, open_engine

if TYPE_CHECKING:
    from phloem.lang.run import Program, Run

__all__ = ["load_program", "register"]


def register(app: typer.Typer) -> None:
    app.command("run")(one_line_errors(with_flags()(run)))


def run(
    target: Annotated[str, typer.Argument(help="file.py:program, a function under @phloem.function.")],
    arg: Annotated[
        list[str] | None,
        typer.Option(
            "--arg", "-a", help="k=v, an argument of the program; v is JSON where it can be, else text.", show_default=False
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Print usage and the tree of what was computed, on stderr.")] = False,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Write every request and output to this file, as JSON lines.", show_default=False),
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print what the first stage would send; compute nothing.")] = False,
    url: Annotated[
        str | None,
        typer.Option("--url", help="Run on this phloem or SGLang server instead of an engine here.", show_default=False),
    ] = None,
    replay: Annotated[
        Path | None, typer.Option("--replay", help="Answer from the trace in this file; no model runs.", show_default=False)
    ] = None,
    run_seed: Annotated[
        int | None,
        typer.Option(
            "--run-seed", help="Seed of the program's draws; absent: drawn, and kept in the trace.", show_default=False
        ),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option("--timeout", help="Seconds; then the program is cancelled.", show_default=False)
    ] = None,
    quiet: Annotated[bool, QUIET] = False,
    debug: Annotated[bool, DEBUG] = False,
    *,
    engine: dict[str, Any],
) -> None:
    """Run a program of the language.

    Examples:  phloem run examples/few_shot_qa.py:answer --arg question="Where is Oslo?" --show
               phloem run triage.py:triage -a mail=@mail.txt --trace out.jsonl
    """
    program = load_program(target)
    arguments = parse_arguments(arg or [], program)
    if url is not None and replay is not None:
        fail("--url and --replay were given; expected one of them.", status=2)
    how: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if run_seed is not None:
        how["seed"] = run_seed
    if replay is not None:
        from phloem.lang.trace import Replay

        execute(program, arguments, {**how, "backend": Replay(replay)}, plan, show, trace)
    elif url is not None:
        from phloem.lang.remote import RuntimeEndpoint

        with RuntimeEndpoint(url) as endpoint:
            execute(program, arguments, {**how, "backend": endpoint}, plan, show, trace)
    else:
        with open_engine(engine, quiet) as session:
            execute(program, arguments, {**how, "backend": session}, plan, show, trace)


def execute(
    program: Program[Any, Any], arguments: dict[str, Any], how: dict[str, Any], plan: bool, show: bool, trace: Path | None
) -> None:
    if plan:
        print(program.plan(**arguments, **how))
        return
    result = program.run(**arguments, **how)
    if show:
        print(result.show(), file=sys.stderr)
    if trace is not None:
        result.trace.save(trace)
    sys.stdout.write(as_text(result) + "\n")
    sys.stdout.flush()


def as_text(run: Run[Any]) -> str:
    """The value: text as it is, anything else as JSON; a program that returns nothing: its text."""
    value = run.value
    if value is None:
        return run.text()
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=_plain)


def _plain(value: Any) -> Any:
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if hasattr(value, "__dataclass_fields__"):
        return {name: getattr(value, name) for name in value.__dataclass_fields__}
    return str(value)


def parse_arguments(given: list[str], program: Program[Any, Any]) -> dict[str, Any]:
    """`k=v`: JSON where v is some, else the text itself; `k=@file` is the text of a file."""
    found: dict[str, Any] = {}
    for pair in given:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            fail(f"--arg {pair!r}: expected name=value.", status=2)
        if name not in program.arg_names:
            fail(
                f"--arg {name}: {program.name} has no such parameter; it takes {', '.join(program.arg_names) or 'none'}.",
                status=2,
            )
        if name in found:
            fail(f"--arg {name} was given twice.", status=2)
        found[name] = _value(text)
    return found


def _value(text: str) -> Any:
    if text.startswith("@"):
        try:
            return Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            fail(f"--arg: {text[1:]} cannot be read: {error}.", status=2)
    try:
        return json.loads(text)
    except ValueError:
        return text


def load_program(target: str) -> Program[Any, Any]:
    """The program of `file.py:name`. The file is run as a module of its own, its folder first on the path. Exits with 2 for what is none."""
    from phloem.lang.run import Program

    path, colon, name = target.rpartition(":")
    file = Path(path)
    if not colon or not name.isidentifier() or file.suffix != ".py":
        fail(f"{target!r} names no program; expected file.py:program.", status=2)
    if not file.is_file():
        fail(f"there is no file {path}.", status=2)
    spec = importlib.util.spec_from_file_location(f"phloem_program_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # typing.get_type_hints looks the module of a class up here
    sys.path.insert(0, str(file.resolve().parent))
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not isinstance(found, Program):
        programs = [key for key, value in vars(module).items() if isinstance(value, Program)]
        fail(f"{path} has no program {name!r}; it has {', '.join(programs) or 'none'}. Put @phloem.function on it.", status=2)
    assert isinstance(found, Program)
    return found
