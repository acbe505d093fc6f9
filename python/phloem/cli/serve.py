"""`phloem serve`: the command line of the server. Options are read here; what they mean is serve/config.py, how it lives lifecycle.py.

flag > PHLOEM_<FLAG> > --config x.toml > $XDG_CONFIG_HOME/phloem/config.toml > default            (C1)

Options are made from the records' fields, so typer knows none of them: a name may have several spellings, and an unknown one gets
its nearest.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from phloem.runtime.errors import ConfigError, PhloemError

if TYPE_CHECKING:
    from phloem.runtime.serve.config import Flag, Loaded

__all__ = ["Parsed", "main", "parse", "read_options", "register", "usage"]

GROUPS = ("Model", "Memory", "Scheduling", "API", "Life, logs")


def register(app: typer.Typer) -> None:
    settings = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    app.command("serve", context_settings=settings, add_help_option=False)(serve)


def serve(ctx: typer.Context) -> None:
    """Serve a model over HTTP: the OpenAI API, /generate, /metrics. `phloem serve --help` lists the options."""
    raise typer.Exit(main(ctx.args))


def main(words: Sequence[str]) -> int:
    """The command without typer, which would load pydantic to say what the options are (C3). The exit code."""
    if any(word in ("-h", "--help") for word in words):
        print(usage())
        return 0
    try:
        loaded, notes = read_options(words, os.environ)
    except PhloemError as error:
        _say(error.message)
        return 2
    for note in notes:
        _say(note)
    from phloem.runtime.serve.main import run

    return run(loaded)


def _say(text: str) -> None:
    print(f"phloem: {' '.join(text.split())}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------------------------ reading


class Parsed:
    """given: option name -> value or values.   config: files named by --config.   notes: lines to say (C2)."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}
        self.config: str | None = None
        self.notes: list[str] = []


def read_options(words: Sequence[str], environment: Mapping[str, str]) -> tuple[Loaded, list[str]]:
    """Everything that was said, by any means. Raises ConfigError."""
    from phloem.runtime.serve.config import load

    parsed = parse(words)
    tables = []
    named = parsed.config if parsed.config is not None else environment.get("PHLOEM_CONFIG")
    if named is not None:
        tables.append(_read_toml(Path(named).expanduser(), "--config"))
    home = environment.get("XDG_CONFIG_HOME") or str(Path(environment.get("HOME", "~")).expanduser() / ".config")
    usual = Path(home) / "phloem" / "config.toml"
    if usual.is_file():
        tables.append(_read_toml(usual, str(usual)))
    return load(parsed.given, environment, *tables), parsed.notes


def parse(words: Sequence[str]) -> Parsed:
    """The words after `serve`. Raises ConfigError for an unknown flag (with the nearest one), a missing value, two models."""
    from phloem.runtime.serve.config import ACCEPTED, find_flag

    parsed, rest, only_words = Parsed(), list(words), False
    while rest:
        word = rest.pop(0)
        if only_words or not word.startswith("-") or word == "-":
            _give_model(parsed, word)
            continue
        if word == "--":
            only_words = True
            continue
        name, equals, value = word.partition("=")
        if name == "--config":
            parsed.config = value if equals else _next(name, rest)
            continue
        if name in ACCEPTED:
            parsed.notes.append(f"{name} is not needed: {ACCEPTED[name]}.")
            continue
        found = find_flag(name)
        if found is None:
            raise ConfigError(f"there is no option {name}.{_nearest(name)} See `phloem serve --help`.", param=name)
        flag, carried = found
        if name != flag.flag and not (flag.is_switch and name == flag.off):
            parsed.notes.append(f"{name} is {flag.flag} here.")
        if carried is not None:
            if equals:
                if not flag.is_switch or name == flag.off:
                    raise ConfigError(f"{name} takes no value, and was given {value!r}.", param=flag.name)
                carried = value
            _give(parsed, flag, carried)
        else:
            _give(parsed, flag, value if equals else _next(name, rest))
    return parsed


def _give_model(parsed: Parsed, word: str) -> None:
    if "model" in parsed.given:
        raise ConfigError(f"both {parsed.given['model']!r} and {word!r} name a model; one server has one.", param="model")
    parsed.given["model"] = word


def _give(parsed: Parsed, flag: Flag, value: Any) -> None:
    if flag.name == "model":
        _give_model(parsed, value)
    elif flag.many:
        parsed.given.setdefault(flag.name, []).append(value)
    elif flag.name in parsed.given and parsed.given[flag.name] != value:
        raise ConfigError(f"{flag.flag} was given twice, with different values.", param=flag.name)
    else:
        parsed.given[flag.name] = value


def _next(name: str, rest: list[str]) -> str:
    if not rest or (rest[0].startswith("--") and len(rest[0]) > 2):
        raise ConfigError(f"{name} needs a value.", param=name)
    return rest.pop(0)


def _nearest(name: str) -> str:
    from phloem.runtime.serve.config import ACCEPTED, flags, nearest

    known = [*ACCEPTED, "--config", "--help"]
    for flag in flags():
        known += [flag.flag, *flag.aliases]
    return nearest(name, known)


def _read_toml(path: Path, what: str) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{what}: {path} cannot be read: {error.strerror}.", param="config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what}: {path} is no TOML: {error}.", param="config") from None


# ------------------------------------------------------------------------------------------------------------------- help


def usage() -> str:
    """The help text, from the options' own metadata."""
    from phloem.runtime.serve.config import ACCEPTED, flags

    lines = [
        "Usage: phloem serve [MODEL] [OPTIONS]",
        "",
        "Serve a model over HTTP: the OpenAI API, /generate, /metrics. MODEL: a directory, a .gguf file or org/name; without one the",
        "embedded SmolLM2-135M-Instruct. Each option is also PHLOEM_<OPTION> in the environment and a key of a TOML file.",
    ]
    for group in GROUPS:
        lines += ["", f"{group}:"]
        for flag in flags():
            if flag.group == group:
                lines += _entry(flag)
        if group == "Life, logs":
            lines += _two_columns("--config FILE", "A TOML file with options.")
    lines += ["", *textwrap.wrap(f"Accepted, and not needed: {', '.join(ACCEPTED)}.", 120, break_on_hyphens=False)]
    lines += [
        "",
        "Exit status: 0, 2 wrong usage, 3 the model, 4 its memory, 5 the port, 6 the engine died, 130 a second signal, else 1.",
    ]
    return "\n".join(lines)


def _entry(flag: Flag) -> list[str]:
    word = "" if flag.is_switch else " " + _metavar(flag)
    words = flag.help
    if flag.default is not None and flag.default != () and not flag.is_switch:
        words += f" Default: {flag.default}."
    if flag.aliases:
        words += f" Also {', '.join(flag.aliases)}."
    spelled = f"{flag.flag}/{flag.off}" if flag.is_switch and flag.default else flag.flag
    return _two_columns(spelled + word, words)


def _metavar(flag: Flag) -> str:
    if flag.choices:
        return "|".join(map(str, flag.choices))
    return {int: "N", float: "X"}.get(flag.hint, "TEXT")


def _two_columns(left: str, right: str) -> list[str]:
    wrapped = textwrap.wrap(right, 84, break_on_hyphens=False) or [""]
    first = f"  {left:<32} {wrapped[0]}" if len(left) <= 32 else f"  {left}"
    rest = wrapped[1:] if len(left) <= 32 else wrapped
    return [first, *(" " * 35 + line for line in rest)]
