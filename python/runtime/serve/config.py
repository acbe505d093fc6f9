"""ServerConfig: what `phloem serve` can be told, as data; and how flags, the environment and files become it (C1, C2).

    flag --max-queue > PHLOEM_MAX_QUEUE > max_queue = … in TOML > default          one name, three spellings, made here

Every option is a field with metadata: its help, its group, what vLLM and SGLang call it. Command line, environment, TOML and
`/get_server_info` are made from that, so none can forget one. Imports neither torch nor FastAPI. Reads nothing by itself.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from phloem.runtime.config import EngineConfig, make_config
from phloem.runtime.errors import ConfigError

__all__ = ["ACCEPTED", "Flag", "Loaded", "ServerConfig", "find_flag", "flags", "load", "redacted"]

Origin = Literal["flag", "environment", "file", "default"]


def _option(
    default: Any,
    group: str,
    help: str,
    *,
    aliases: tuple[str, ...] = (),
    secret: bool = False,
    low: Any = None,
    high: Any = None,
) -> Any:
    return field(
        default=default, metadata={"group": group, "help": help, "aliases": aliases, "secret": secret, "low": low, "high": high}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Options of the server beside those of its engine (EngineConfig). Checked by `load`; a test may build one by hand."""

    served_model_name: tuple[str, ...] = _option(
        (), "Model", "Names that requests may use; the first one is shown. May be repeated."
    )
    chat_template: str | None = _option(None, "Model", "A file with a chat template, or the name of one of the model's.")
    tool_parser: str = _option(
        "auto",
        "Model",
        "How the model writes tool calls; auto reads it off the chat template.",
        aliases=("--tool-call-parser",),
    )
    sampling_defaults: Literal["model", "none"] = _option(
        "model", "Model", "model: defaults come from its generation_config.json.", aliases=("--generation-config",)
    )

    max_queue: int = _option(
        4096, "Scheduling", "Requests that may wait; more get 429.", aliases=("--max-queued-requests",), low=1, high=1 << 20
    )
    max_queue_tokens: int = _option(16_000_000, "Scheduling", "Prompt tokens that may wait; more get 429.", low=1, high=1 << 40)

    host: str = _option("127.0.0.1", "API", "The address to listen on.")
    port: int = _option(8000, "API", "The port to listen on; 0 takes a free one.", low=0, high=65_535)
    api_key: tuple[str, ...] = _option((), "API", "A key that requests must carry. May be repeated.", secret=True)
    api_key_file: str | None = _option(None, "API", "Lines of `name key`; the name labels logs and separates caches.")
    admin_key: str | None = _option(
        None, "API", "The key of administrative routes; without one they are off.", aliases=("--admin-api-key",), secret=True
    )
    allow_origin: tuple[str, ...] = _option(
        (), "API", "Web pages of this origin may call. May be repeated.", aliases=("--allowed-origins",)
    )
    strict_params: bool = _option(False, "API", "Unknown fields of a request are errors.")
    request_templates: bool = _option(
        False, "API", "Requests may bring a chat template of their own.", aliases=("--trust-request-chat-template",)
    )
    max_logprobs: int = _option(20, "API", "Most alternatives a token that a request may ask for; 20 at most.", low=0, high=20)
    sse_ping: float = _option(
        0.0, "API", "Seconds of silence after which a stream sends a comment; 0 is off.", low=0, high=3600
    )

    shutdown_timeout: float = _option(
        30.0, "Life, logs", "Seconds that requests get to end after a first signal.", low=0, high=86_400
    )
    restart_engine: int = _option(
        0, "Life, logs", "How often a dead engine is started anew within ten minutes.", low=0, high=1000
    )
    log_level: Literal["debug", "info", "warning", "error"] = _option("info", "Life, logs", "The least level that is logged.")
    log_format: Literal["text", "json"] = _option("text", "Life, logs", "key=value lines, or JSON lines.")
    log_prompts: bool = _option(False, "Life, logs", "Log what requests say; off, no text of theirs reaches the log.")
    metrics_compat: Literal["none", "vllm", "sglang"] = _option(
        "none", "Life, logs", "Serve the headline metrics under another engine's names too."
    )
    otlp_endpoint: str | None = _option(
        None, "Life, logs", "Where spans are sent; needs the OpenTelemetry SDK.", aliases=("--otlp-traces-endpoint",)
    )
    ready_file: str | None = _option(None, "Life, logs", "A file that gets the ready line.")


