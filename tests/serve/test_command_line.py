"""server §12: flags, their aliases, environment and files; what is refused, and with which words (C1–C3)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from phloem.cli import app
from phloem.cli.serve import parse, read_options, usage
from phloem.runtime.errors import ConfigError
from phloem.runtime.serve.config import ACCEPTED, flags


def test_flag_over_environment_over_file_over_home_over_default(tmp_path: Path) -> None:
    """server.C1."""
    home = tmp_path / "home"
    (home / "phloem").mkdir(parents=True)
    (home / "phloem" / "config.toml").write_text(
        'max_running = 2\npage_size = 32\nport = 2\nmax_queue = 2\nhost = "127.0.0.2"\n'
    )
    file = tmp_path / "x.toml"
    file.write_text("max-running = 3\nport = 3\nmax_queue = 3\n")
    environment = {"XDG_CONFIG_HOME": str(home), "PHLOEM_MAX_RUNNING": "4", "PHLOEM_PORT": "4"}
    loaded, _ = read_options(["--config", str(file), "--max-running", "5"], environment)
    assert loaded.engine.max_running == 5 and loaded.origins["max_running"] == "flag"
    assert loaded.server.port == 4 and loaded.origins["port"] == "environment"
    assert loaded.server.max_queue == 3 and loaded.origins["max_queue"] == "file"
    assert loaded.server.host == "127.0.0.2" and loaded.engine.page_size == 32
    assert loaded.server.shutdown_timeout == 30.0 and loaded.origins["shutdown_timeout"] == "default"
    assert read_options([], {"XDG_CONFIG_HOME": str(home), "PHLOEM_CONFIG": str(file)})[0].server.port == 3


@pytest.mark.parametrize(
    "words, why",
    [
        (["--max-runing", "3"], "Did you mean --max-running"),
        (["--max-num-seq", "3"], "Did you mean --max-num-seqs"),
        (["--port"], "--port needs a value"),
        (["--port", "--host"], "--port needs a value"),
        (["--port", "http"], "--port is 'http'"),
        (["--port", "70000"], "from 0 to 65535"),
        (["--policy", "fair"], "one of prefix, fcfs, priority"),
        (["a", "b"], "both 'a' and 'b' name a model"),
        (["--port", "1", "--port", "2"], "given twice"),
        (["--no-strict-params=yes"], "takes no value"),
        (["--config", "/nowhere.toml"], "cannot be read"),
        (["--kv-tokens", "0"], "kv_tokens"),
    ],
)
def test_wrong_usage_is_exit_2_with_one_line(words: list[str], why: str) -> None:
    """server.C1."""
    found = CliRunner().invoke(app, ["serve", *words], env={"XDG_CONFIG_HOME": "/nowhere"})
    assert found.exit_code == 2
    assert why in found.output and found.output.count("\n") == 1


def test_an_unknown_key_of_a_file_names_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text("max_quue = 3\n")
    with pytest.raises(ConfigError, match="max_queue"):
        read_options(["--config", str(file)], {})
    file.write_text("max_queue = \n")
    with pytest.raises(ConfigError, match="no TOML"):
        read_options(["--config", str(file)], {})


def test_names_of_other_engines_are_understood_and_said() -> None:
    """server.C2."""
    words = ["--model-path", "m.gguf", "--max-model-len=512", "--max-num-seqs", "7", "--mem-fraction-static", "0.5", "--schedule-policy", "lpm",
             "--disable-radix-cache", "--chunked-prefill-size", "64", "--tool-call-parser", "hermes"]  # fmt: skip
    loaded, notes = read_options(words, {})
    engine = loaded.engine
    assert (engine.model, engine.max_context, engine.max_running, engine.kv_memory) == ("m.gguf", 512, 7, 0.5)
    assert (engine.policy, engine.cache_mode, engine.max_step_tokens, loaded.server.tool_parser) == (
        "prefix",
        "off",
        64,
        "hermes",
    )
    assert len(notes) == 8 and "--max-model-len is --max-context here." in notes


def test_what_is_always_on_is_accepted_and_said() -> None:
    """server.C2."""
    parsed = parse([*ACCEPTED, "m.gguf"])
    assert parsed.given == {"model": "m.gguf"}
    assert len(parsed.notes) == len(ACCEPTED) and all("not needed" in note for note in parsed.notes)


def test_forms_of_a_flag() -> None:
    for words in (["--port", "7"], ["--port=7"]):
        assert read_options(words, {})[0].server.port == 7
    assert read_options(["--strict-params"], {})[0].server.strict_params is True
    assert read_options(["--strict-params", "--no-log-prompts"], {})[0].server.log_prompts is False
    assert read_options(["--strict-params=false"], {})[0].server.strict_params is False
    assert read_options(["--api-key", "a", "--api-key", "b"], {})[0].server.api_key == ("a", "b")
    assert read_options(["--seed", "-3"], {})[0].engine.seed == -3
    assert read_options(["--", "--odd-name"], {})[0].engine.model == "--odd-name"
    assert read_options(["org/name"], {})[0].engine.model == "org/name"


def test_the_help_has_every_flag_and_every_alias() -> None:
    text = usage()
    for flag in flags():
        assert f"  {flag.flag}" in text
        assert all(alias in text for alias in flag.aliases), flag.aliases
    assert all(len(line) <= 125 for line in text.splitlines())


def test_help_imports_nothing_heavy() -> None:
    """server.C3."""
    code = (
        "import sys\nfrom phloem.cli import main\nsys.argv = ['phloem', 'serve', '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'torch', 'fastapi', 'pydantic', 'numpy', 'uvicorn', 'zmq', 'tokenizers'} & set(sys.modules)\nassert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_version_and_module() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "phloem", "--version"], capture_output=True, text=True, check=True, timeout=120
    )
    assert found.stdout.startswith("phloem ")
