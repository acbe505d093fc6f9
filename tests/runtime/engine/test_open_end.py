"""G7 through the engine: what a model draws behind a complete value ends it and is in no output, whatever happens to the rows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from phloem.runtime.engine.collect import Collector
from phloem.runtime.engine.grammars import Grammars
from phloem.runtime.request import GrammarSpec, OutputDelta, Request, SamplingParams, Usage
from tests.drive import Driver, Said
from tests.fakes import History, hashed_logits
from tests.runtime.grammar.oracle import EOS, EOS2, toy_vocabulary

TOY = toy_vocabulary()
NUMBER = r"(12?3?|20|aa){1,4}"
SPECS: dict[str, dict[str, Any]] = {
    "regex": {"kind": "regex", "source": NUMBER},
    "choices": {"kind": "choices", "source": '["ye", "yes", "yester", "a", "ab", "abab"]'},
    "integer": {"kind": "json_schema", "source": '{"type": "integer", "minimum": -30, "maximum": 5000}'},
    "xgrammar": {"kind": "ebnf", "source": 'root ::= ("1" "2"? "3"? | "20" | "aa"){1,4}'},
    "llguidance": {"kind": "lark", "source": f"start: /{NUMBER}/"},
    "empty": {"kind": "regex", "source": "(ab)*"},
}  # fmt: skip
LANGUAGE = {
    "regex": NUMBER, "choices": "ye|yes|yester|a|ab|abab", "integer": "-?[0-9]{1,4}", "xgrammar": NUMBER, "llguidance": NUMBER, "empty": "(ab)*",
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlap": {"overlap": True},
    "chunked": {"max_step_tokens": 8, "max_running": 4},
    "preempted": {"num_pages": 40, "overlap": True},
    "pages of one": {"page_size": 1, "overlap": True, "num_pages": 1024},
}  # fmt: skip


@pytest.fixture(scope="module")
def service() -> Iterator[Grammars]:
    made = Grammars(lambda: TOY, EOS)
    for jump in ("canonical", "off"):
        for name in SPECS:
            assert made.begin(Request(id="warm", token_ids=(5,), grammar=spec(name, jump_forward=jump))).wait(60)
    yield made
    made.close()


def spec(name: str, **options: Any) -> GrammarSpec:
    return GrammarSpec(**{"trusted": True, "open_end": True, **SPECS[name], **options})


def driver(service: Grammars, **settings: Any) -> Driver:
    return Driver(grammars=service, vocab_size=TOY.width, eos_ids=frozenset((EOS, EOS2)), **settings)  # type: ignore[arg-type]


def told(said: Said) -> Any:
    assert said.last is not None
    usage = said.usage
    counts = (
        usage.completion_tokens,
        usage.forced_tokens,
        usage.dropped_tokens,
    )  # samples after the first find the prompt cached
    return (said.tokens, said.logprobs, said.finish, said.last.error, counts)


def say(d: Driver, *, n: int = 1, names: Any = tuple(SPECS), jump: str = "canonical", **sampling: Any) -> dict[str, Said]:
    for i, name in enumerate(names):
        for sample in range(n):
            request = {"grammar": spec(name, jump_forward=jump), "group": f"g{i}" if n > 1 else None, "sample": sample}
            at = list(SPECS).index(name)
            d.submit([10 + at] * (7 + 9 * at), id=f"{name}.{sample}", request=request, max_tokens=20, **sampling)
    said = d.finish()
    d.assert_no_leak()
    return said


def check_text(name: str, said: Said) -> None:
    tokens = said.tokens[:-1] if said.tokens and said.tokens[-1] in (EOS, EOS2) else said.tokens
    assert said.last is not None and said.last.error is None
    if said.finish == "grammar":
        assert re.fullmatch(LANGUAGE[name], TOY.join(tokens).decode()), TOY.join(tokens)
    else:
        assert said.finish == "length"
    assert said.usage.completion_tokens == len(said.tokens) and said.usage.dropped_tokens in (0, 1)
    if said.usage.dropped_tokens:
        assert said.finish == "grammar" and tokens == said.tokens, "no end token stands for one that was dropped"


@pytest.mark.parametrize("logprobs", [None, "model", "sampled", "both"])
@pytest.mark.parametrize("shape", SHAPES)
def test_g7_whatever_happens_to_the_rows(shape: str, logprobs: Any, service: Grammars) -> None:
    """Overlap, chunks, preemption, jump on or off, alone or beside others: the same output, one logprob a token of it."""
    sampling = {"temperature": 1.0, "seed": 5, "logprobs": logprobs, "top_logprobs": 2 if logprobs else 0}
    plain = say(driver(service), **sampling)
    for jump in ("canonical", "off"):
        assert {k: told(v) for k, v in say(driver(service, **SHAPES[shape]), jump=jump, **sampling).items()} == {
            k: told(v) for k, v in plain.items()
        }
    for key, said in plain.items():
        check_text(key.split(".")[0], said)
        assert len(said.logprobs) == (len(said.tokens) if logprobs else 0)
    assert sum(said.usage.dropped_tokens for said in plain.values()) >= 2


def test_g7_of_a_group_each_is_as_alone(service: Grammars) -> None:
    sampling = {"temperature": 1.0, "seed": 3, "logprobs": "both"}
    together = say(driver(service, overlap=True), n=6, **sampling)
    for name in SPECS:
        for sample in range(6):
            d = driver(service)
            at = list(SPECS).index(name)
            request = {"grammar": spec(name), "sample": sample}
            alone = d.run([10 + at] * (7 + 9 * at), request=request, max_tokens=20, **sampling)
            assert told(alone) == told(together[f"{name}.{sample}"])
    dropped = [said.usage.dropped_tokens for said in together.values()]
    assert 0 < sum(dropped) < len(dropped), "some end by an end token or by themselves, some by what cannot continue"


def scripted(text: str) -> Any:
    """A model that writes this text behind any prompt of three tokens, whatever it is asked."""
    ids = TOY.encode(text)

    def logits(history: History, width: int) -> list[float]:
        row = hashed_logits(history, width)
        at = history.length - 3
        if 0 <= at < len(ids):
            row[ids[at]] = 50.0
        return row

    return logits


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", ["regex", "xgrammar", "llguidance"])
def test_g7_the_value_ends_where_the_model_ends_it(name: str, overlap: bool, service: Grammars) -> None:
    """The model writes "123 yes": its blank is no part of the number, in neither ids nor pages."""
    d = driver(service, overlap=overlap, page_size=1, device={"logits": scripted("123 yes")})
    said = d.run([5, 6, 7], request={"grammar": spec(name)}, max_tokens=20)
    assert TOY.join(said.tokens) == b"123" and said.finish == "grammar"
    assert said.usage == Usage(3, 0, len(said.tokens), said.usage.forced_tokens, 1)
    assert d.core.stats().surplus_tokens == 1
    # The device checks every read: were the dropped token's keys published, this prompt would read them.
    again = d.run([5, 6, 7, *said.tokens, *TOY.encode(": 1")], max_tokens=4)
    assert again.finish == "length"
    d.assert_no_leak()


@pytest.mark.parametrize("name", ["regex", "xgrammar", "llguidance"])
def test_without_it_only_an_end_token_ends(name: str, service: Grammars) -> None:
    d = driver(service, device={"logits": scripted("123 yes")})
    said = d.run([5, 6, 7], request={"grammar": spec(name, open_end=False)}, max_tokens=20)
    check_text(name, said)
    assert len(said.tokens) > 2 and said.usage.dropped_tokens == 0


def test_g7_max_tokens_leave_room_for_the_value_only(service: Grammars) -> None:
    """What is dropped needs no room; a value that fills it was cut by length, since nobody asked the model whether it is over."""
    num = len(TOY.encode("123"))
    for limit, finish in ((num + 1, "grammar"), (num, "length")):
        d = driver(service, device={"logits": scripted("123 yes")})
        said = d.run([5, 6, 7], request={"grammar": spec("regex")}, max_tokens=limit)
        assert (TOY.join(said.tokens), said.finish) == (b"123", finish)


def test_g7_a_value_may_be_empty(service: Grammars) -> None:
    d = driver(service, device={"logits": scripted(" yes")}, overlap=True)
    said = d.run([5, 6, 7], request={"grammar": spec("empty")}, max_tokens=20)
    assert said.tokens == [] and said.finish == "grammar" and said.usage.dropped_tokens == 1
    d.assert_no_leak()


class Spelling:
    """As much of a tokenizer as a Collector asks for."""

    special_ids = frozenset((EOS, EOS2))

    def detokenizer(self, skip_special_tokens: bool, continuation: bool) -> Any:
        class Pieces:
            def push(self, ids: Any) -> str:
                return TOY.join(i for i in ids if i not in Spelling.special_ids).decode()

            def flush(self) -> str:
                return ""

        return Pieces()


def test_g7_streamed_pieces_add_up(service: Grammars) -> None:
    """The last piece brings the finish and no token; a stop string that was complete before makes the dropped token nobody's."""
    d = driver(service, device={"logits": scripted("123 yes")})
    request = d.request([5, 6, 7], id="q", request={"grammar": spec("regex")}, max_tokens=20, logprobs=True)
    collector = Collector(request, Spelling())  # type: ignore[arg-type]
    d.add(request)
    pieces = []
    while collector.output is None:
        pieces += [piece for delta in d.step() if (piece := collector.push(delta)) is not None]
    output = collector.output
    assert output.text == "".join(piece.text for piece in pieces) == "123"
    assert output.token_ids == [i for piece in pieces for i in piece.token_ids]
    assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)
    assert output.usage.dropped_tokens == 1 and pieces[-1].usage == output.usage and output.finish_reason == "grammar"

    sampling = SamplingParams(stop=("12",))
    stopped = Collector(Request(id="q", token_ids=(5,), sampling=sampling), Spelling())  # type: ignore[arg-type]
    last = OutputDelta("q", TOY.encode("12"), finish_reason="grammar", usage=Usage(1, 0, 1, 0, 1))
    stopped.push(last)
    assert stopped.output is not None and stopped.output.finish_reason == "stop_string"
    assert stopped.output.usage.dropped_tokens == 0