ENGINE_OPTIONS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "model": ("Model", "A directory, a .gguf file or org/name. Default: the embedded model.", ("--model-path",)),
    "dtype": ("Model", "Of the weights; auto keeps the file's.", ()),
    "load_format": ("Model", "dummy: random weights of the shape that config.json tells.", ()),
    "max_context": ("Model", "Prompt and output, in tokens.", ("--max-model-len", "--context-length")),
    "device": ("Memory", "Where the model runs.", ()),
    "threads": ("Memory", "0: one a core.", ()),
    "kv_memory": (
        "Memory", 'The KV pool: bytes, a size ("2GiB"), or a fraction of memory, weights included.',
        ("--gpu-memory-utilization", "--mem-fraction-static"),
    ),
    "kv_tokens": ("Memory", "The KV pool, in tokens.", ("--max-total-tokens",)),
    "kv_dtype": ("Memory", "Of keys and values.", ("--kv-cache-dtype",)),
    "page_size": ("Memory", "Tokens a page: 1, 2, 4, ... 64.", ("--block-size",)),
    "cache_mode": ("Memory", "Whether prompts share what was computed.", ("--disable-radix-cache", "--no-enable-prefix-caching")),
    "max_running": ("Scheduling", "Sequences that run at once.", ("--max-num-seqs", "--max-running-requests")),
    "max_step_tokens": (
        "Scheduling", "Token budget of one step.", ("--max-num-batched-tokens", "--chunked-prefill-size"),
    ),
    "policy": ("Scheduling", "Order of the waiting queue.", ("--schedule-policy", "--scheduling-policy")),
    "max_wait": ("Scheduling", "Served tokens after which a waiting request is overtaken no more.", ()),
    "overlap": ("Scheduling", "Plan while the device works; by default the device decides.", ()),
    "seed": ("Scheduling", "Of the seeds of requests that name none.", ("--random-seed",)),
    "deterministic": ("Scheduling", "Outputs do not depend on the batch.", ("--enable-deterministic-inference",)),
}  # fmt: skip

ALIAS_VALUES: dict[str, Any] = {"--disable-radix-cache": "off", "--no-enable-prefix-caching": "off"}
"""Aliases that are flags of their own: giving one sets the option to this."""
OTHER_WORDS: dict[tuple[str, str], Any] = {
    ("policy", "lpm"): "prefix",
    ("dtype", "bfloat16"): "bf16", ("dtype", "float32"): "f32", ("dtype", "float"): "f32",
    ("kv_dtype", "bfloat16"): "bf16", ("kv_dtype", "float32"): "f32",
    ("sampling_defaults", "auto"): "model", ("sampling_defaults", "vllm"): "none", ("sampling_defaults", "openai"): "none",
}  # fmt: skip
"""Words of vLLM and SGLang for values that Phloem calls otherwise."""
ACCEPTED: dict[str, str] = {
    "--enable-metrics": "metrics are always on",
    "--enable-prefix-caching": "prefixes are always cached",
    "--enable-chunked-prefill": "prompts are always computed in chunks",
    "--enable-auto-tool-choice": "tool_choice auto always works",
    "--enable-cache-report": "usage always tells the cached tokens",
    "--trust-remote-code": "no model's code is ever run",
}
"""Flags that need no flag here: accepted, and said so (C2)."""


