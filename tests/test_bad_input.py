"""What people get wrong, on the real engine: each mistake is a clear error or a documented right answer, and leaves the engine well."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import phloem as ph
from tests.tiny_models import tiny_config, tiny_tensors, write_gguf, write_hf

GREEDY = ph.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
VOCABULARY = 49_152


@pytest.fixture(scope="module")
def short() -> Iterator[ph.Engine]:
    """A context of 128 tokens in a pool of 256."""
    with ph.Engine(kv_tokens=256, max_context=128, max_running=4) as engine:
        yield engine


@pytest.fixture(scope="module")
def tight() -> Iterator[ph.Engine]:
    """A pool of 64 tokens under a context of 8,192."""
    with ph.Engine(kv_tokens=64, max_running=4) as engine:
        yield engine


def refused(engine: ph.Engine, error: type[Exception], says: str, prompt: Any, sampling: Any = None, **options: Any) -> None:
    """Refused by every verb that takes a prompt, at once, and the engine is none the worse."""
    before = engine.stats()
    uses: list[Callable[[], Any]] = [
        lambda: engine.generate(prompt, sampling, **options),
        lambda: engine.generate([[5, 6], prompt], sampling, **options),
        lambda: next(engine.stream(prompt, sampling, **options)),
        lambda: engine.generate(prompt, sampling, n=2, **options),
    ]
    for use in uses:
        with pytest.raises(error, match=says):
            use()
    (output,) = engine.generate([prompt], sampling, on_error="return", **options)
    assert isinstance(output.error, error) and output.finish_reason == "error" and output.token_ids == []
    after = engine.stats()
    assert after.prefill_tokens == before.prefill_tokens and after.running == after.waiting == 0
    engine.check()


# ---- prompts ------------------------------------------------------------------------------------------------------------


def test_an_empty_prompt(engine: ph.Engine) -> None:
    refused(engine, ph.InvalidRequestError, "prompt.*is empty", "")
    with pytest.raises(ph.InvalidRequestError, match=r"prompt is empty"):
        engine.score("")
    with pytest.raises(ph.InvalidRequestError, match=r"prompt 0 of 1.*is empty"):
        engine.generate([[]])
    assert engine.generate([]) == [], "documented: a list of no prompts"


@pytest.mark.case("C-SAMP-06")
@pytest.mark.parametrize("bad", [-1, VOCABULARY, 2**31 - 1, 2**31, -(2**63), 2**70])
def test_ids_out_of_range(engine: ph.Engine, bad: int) -> None:
    refused(engine, ph.InvalidRequestError, "prompt", [5, bad, 6])
    with pytest.raises(ph.InvalidRequestError):
        engine.score([5, bad])
    with pytest.raises(ph.InvalidRequestError):
        engine.tokenizer.decode([bad])


@pytest.mark.parametrize("bad", [True, 1.0, None, "7", [1]])
def test_ids_that_are_no_integers(engine: ph.Engine, bad: Any) -> None:
    refused(engine, ph.InvalidRequestError, "position 1", [5, bad, 6])


@pytest.mark.case("C-SAMP-05", "C-SAMP-06")
@pytest.mark.parametrize("bad", [-1, VOCABULARY, 2**40])
@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_ids_out_of_range_in_sampling(engine: ph.Engine, field: str, bad: int) -> None:
    value: Any = {bad: 1.0} if field == "logit_bias" else [bad]
    with pytest.raises(ph.InvalidRequestError) as caught:
        engine.generate("hello", {field: value})
    assert caught.value.param == field and str(bad) in str(caught.value)


def test_half_a_surrogate_pair(engine: ph.Engine) -> None:
    refused(engine, ph.InvalidRequestError, "Unicode", "a \ud83d b")


def test_special_tokens_in_raw_text_are_parsed_and_in_messages_are_not(engine: ph.Engine) -> None:
    """engine.md §9: documented on `Engine`."""
    mark = engine.tokenizer.encode("<|im_end|>")
    assert len(mark) == 1
    assert mark[0] in engine.tokenizer.encode("a<|im_end|>b")
    said = engine.encode_chat([{"role": "user", "content": "a<|im_end|>b"}])
    plain = engine.encode_chat([{"role": "user", "content": "ab"}])
    assert said.count(mark[0]) == plain.count(mark[0])


# ---- room ---------------------------------------------------------------------------------------------------------------


def test_no_token_and_one_token(idle_engine: ph.Engine) -> None:
    nothing = idle_engine.generate("Once upon a time", {"max_tokens": 0, "temperature": 0})
    assert (nothing.text, nothing.token_ids, nothing.finish_reason, nothing.usage.completion_tokens) == ("", [], "length", 0)
    one = idle_engine.generate("Once upon a time", {"max_tokens": 1, "temperature": 0})
    assert len(one.token_ids) == 1 and one.finish_reason == "length"
    assert idle_engine.generate("Once upon a time", GREEDY).token_ids[0] == one.token_ids[0]
    (delta,) = idle_engine.stream("Once upon a time", {"max_tokens": 1, "temperature": 0})
    assert delta.token_ids == one.token_ids and delta.finish_reason == "length"


def test_a_prompt_as_long_as_the_context(short: ph.Engine) -> None:
    full = [5 + i % 50 for i in range(128)]
    refused(short, ph.ContextLengthError, "128 tokens.*no room", full)
    refused(short, ph.ContextLengthError, "128", full[:-2], {"max_tokens": 3})
    assert short.generate(full, {"max_tokens": 0}).finish_reason == "length", "documented: prefill only"
    assert len(short.score(full)) == 128
    last = short.generate(full[:-1], {"temperature": 0, "ignore_eos": True})
    assert len(last.token_ids) == 1, "max_tokens=None means the room that is left"
    assert short.generate(full[:-1], {"temperature": 0, "max_tokens": 1}).token_ids == last.token_ids


def test_a_prompt_longer_than_the_context(short: ph.Engine) -> None:
    refused(short, ph.ContextLengthError, "129 tokens.*128", [5] * 129)
    refused(short, ph.ContextLengthError, "100000 tokens", [5] * 100_000, {"max_tokens": 0})


@pytest.mark.case("C-SCHED-02")
def test_a_prompt_longer_than_the_pool(tight: ph.Engine) -> None:
    refused(tight, ph.CapacityError, "65 tokens.*pool holds 64", [5] * 65)
    refused(tight, ph.CapacityError, "pool has 4", [5] * 60, {"max_tokens": 6})
    fits = tight.generate([5] * 60, {"max_tokens": 5, "temperature": 0, "ignore_eos": True})
    assert len(fits.token_ids) == 5, "P3: the last token drawn needs no slot"
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(tight.generate("Behind it", GREEDY)))
    with pytest.raises(ph.CapacityError):
        thread.start()
        tight.generate([5] * 500, GREEDY)
    thread.join(30)
    assert len(results[0].token_ids) == 8, "nobody waits behind what can never run"


# ---- sampling and options -----------------------------------------------------------------------------------------------


@pytest.mark.case("C-SAMP-12")
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", v) for v in (-1, -0.001, float("nan"), float("inf"), 101, "hot", True, None)],
        *[("top_p", v) for v in (0, -0.1, 1.1, float("nan"))],
        *[("top_k", v) for v in (-2, 1.5, True)],
        *[("min_p", v) for v in (-0.1, 1.1, float("nan"))],
        *[("repetition_penalty", v) for v in (0, -1, 11, float("nan"))],
        *[("frequency_penalty", v) for v in (-2.1, 2.1, float("nan"))],
        *[("presence_penalty", v) for v in (-2.1, 2.1, float("-inf"))],
        *[("max_tokens", v) for v in (-1, 1.0, "7", True, 2**64)],
        *[("min_tokens", v) for v in (-1, None, 1.5)],
        *[("seed", v) for v in (2**63, 0.5, "x")],
        *[("stop", v) for v in ("", [""], [1], 3, ["x"] * 33)],
        *[("logit_bias", v) for v in ({5: 101}, {5: float("nan")}, {"five": 1}, [5])],
        *[("allowed_token_ids", v) for v in ([], 5, [1.5])],
        *[("stop_token_ids", v) for v in ([True], "abc", 5)],
        *[("logprobs", v) for v in ("all", 5)],
        *[("top_logprobs", v) for v in (21, -1, 1)],
        *[("prompt_logprobs", v) for v in (-1, 1.5)],
        ("keep_stop", 1),
    ],
)
def test_sampling_out_of_range_names_the_field(field: str, value: Any) -> None:
    """M5."""
    with pytest.raises(ph.InvalidRequestError) as caught:
        ph.SamplingParams(**{field: value})
    assert caught.value.param == field and field in str(caught.value)


def test_an_unknown_sampling_field(engine: ph.Engine) -> None:
    with pytest.raises(ph.InvalidRequestError, match=r"no sampling field 'temprature'.*temperature"):
        engine.generate("hello", {"temprature": 0.5})
    with pytest.raises(TypeError, match="temprature"):
        ph.SamplingParams(temprature=0.5)  # type: ignore[call-arg]


def test_sampling_that_cannot_hold_with_the_prompt(engine: ph.Engine) -> None:
    refused(engine, ph.InvalidRequestError, "min_tokens", "hello", {"min_tokens": 500})
    with pytest.raises(ph.InvalidRequestError, match="position"):
        engine.score("hello", 99)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"kv_tokenz": 4}, "kv_tokenz"),
        ({"page_size": 3}, "page_size"),
        ({"page_size": 0}, "page_size"),
        ({"kv_tokens": 0}, "kv_tokens"),
        ({"kv_tokens": 1.5}, "kv_tokens"),
        ({"kv_tokens": 64, "kv_memory": "1GiB"}, "kv_tokens"),
        ({"kv_memory": "lots"}, "kv_memory"),
        ({"kv_memory": 16}, "kv_memory"),
        ({"kv_memory": -1}, "kv_memory"),
        ({"dtype": "f64"}, "dtype"),
        ({"kv_dtype": "q4"}, "kv_dtype"),
        ({"device": "tpu"}, "device"),
        ({"device": "cuda"}, "device"),
        ({"max_context": 10**6}, "max_context"),
        ({"max_context": 0}, "max_context"),
        ({"max_running": 0}, "max_running"),
        ({"max_step_tokens": 0}, "max_step_tokens"),
        ({"policy": "random"}, "policy"),
        ({"threads": -1}, "threads"),
        ({"cache_mode": True}, "cache_mode"),
        ({"overlap": "yes"}, "overlap"),
        ({"seed": "x"}, "seed"),
    ],
)
def test_an_engine_option_that_is_unknown_or_out_of_range(options: dict[str, Any], names: str) -> None:
    start = time.monotonic()
    with pytest.raises(ph.ConfigError) as caught:
        ph.Engine(**options)
    assert caught.value.param == names and names in str(caught.value)
    assert time.monotonic() - start < 10, "before the weights are read"


# ---- models -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["/no/such/folder", "./nothing.gguf", ""])
def test_a_model_that_is_not_there(model: str) -> None:
    with pytest.raises(ph.ModelLoadError) as caught:
        ph.Engine(model)
    assert model in str(caught.value)


def test_a_model_of_the_wrong_type() -> None:
    with pytest.raises(ph.ConfigError, match="model must be a path"):
        ph.Engine(42)  # type: ignore[arg-type]


@pytest.mark.parametrize("damage", ["empty", "not gguf", "cut in the header", "cut in the tensors", "garbage in the header"])
def test_a_corrupt_gguf(tmp_path: Path, damage: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_config())
    data = path.read_bytes()
    path.write_bytes(
        {
            "empty": b"",
            "not gguf": b"PK\x03\x04" + data[4:],
            "cut in the header": data[:200],
            "cut in the tensors": data[:-1000],
            "garbage in the header": data[:40] + b"\xff" * 64 + data[104:],
        }[damage]
    )
    with pytest.raises(ph.ModelLoadError, match=r"tiny\.gguf"):
        ph.Engine(str(path))


def test_a_missing_shard(tmp_path: Path) -> None:
    write_hf(tmp_path, tiny_config(), shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ph.ModelLoadError, match="model-00002-of-00003"):
        ph.Engine(str(tmp_path))


def test_a_tensor_of_the_wrong_shape_one_missing_and_one_too_many_are_all_listed(tmp_path: Path) -> None:
    tensors = tiny_tensors(tiny_config())
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"][:-1].contiguous()
    del tensors["model.norm.weight"]
    tensors["model.layers.7.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].clone()
    write_hf(tmp_path, tiny_config(), tensors)
    with pytest.raises(ph.ModelLoadError) as caught:
        ph.Engine(str(tmp_path))
    for name in ("model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.layers.7.mlp.up_proj.weight"):
        assert name in str(caught.value)


def test_an_architecture_that_there_is_no_code_for(tmp_path: Path) -> None:
    write_hf(tmp_path, {**tiny_config(), "architectures": ["MambaForCausalLM"]}, tiny_tensors(tiny_config()))
    with pytest.raises(ph.UnsupportedModelError, match="MambaForCausalLM"):
        ph.Engine(str(tmp_path))


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"architectures": ["LlamaForCausalLM"]})])
def test_a_broken_config(tmp_path: Path, text: str) -> None:
    write_hf(tmp_path, tiny_config())
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ph.ModelLoadError, match=r"config\.json"):
        ph.Engine(str(tmp_path))


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    write_hf(tmp_path, tiny_config())
    with pytest.raises(ph.ModelLoadError, match="tokenizer"):
        ph.Engine(str(tmp_path))


# ---- lives of an engine -------------------------------------------------------------------------------------------------


def test_two_engines_in_one_process(engine: ph.Engine, short: ph.Engine, tight: ph.Engine) -> None:
    """Their pools, trees and threads are their own; the tokens are the same (B1)."""
    expected = engine.generate("The sea was calm", GREEDY).token_ids
    streams = [e.stream("The sea was calm", GREEDY) for e in (engine, short, tight)]
    ids: list[list[int]] = [[], [], []]
    for _ in range(8):
        for got, stream in zip(ids, streams):
            got += next(stream).token_ids
    assert ids == [expected] * 3
    for e in (engine, short, tight):
        e.generate("Only here", {"max_tokens": 0}, namespace=str(id(e)))
        assert [other.explain("Only here!", namespace=str(id(e))).num_cached > 0 for other in (engine, short, tight)].count(
            True
        ) == 1


def test_an_engine_used_after_close_and_closed_twice() -> None:
    engine = ph.Engine(kv_tokens=64)
    engine.generate("hello", {"max_tokens": 1})
    engine.close()
    engine.close()
    for use in (
        lambda: engine.generate("x"),
        lambda: engine.stream("x"),
        engine.stats,
        engine.check,
        engine.flush,
        lambda: engine.score("xy"),
    ):
        with pytest.raises(ph.EngineClosedError, match="closed"):
            use()


def test_an_engine_used_from_two_threads(engine: ph.Engine) -> None:
    prompts = ["Once upon a time", "The capital of France is", "def main():", "1, 2, 3,"]
    alone = [engine.generate(p, GREEDY).token_ids for p in prompts]
    engine.flush()
    results: dict[int, Any] = {}

    def work(number: int) -> None:
        results[number] = [engine.generate(p, GREEDY).token_ids for p in prompts]
        results[number + 10] = [t for d in engine.stream(prompts[number], GREEDY) for t in d.token_ids]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {0: alone, 1: alone, 10: alone[0], 11: alone[1]}
    engine.check()


def script(code: str) -> list[str]:
    return [sys.executable, "-c", "import os, signal, sys, threading, time\nimport phloem as ph\n" + textwrap.dedent(code)]


def test_an_engine_in_a_forked_child_and_an_engine_of_its_own() -> None:
    code = """
    engine = ph.Engine(kv_tokens=256)
    greedy = {"temperature": 0, "max_tokens": 4}
    expected = engine.generate("Once upon a time", greedy).token_ids
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            engine.generate("x")
        except ph.EngineClosedError as error:
            status = 0 if "Create the engine in the child" in str(error) else 2
        engine.close()
        if status == 0:
            with ph.Engine(kv_tokens=256) as own:
                status = 0 if own.generate("Once upon a time", greedy).token_ids == expected else 3
        sys.exit(status)  # a whole exit: finalizers and exit hooks run in the child too
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert engine.generate("Once upon a time", greedy).token_ids == expected
    """
    done = subprocess.run(script(code), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_ctrl_c_in_the_middle_of_a_batch_ends_the_program_soon() -> None:
    code = """
    engine = ph.Engine(kv_tokens=65536, max_running=32)
    print("ready", flush=True)
    engine.generate([[5 + i] * 1000 for i in range(32)], {"max_tokens": 1000, "ignore_eos": True})
    """
    process = subprocess.Popen(script(code), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors and process.returncode != 0
    assert time.monotonic() - start < 10


def test_an_engine_that_nobody_closed_does_not_hold_up_the_exit() -> None:
    code = """
    engine = ph.Engine(kv_tokens=256)
    stream = engine.stream("Once upon a time"); next(stream)
    print(time.monotonic(), flush=True)
    """
    done = subprocess.run(script(code), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr
    assert time.monotonic() - float(done.stdout) < 10
