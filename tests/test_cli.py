"""The command `phloem`: flags, streams, exit statuses, and that --help is quick. Real runs use the embedded model."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import phloem
from phloem.cli import app
from phloem.cli.flags import ENGINE_HELP, SAMPLING_HELP
from phloem.runtime.config import EngineConfig
from phloem.runtime.request import SamplingParams

SMALL = ["--kv-tokens", "2048", "-q"]
GREEDY = [*SMALL, "--temperature", "0", "--max-tokens", "12"]
PROMPT = "Once upon a time"


@pytest.fixture(autouse=True)
def shared_engine(engine: phloem.Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Commands run in this process use the suite's engine: loading it for each would cost a second a test."""
    import contextlib

    from phloem.cli import bench, chat, generate

    @contextlib.contextmanager
    def open_engine(options: dict[str, Any], quiet: bool) -> Iterator[phloem.Engine]:
        opened.append(options)
        yield engine

    opened.clear()
    for module in (bench, chat, generate):
        monkeypatch.setattr(module, "open_engine", open_engine)
    yield
    engine.check()
    assert engine.stats().running == 0


opened: list[dict[str, Any]] = []


def call(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The real thing, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "phloem.cli", *arguments], capture_output=True, text=True, timeout=60, **options
    )


# ---- help and flags -----------------------------------------------------------------------------------------------------


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        done = command("--help")
        times.append(time.perf_counter() - start)
    assert done.returncode == 0 and all(name in done.stdout for name in ("generate", "chat", "doctor", "bench"))
    assert min(times) < 0.5
    code = "import sys, phloem.cli; print(*sys.modules)"
    modules = set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())
    assert not modules & {"torch", "transformers", "numpy", "tokenizers", "phloem.runtime.engine.sync"}


@pytest.mark.parametrize("name", ["generate", "chat", "bench", "doctor"])
def test_every_engine_field_is_a_flag_of_every_command(name: str) -> None:
    text = call(name, "--help").output
    fields = [f.name for f in dataclasses.fields(EngineConfig)]
    assert set(fields) == set(ENGINE_HELP)
    for field in fields:
        assert f"--{field.replace('_', '-')} " in text


@pytest.mark.parametrize("name", ["generate", "chat"])
def test_every_sampling_field_is_a_flag(name: str) -> None:
    text = call(name, "--help").output
    assert set(SamplingParams.__struct_fields__) <= {*SAMPLING_HELP, "seed"}
    for field in SamplingParams.__struct_fields__:
        assert f"--{field.replace('_', '-')} " in text