@dataclass(frozen=True, slots=True)
class Flag:
    """One option. name: of the field.   flag, env, toml: its three spellings.   hint: its type; many: may be repeated.
    off: for booleans, the flag that says no.   owner: the record that has the field.
    """

    name: str
    flag: str
    env: str
    toml: str
    aliases: tuple[str, ...]
    hint: Any
    default: Any
    help: str
    group: str
    secret: bool
    many: bool
    choices: tuple[Any, ...]
    low: float | None
    high: float | None
    owner: Literal["engine", "server"]

    @property
    def is_switch(self) -> bool:
        return self.hint is bool

    @property
    def off(self) -> str:
        return f"--no-{self.flag[2:]}"


@lru_cache(maxsize=1)
def flags() -> tuple[Flag, ...]:
    """Every option of `serve`: the engine's, then the server's."""
    hints = get_type_hints(EngineConfig)
    made = []
    for name, (group, help, aliases) in ENGINE_OPTIONS.items():
        default = next(f.default for f in dataclasses.fields(EngineConfig) if f.name == name)
        made.append(_flag(name, hints[name], default, group, help, aliases, False, None, None, "engine"))
    hints = get_type_hints(ServerConfig)
    for f in dataclasses.fields(ServerConfig):
        m = f.metadata
        made.append(
            _flag(
                f.name,
                hints[f.name],
                f.default,
                m["group"],
                m["help"],
                m["aliases"],
                m["secret"],
                m["low"],
                m["high"],
                "server",
            )
        )
    return tuple(made)


def _flag(
    name: str,
    hint: Any,
    default: Any,
    group: str,
    help: str,
    aliases: tuple[str, ...],
    secret: bool,
    low: Any,
    high: Any,
    owner: Any,
) -> Flag:
    dashed = name.replace("_", "-")
    base, many, choices = _shape(hint)
    return Flag(
        name,
        f"--{dashed}",
        f"PHLOEM_{name.upper()}",
        name,
        aliases,
        base,
        default,
        help,
        group,
        secret,
        many,
        choices,
        low,
        high,
        owner,
    )


def _shape(hint: Any) -> tuple[Any, bool, tuple[Any, ...]]:
    """(the type of one value, whether several may be given, the words that are allowed)."""
    origin, arguments = get_origin(hint), [a for a in get_args(hint) if a is not type(None)]
    if origin is Literal:
        return str, False, get_args(hint)
    if origin is tuple:
        return arguments[0], True, ()
    if origin is Union or type(None) in get_args(hint):
        return _shape(arguments[0]) if len(arguments) == 1 else (str, False, ())
    return hint, False, ()


def find_flag(spelling: str) -> tuple[Flag, Any] | None:
    """The option that a command line's `--x` means, and the value that it carries by itself (None: one must follow)."""
    for f in flags():
        if spelling == f.flag:
            return f, True if f.is_switch else None
        if f.is_switch and spelling == f.off:
            return f, False
        if spelling in f.aliases:
            return f, ALIAS_VALUES.get(spelling, True if f.is_switch else None)
    return None


def nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" Did you mean {close[0]}?" if close else ""


@dataclass(frozen=True, slots=True)
class Loaded:
    """origins: of every option, where its value came from."""

    server: ServerConfig
    engine: EngineConfig
    origins: Mapping[str, Origin]


def load(given: Mapping[str, Any], environment: Mapping[str, str] = {}, *tables: Mapping[str, Any]) -> Loaded:
    """given: option name -> value, from the command line.   environment: of which the PHLOEM_ names are read.
    tables: of TOML files, the more important one first.

    Pure. Raises ConfigError, with the option in `param`: a value that is none, or a name that is unknown (with the nearest one).
    """
    by_name = {f.name: f for f in flags()}
    for name in given:
        if name not in by_name:
            raise ConfigError(f"there is no option {name!r}.{nearest(name, list(by_name))}", param=name)
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = dict.fromkeys(by_name, "default")
    layers: list[tuple[Origin, Mapping[str, Any]]] = [("file", t) for t in map(_of_table, reversed(tables))]
    layers += [("environment", dict(_of_environment(environment))), ("flag", given)]
    for origin, layer in layers:
        for name, value in layer.items():
            values[name], origins[name] = _value(by_name[name], value), origin
    _settle_pool(values, origins)
    server = ServerConfig(**{n: v for n, v in values.items() if by_name[n].owner == "server"})
    engine = make_config(**{n: v for n, v in values.items() if by_name[n].owner == "engine" and v is not None})
    return Loaded(server, engine, origins)


