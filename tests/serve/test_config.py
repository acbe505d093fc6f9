"""Options as data: names, where values come from, and what is told of them (C1, C2)."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from phloem.runtime.config import EngineConfig
from phloem.runtime.errors import ConfigError
from phloem.runtime.serve.config import ACCEPTED, ENGINE_OPTIONS, ServerConfig, find_flag, flags, load, redacted


def test_every_option_of_both_records_is_a_flag() -> None:
    fields = [f.name for f in dataclasses.fields(EngineConfig)] + [f.name for f in dataclasses.fields(ServerConfig)]
    assert sorted(f.name for f in flags()) == sorted(fields)
    assert set(ENGINE_OPTIONS) == {f.name for f in dataclasses.fields(EngineConfig)}
    for f in flags():
        assert (
            f.help.endswith((".", ")"))
            and f.group
            and f.env == f"PHLOEM_{f.name.upper()}"
            and f.flag == "--" + f.name.replace("_", "-")
        )


def test_no_spelling_means_two_things() -> None:
    spellings = [s for f in flags() for s in (f.flag, *f.aliases, *([f.off] if f.is_switch else []))] + list(ACCEPTED)
    assert len(spellings) == len(set(spellings))


def test_c1_a_flag_beats_the_environment_beats_the_file_beats_the_default() -> None:
    tables: list[dict[str, Any]] = [
        {"max-queue": 3, "port": 3, "host": "a"},
        {"max_queue": 4, "host": "b", "log_format": "json"},
    ]
    loaded = load({"max_queue": 1}, {"PHLOEM_MAX_QUEUE": "2", "PHLOEM_PORT": "2", "OTHER": "x"}, *tables)
    s, o = loaded.server, loaded.origins
    assert (s.max_queue, s.port, s.host, s.log_format, s.sse_ping) == (1, 2, "a", "json", 0.0)
    assert (o["max_queue"], o["port"], o["host"], o["log_format"], o["sse_ping"]) == (
        "flag",
        "environment",
        "file",
        "file",
        "default",
    )


@pytest.mark.parametrize(
    ("given", "environment", "table", "word"),
    [
        ({"prot": 1}, {}, {}, "port"), ({}, {}, {"max-queu": 1}, "max_queue"), ({"port": 70_000}, {}, {}, "--port"), ({"port": "x"}, {}, {}, "--port"),
        ({"port": True}, {}, {}, "--port"), ({}, {"PHLOEM_LOG_FORMAT": "xml"}, {}, "text, json"), ({"strict_params": "perhaps"}, {}, {}, "true or false"),
        ({"page_size": 3}, {}, {}, "page_size"), ({"kv_memory": "x"}, {}, {}, "kv_memory"), ({"host": 5}, {}, {}, "--host"), ({"sse_ping": "nan"}, {}, {}, "--sse-ping"),
    ],
)  # fmt: skip
def test_c1_what_is_wrong_is_named(
    given: dict[str, Any], environment: dict[str, str], table: dict[str, Any], word: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(given, environment, table)
    assert word in str(caught.value)


def test_a_secret_is_never_quoted() -> None:
    with pytest.raises(ConfigError) as caught:
        load({"admin_key": 12345678})
    assert "12345678" not in str(caught.value)


@pytest.mark.parametrize(
    ("flag", "name", "value"),
    [("--max-model-len", "max_context", None), ("--context-length", "max_context", None), ("--gpu-memory-utilization", "kv_memory", None), ("--max-num-seqs", "max_running", None),
     ("--disable-radix-cache", "cache_mode", "off"), ("--generation-config", "sampling_defaults", None), ("--strict-params", "strict_params", True),
     ("--no-strict-params", "strict_params", False), ("--tool-call-parser", "tool_parser", None), ("--model-path", "model", None)],
)  # fmt: skip
def test_c2_other_engines_names(flag: str, name: str, value: Any) -> None:
    found = find_flag(flag)
    assert found is not None and (found[0].name, found[1]) == (name, value)


def test_c2_other_engines_words() -> None:
    loaded = load({"policy": "lpm", "dtype": "bfloat16", "sampling_defaults": "vllm", "cache_mode": "off"})
    assert (loaded.engine.policy, loaded.engine.dtype, loaded.server.sampling_defaults, loaded.engine.cache_mode) == (
        "prefix",
        "bf16",
        "none",
        "off",
    )
    assert find_flag("--nonsense") is None


def test_lists_and_numbers_from_text() -> None:
    loaded = load(
        {"served_model_name": ["a", "b"]},
        {"PHLOEM_API_KEY": "k1,k2", "PHLOEM_KV_MEMORY": "0.25", "PHLOEM_STRICT_PARAMS": "yes"},
    )
    assert (loaded.server.served_model_name, loaded.server.api_key, loaded.engine.kv_memory, loaded.server.strict_params) == (
        ("a", "b"),
        ("k1", "k2"),
        0.25,
        True,
    )


def test_a_stronger_place_settles_how_the_pool_is_sized() -> None:
    loaded = load({"kv_tokens": 512}, {}, {"kv_memory": "1GiB"})
    assert (loaded.engine.kv_tokens, loaded.engine.kv_memory) == (512, None)
    with pytest.raises(ConfigError):
        load({"kv_tokens": 512, "kv_memory": "1GiB"})


@pytest.mark.case("C-OPS-06")
def test_what_is_shown_of_a_configuration_has_no_secret_and_no_path() -> None:
    loaded = load(
        {
            "api_key": ["secret-1"],
            "admin_key": "secret-2",
            "api_key_file": "/etc/secret-3/keys",
            "model": "/home/secret-4/model",
        }
    )
    shown = redacted(loaded.server, loaded.engine)
    assert "secret" not in repr(shown)
    assert (shown["api_key"], shown["admin_key"], shown["model"], shown["api_key_file"]) == ("set", "set", "model", "keys")
    assert redacted(ServerConfig(), EngineConfig())["admin_key"] is None


@pytest.mark.parametrize("module", ["phloem.runtime.serve.config", "phloem.runtime.serve.fields", "phloem.runtime.serve.app"])
def test_what_options_and_the_app_import(module: str) -> None:
    """C3: options without FastAPI; the whole app without torch, for its process has no weights."""
    code = f"import sys, {module}; print(*[m for m in ('torch', 'transformers', 'fastapi', 'pydantic') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "torch" not in found and "transformers" not in found
    assert module.endswith("app") or not found