def test_flags_reach_the_records_with_their_types(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[SamplingParams] = []
    original = phloem.Engine.generate
    monkeypatch.setattr(
        phloem.Engine, "generate", lambda self, prompts, s, **o: given.append(s) or original(self, prompts, s, **o)
    )  # type: ignore[func-returns-value,call-overload]
    done = call(
        "generate", PROMPT, "--max-tokens", "3", "--temperature", "0.5", "--top-k", "5", "--top-p", "0.9", "--min-p", "0.01", "--seed", "7",
        "--stop", "xyz", "--stop", "abc", "--stop-token-ids", "5", "--logit-bias", "9=-100", "--logit-bias", "10=1.5", "--keep-stop", "--ignore-eos",
        "--no-skip-special-tokens", "--kv-memory", "0.25", "--page-size", "8", "--no-overlap", "--cache-mode", "on", "--threads", "1",
        "--format", "json", "--logprobs-mode", "both", "--top-logprobs", "2", "--prompt-logprobs", "1", "--repetition-penalty", "1.1",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert given == [
        SamplingParams(
            max_tokens=3, temperature=0.5, top_k=5, top_p=0.9, min_p=0.01, seed=7, stop=("xyz", "abc"), stop_token_ids=(5,),
            logit_bias={9: -100.0, 10: 1.5}, keep_stop=True, ignore_eos=True, skip_special_tokens=False, logprobs="both", top_logprobs=2,
            prompt_logprobs=1, repetition_penalty=1.1,
        )
    ]  # fmt: skip
    assert opened == [{"kv_memory": 0.25, "page_size": 8, "overlap": False, "cache_mode": "on", "threads": 1, "seed": 7}]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--temperature", "nan"], "temperature is nan"),
        (["--max-tokens", "-5"], "max_tokens is -5"),
        (["--page-size", "3"], "page_size is 3"),
        (["--dtype", "f64"], "dtype is 'f64'"),
        (["--kv-memory", "much"], "kv_memory is 'much'"),
        (["--kv-tokens", "5", "--kv-memory", "1GiB"], "kv_memory and kv_tokens"),
        (["--logit-bias", "five"], "ID=VALUE"),
        (["--format", "xml"], "--format is 'xml'"),
        (["--stream", "--format", "json"], "--stream with --format json"),
        (["--stream", "--n", "2"], "--stream writes one output"),
        (["--n", "0"], "n is 0"),
        (["--timeout", "-1"], "timeout is -1"),
        (["--top-logprobs", "3"], "top_logprobs needs logprobs"),
        (["--allowed-token-ids", "99999"], "allowed_token_ids names id 99999"),
        (["--file", "x", "--lines"], "both a PROMPT and --file"),
        (["--regex", "a", "--choices", "b"], "regex and choices were given"),
        (["--json-schema", "/nothing/here"], "--json-schema: /nothing/here cannot be read"),
        (["--grammar", "/nothing/here"], "--grammar: /nothing/here cannot be read"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(arguments: list[str], says: str) -> None:
    done = call("generate", PROMPT, *arguments)
    assert done.exit_code == 2
    assert done.stdout == "" and says in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--nope"], ["--max-tokens", "many"], ["one", "two"]])
def test_what_the_parser_refuses_is_status_2_too(arguments: list[str]) -> None:
    done = call("generate", *arguments)
    assert done.exit_code == 2 and done.stdout == "" and "Traceback" not in done.stderr


def test_other_errors_are_one_line_and_status_1(tmp_path: Path) -> None:
    done = call("generate", "--file", str(tmp_path / "nothing.txt"))
    assert done.exit_code == 1 and "nothing.txt" in done.stderr and done.stderr.count("\n") == 1
    long = call("generate", "x" * 200_000)
    assert long.exit_code == 1 and "context" in long.stderr and long.stderr.count("\n") == 1
    assert "Traceback" in call("generate", "x" * 200_000, "--debug").stderr


# ---- generate -----------------------------------------------------------------------------------------------------------


def test_stdout_gets_the_text_and_nothing_else(engine: phloem.Engine) -> None:
    text = engine.generate(PROMPT, {"temperature": 0, "max_tokens": 12}).text
    for done in (
        call("generate", PROMPT, *GREEDY),
        call("generate", *GREEDY, stdin=PROMPT + "\n"),
        call("generate", "-", *GREEDY, stdin=PROMPT),
    ):
        assert done.exit_code == 0 and done.stdout == text + "\n" and done.stderr == ""


def test_constraints_reach_the_output(engine: phloem.Engine, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(
        '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": false}'
    )
    done = call("generate", PROMPT, *GREEDY, "--json-schema", str(schema))
    assert done.exit_code == 0 and json.loads(done.stdout)["a"] in (True, False)
    assert call("generate", PROMPT, *GREEDY, "--regex", "[0-9]{3}").stdout.strip().isdigit()
    assert call("generate", PROMPT, *GREEDY, "--choices", "yes", "--choices", "no").stdout in ("yes\n", "no\n")
    ebnf = tmp_path / "answer.ebnf"
    ebnf.write_text('root ::= "it is " ("so" | "not")')
    assert call("generate", PROMPT, *GREEDY, "--grammar", str(ebnf)).stdout in ("it is so\n", "it is not\n")
    streamed = call("generate", PROMPT, *GREEDY, "--stream", "--choices", "yes", "--choices", "no")
    assert streamed.stdout in ("yes\n", "no\n")
    bad = call("generate", PROMPT, *GREEDY, "--regex", "(?=a)b")
    assert bad.exit_code != 0 and "look-ahead" in bad.stderr and bad.stderr.count("\n") == 1


def test_a_prompt_from_a_file(engine: phloem.Engine, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Zwölf Bären 🐻\n", encoding="utf-8")
    done = call("generate", "--file", str(file), *GREEDY)
    assert done.stdout == engine.generate("Zwölf Bären 🐻", {"temperature": 0, "max_tokens": 12}).text + "\n"
    file.write_bytes(b"\xff\xfe")
    assert call("generate", "--file", str(file), *GREEDY).exit_code == 1


def test_json_is_the_output_record(engine: phloem.Engine) -> None:
    output = engine.generate(
        PROMPT, {"temperature": 0, "max_tokens": 12, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 0}
    )
    done = call("generate", PROMPT, *GREEDY, "--format", "json", "--logprobs", "--top-logprobs", "2", "--prompt-logprobs", "0")
    data = json.loads(done.stdout)
    assert data["text"] == output.text and data["token_ids"] == output.token_ids and data["finish_reason"] == "length"
    assert output.logprobs is not None and output.prompt_logprobs is not None
    assert [entry["logprob"] for entry in data["logprobs"]] == [entry.logprob for entry in output.logprobs]
    assert data["prompt_logprobs"][0] is None and len(data["prompt_logprobs"]) == len(output.prompt_logprobs)
    assert data["usage"]["prompt_tokens"] == 4 and "error" not in data


def test_a_line_ends_at_a_newline_and_nowhere_else() -> None:
    done = call("generate", "--lines", *GREEDY, "--format", "jsonl", stdin="one\u2028two\x0cthree\n\n \nfour\n")
    assert done.exit_code == 0 and len(done.stdout.splitlines()) == 2


def test_logprobs_beside_text_go_to_stderr(engine: phloem.Engine) -> None:
    output = engine.generate(PROMPT, {"temperature": 0, "max_tokens": 12, "logprobs": True})
    for extra in ([], ["--stream"]):
        done = call("generate", PROMPT, *GREEDY, "--logprobs", *extra)
        assert done.exit_code == 0 and done.stdout == output.text + "\n"
        spelled = [engine.tokenizer.decode([entry.token_id]) for entry in output.logprobs or ()]
        expected = [f"{entry.logprob:.4f}  {text!r}" for entry, text in zip(output.logprobs or (), spelled)]
        assert done.stderr.splitlines() == expected and len(expected) == 12


def test_several_samples_and_several_prompts(engine: phloem.Engine) -> None:
    many = call("generate", PROMPT, "--max-tokens", "6", "--seed", "3", "--n", "3", "--format", "jsonl")
    lines = [json.loads(line) for line in many.stdout.splitlines()]
    assert [(line["prompt"], line["sample"]) for line in lines] == [(0, 0), (0, 1), (0, 2)]
    assert [line["text"] for line in lines] == [o.text for o in engine.generate(PROMPT, {"max_tokens": 6, "seed": 3}, n=3)]
    batch = call("generate", "--lines", *GREEDY, "--format", "jsonl", stdin="One,\n\nTwo,\nThree,\n")
    texts = [json.loads(line)["text"] for line in batch.stdout.splitlines()]
    assert texts == [o.text for o in engine.generate(["One,", "Two,", "Three,"], {"temperature": 0, "max_tokens": 12})]
    nested = json.loads(call("generate", "--lines", *GREEDY, "--n", "2", "--format", "json", stdin="One,\nTwo,").stdout)
    assert [[o["text"] for o in group] for group in nested] == [[texts[0]] * 2, [texts[1]] * 2]
    assert call("generate", "--lines", stdin="\n\n").exit_code == 2


def test_a_stream_writes_the_same_bytes(engine: phloem.Engine) -> None:
    whole = call("generate", PROMPT, *GREEDY).stdout
    assert call("generate", PROMPT, *GREEDY, "--stream").stdout == whole
    deltas = [
        json.loads(line) for line in call("generate", PROMPT, *GREEDY, "--stream", "--format", "jsonl").stdout.splitlines()
    ]
    assert "".join(d["text"] for d in deltas) + "\n" == whole and len(deltas) > 5
    assert deltas[-1]["finish_reason"] == "length"


def test_chat_prompts_go_through_the_template(engine: phloem.Engine) -> None:
    expected = engine.chat([{"role": "user", "content": "Say hi."}], {"temperature": 0, "max_tokens": 12}).text
    assert call("generate", "Say hi.", "--chat", *GREEDY).stdout == expected + "\n"
    assert call("generate", "Say hi.", "--chat", "--stream", *GREEDY).stdout == expected + "\n"


# ---- chat, bench, doctor ------------------------------------------------------------------------------------------------


def test_a_conversation_keeps_its_history_and_the_tree_reuses_it(engine: phloem.Engine) -> None:
    engine.flush()
    done = call("chat", "--temperature", "0", "--max-tokens", "16", stdin="My name is Ida.\n\nWhat is my name?\n")
    assert done.exit_code == 0, done.stderr
    messages: list[dict[str, Any]] = [{"role": "user", "content": "My name is Ida."}]
    answers = []
    for question in ("What is my name?", None):
        answers.append(engine.chat(messages, {"temperature": 0, "max_tokens": 16}).text)
        messages += [{"role": "assistant", "content": answers[-1]}, {"role": "user", "content": question or ""}]
    assert done.stdout == "".join(a + "\n" for a in answers)
    first, second = done.stderr.splitlines()
    assert "tok/s" in first and " 0/" in first
    cached, prompt = (int(x) for x in second.split("· ")[-1].split()[0].split("/"))
    assert prompt - cached < 20 < cached, "only the new turn was computed"


def test_a_turn_that_does_not_fit_is_refused_and_forgotten() -> None:
    done = call("chat", "--temperature", "0", "--max-tokens", "4", "-q", stdin="x " * 9000 + "\nHello\n")
    assert done.exit_code == 0
    assert "This turn was not kept" in done.stderr and done.stdout.count("\n") == 1


def test_a_system_message_opens_the_conversation(engine: phloem.Engine) -> None:
    done = call("chat", "--system", "Answer in French.", "--temperature", "0", "--max-tokens", "8", "-q", stdin="Hello\n")
    messages = [{"role": "system", "content": "Answer in French."}, {"role": "user", "content": "Hello"}]
    assert done.stdout == engine.chat(messages, {"temperature": 0, "max_tokens": 8}).text + "\n"


def test_bench_gives_one_json_line() -> None:
    done = call("bench", "--prompts", "2", "--prompt-tokens", "16", "--output-tokens", "4", "--rounds", "1", "--format", "json")
    (line,) = done.stdout.splitlines()
    data = json.loads(line)
    assert data["prefill_tok_s"] > 0 and data["decode_tok_s"] > 0 and data["device"] == "cpu"
    assert "decode" in call("bench", "--prompts", "1", "--prompt-tokens", "8", "--output-tokens", "2", "--rounds", "1").stdout
    assert call("bench", "--format", "xml").exit_code == 2


def test_doctor_finds_everything_here() -> None:
    done = call("doctor", "--kv-tokens", "1024")
    assert done.exit_code == 0, done.output
    for word in ("torch", "an engine gets", "SmolLM2", "kv_tokens=1024 -> 64 pages", "An engine would start."):
        assert word in done.stdout
    assert "!!" not in done.stdout


def test_doctor_refuses_pages_that_the_gpu_could_not_read() -> None:
    from tests.fake_device import pretend

    with pretend():
        refused = call("doctor", "--device", "cuda", "--kv-dtype", "f16", "--kv-tokens", "1024")
        fine = call("doctor", "--device", "cuda", "--kv-dtype", "fp8", "--kv-tokens", "1024")
    assert (
        refused.exit_code == 1 and "this model computes in bf16 on the GPU; expected 'auto', 'bf16' or 'fp8'" in refused.stderr
    )
    assert fine.exit_code == 0 and "device: cuda" in fine.stdout


def test_doctor_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = call("doctor", "--model", "/no/such/model")
    assert missing.exit_code == 1 and "!!" in missing.stdout and "/no/such/model" in missing.stderr
    assert "ok  library" in missing.stdout, "one problem does not hide the other checks"
    from phloem.cli import doctor

    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "gguf" else "1.0")
    absent = call("doctor")
    assert absent.exit_code == 1 and "gguf is missing: pip install gguf" in absent.stderr
    assert call("doctor", "--device", "cuda").exit_code == 1


# ---- as a process -------------------------------------------------------------------------------------------------------


def test_the_command_end_to_end(engine: phloem.Engine) -> None:
    done = command("generate", PROMPT, "--kv-tokens", "256", "--temperature", "0", "--max-tokens", "12")
    assert done.returncode == 0
    assert done.stdout == engine.generate(PROMPT, {"temperature": 0, "max_tokens": 12}).text + "\n"
    (line,) = done.stderr.splitlines()
    assert line.startswith("phloem: loaded in ")


@pytest.mark.parametrize(
    ("redirection", "status", "says"),
    [
        (">&-", 1, "stdout is closed"),
        (">/dev/full", 1, "No space left"),
        ("2>&-", 0, ""),
    ],
)
def test_streams_that_take_nothing(redirection: str, status: int, says: str) -> None:
    line = f"{shlex.quote(sys.executable)} -m phloem.cli generate hi --kv-tokens 64 --max-tokens 1 {redirection}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60)
    assert done.returncode == status and says in done.stderr and "Traceback" not in done.stderr
    assert "phloem:" not in done.stdout, "what is said about the output is not among it"


def test_text_that_the_locale_cannot_spell_is_one_line() -> None:
    done = command(
        "generate", "hi", "-q", "--kv-tokens", "64", "--max-tokens", "1", "--stop", "zzz", "--regex", "é", env={**os.environ, "PYTHONIOENCODING": "ascii"}
    )  # fmt: skip
    assert done.returncode == 1 and "'ascii' codec can't encode" in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_reader_that_goes_away_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "phloem.cli", "generate", PROMPT, "--kv-tokens", "1024", "-q", "--stream", "--max-tokens", "500", "--ignore-eos"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(4)
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(30) == 141 and errors == ""


def test_ctrl_c_ends_a_command_quietly() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "phloem.cli", "generate", PROMPT, "--kv-tokens", "8192", "-q", "--stream", "--max-tokens", "8000", "--ignore-eos"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.read(4)
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in errors
    assert time.monotonic() - start < 10


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_ctrl_c_ends_an_answer_and_ctrl_d_the_conversation() -> None:
    master, terminal = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "phloem.cli", "chat", "--kv-tokens", "8192", "--max-tokens", "7000", "--ignore-eos", "--temperature", "0"],
        stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
    )  # fmt: skip
    os.close(terminal)
    seen = bytearray()

    def read_until(done: Callable[[bytes], bool]) -> None:
        """Reads the terminal until what came since the call satisfies `done`; b"" stands for its end."""
        start, deadline = len(seen), time.monotonic() + 30
        while not done(bytes(seen[start:])):
            ready, _, _ = select.select([master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"nothing more came after {bytes(seen[-500:])!r}"
            try:
                seen.extend(os.read(master, 4096))
            except OSError:  # the other end is closed: the command has ended
                return

    try:
        read_until(lambda new: new.endswith(b"> "))
        os.write(master, b"Tell me a long story.\n")
        read_until(lambda new: len(new) > 300)
        process.send_signal(signal.SIGINT)
        read_until(lambda new: b"tok/s" in new and new.endswith(b"> "))
        os.write(master, b"\x04")
        read_until(lambda new: False)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)
    assert b"Traceback" not in seen