def _settle_pool(values: dict[str, Any], origins: dict[str, Origin]) -> None:
    """Two names for the pool's size: one that was said in a more important place replaces the other."""
    rank = ("default", "file", "environment", "flag")
    a, b = "kv_memory", "kv_tokens"
    if values.get(a) is not None and values.get(b) is not None and origins[a] != origins[b]:
        weaker = min((a, b), key=lambda name: rank.index(origins[name]))
        del values[weaker]
        origins[weaker] = "default"


def _of_table(table: Mapping[str, Any]) -> dict[str, Any]:
    names = {f.toml for f in flags()}
    found = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name not in names:
            raise ConfigError(f"the configuration file has no option {key!r}.{nearest(name, sorted(names))}", param=key)
        found[name] = value
    return found


def _of_environment(environment: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    for f in flags():
        if f.env in environment:
            text = environment[f.env]
            yield f.name, [t for t in text.split(",") if t] if f.many else text


def _value(f: Flag, value: Any) -> Any:
    if f.many:
        items = value if isinstance(value, (list, tuple)) else [value]
        return tuple(_one(f, item) for item in items)
    return _one(f, value)


def _one(f: Flag, value: Any) -> Any:
    value = OTHER_WORDS.get((f.name, value), value) if isinstance(value, str) else value
    if f.is_switch:
        return _switch(f, value)
    if f.name == "kv_memory":
        return _memory(value)
    if f.hint in (int, float) and isinstance(value, str):
        try:
            value = f.hint(value)
        except ValueError:
            raise _bad(f, value) from None
    kinds: tuple[type, ...] = (int, float) if f.hint is float else (f.hint,)
    if isinstance(value, bool) or not isinstance(value, kinds) or (f.choices and value not in f.choices):
        raise _bad(f, value)
    number: Any = value
    if (f.low is not None and not number >= f.low) or (f.high is not None and not number <= f.high):
        raise _bad(f, value)
    return f.hint(value)


def _switch(f: Flag, value: Any) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    raise _bad(f, value)


def _memory(value: Any) -> Any:
    if isinstance(value, str):
        for number in (int, float):
            try:
                return number(value)
            except ValueError:
                continue
    return value


def _bad(f: Flag, value: Any) -> ConfigError:
    shown = "what was given" if f.secret else repr(value)
    if f.choices:
        expected = f"one of {', '.join(map(str, f.choices))}"
    elif f.is_switch:
        expected = "true or false"
    elif f.low is not None:
        expected = f"{'an integer' if f.hint is int else 'a number'} from {f.low:g} to {f.high:g}"
    else:
        expected = {int: "an integer", float: "a number", str: "text"}[f.hint]
    return ConfigError(f"{f.flag} is {shown}; expected {expected}.", param=f.name)


def redacted(server: ServerConfig, engine: EngineConfig) -> dict[str, Any]:
    """Every option with its value, secrets as "set" or null (C-OPS-06). A model's path shows its last part only."""
    shown: dict[str, Any] = {}
    for f in flags():
        value = getattr(engine if f.owner == "engine" else server, f.name)
        if f.secret:
            value = "set" if value else None
        elif f.name in ("model", "chat_template", "api_key_file", "ready_file") and isinstance(value, str):
            value = value.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]
        shown[f.name] = list(value) if isinstance(value, tuple) else value
    return shown
