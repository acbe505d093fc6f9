"""Z1 and Z2: the same program gives the same tokens on the engine here and through our server; what a backend cannot do is refused."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import pydantic
import pytest

import phloem as ph
from tests.serve.serving import Loopback, Server, embedded_server


class Ticket(pydantic.BaseModel):
    product: str = pydantic.Field(max_length=12)
    severity: Literal["low", "high"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = embedded_server()
    yield made
    made.assert_idle()
    made.close()


@pytest.fixture(scope="module")
def endpoint(server: Server) -> Iterator[ph.RuntimeEndpoint]:
    socket = Loopback(server.app)
    with ph.RuntimeEndpoint(socket.url) as made:
        yield made
    socket.close()


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@ph.function
def everything(s: ph.State, mail: str) -> Any:
    ticket, count, grade = ph.gen("ticket", Ticket, max_tokens=60), ph.gen("count", int), ph.gen("kind", Literal["bug", "wish"])
    s += ph.system("You sort mails.") + ph.user(mail) + ph.assistant(ticket)
    with s.fork(2) as branches:
        for b in branches:
            b += ph.user("How many?") + ph.assistant("I count " + count + " of them, a " + grade + ".")
    s += ph.assistant("In short: " + ph.gen("short", stop=[".", "\n"], max_tokens=10))
    s += ph.user("Grade?") + ph.assistant(ph.select("grade", ["A", "B", "BB"]))
    return s[ticket], s["count"], s["kind"], s["short"], s["grade"]


@ph.function
async def everything_async(s: ph.AsyncState, mail: str) -> Any:
    ticket, count, grade = ph.gen("ticket", Ticket, max_tokens=60), ph.gen("count", int), ph.gen("kind", Literal["bug", "wish"])
    s += ph.system("You sort mails.") + ph.user(mail) + ph.assistant(ticket)
    async with s.fork(2) as branches:
        for b in branches:
            b += ph.user("How many?") + ph.assistant("I count " + count + " of them, a " + grade + ".")
    s += ph.assistant("In short: " + ph.gen("short", stop=[".", "\n"], max_tokens=10))
    s += ph.user("Grade?") + ph.assistant(ph.select("grade", ["A", "B", "BB"]))
    return await s[ticket], await s["count"], await s["kind"], await s["short"], await s["grade"]


def drawn(run: Any) -> dict[Any, Any]:
    return {(r.kind, r.branch, r.ordinal, r.request.token_ids): r.output.token_ids for r in run.records if r.kind != "warm"}


MAIL = "The lid broke on the first day."


def test_z2_the_same_tokens_here_and_through_the_server(engine: ph.Engine, endpoint: ph.RuntimeEndpoint) -> None:
    here = everything.run(mail=MAIL, seed=3, backend=engine)
    there = everything.run(mail=MAIL, seed=3, backend=endpoint)
    assert there.value == here.value and there.tokens == here.tokens
    assert drawn(there) == drawn(here)
    alone = everything.run(mail=MAIL, seed=3, backend=endpoint, compile=False)
    assert alone.value == here.value and drawn(alone) == drawn(here)
    sums = [[round(c.scores["sum"], 4) for c in run.scores("grade")] for run in (here, there)]
    assert sums[0] == sums[1]


def test_z2_sync_and_async_run_and_run_batch(engine: ph.Engine, endpoint: ph.RuntimeEndpoint) -> None:
    mails = [MAIL, "Please add a blue one."]
    wanted = [everything.run(mail=m, seed=3, backend=engine).value for m in mails]
    for backend in (engine, endpoint):
        assert [everything_async.run(mail=m, seed=3, backend=backend).value for m in mails] == wanted
    batches = [
        [run.value for run in everything.run_batch([{"mail": m} for m in mails], seed=3, backend=b)] for b in (engine, endpoint)
    ]
    assert batches[0] == batches[1]


def test_z2_samples_logprobs_streams_and_tools(engine: ph.Engine, endpoint: ph.RuntimeEndpoint) -> None:
    @ph.function
    def program(s: ph.State) -> Any:
        many = ph.gen("many", n=3, max_tokens=4, return_logprob=True, top_logprobs_num=2)
        s += "Once upon a time" + many
        return s[many], [round(e[0], 4) for info in s.get_meta_info(many) for e in info["output_token_logprobs"]]

    @ph.function
    def call(s: ph.State) -> Any:
        step = ph.gen("step", tools=[add], tool_choice=add, max_tokens=60)
        s += ph.user("What is 3 + 4?") + ph.assistant(step)
        return s.call_tools(s[step]), s[step].calls[0].arguments

    for one in (program, call):
        assert one.run(seed=5, backend=endpoint).value == one.run(seed=5, backend=engine).value

    @ph.function
    def tell(s: ph.State) -> None:
        s += "Once upon a time" + ph.gen("story", max_tokens=12, temperature=0)

    told = ["".join(tell.run(backend=b, stream=True).text_iter("story")) for b in (engine, endpoint)]
    assert told[0] == told[1] and told[0]


def test_prefixes_are_reused_by_the_servers_tree(endpoint: ph.RuntimeEndpoint) -> None:
    runs = [everything.run(mail="A long mail about lids and lamps. " * 4, seed=3, backend=endpoint) for _ in range(2)]
    assert runs[1].usage.cached > runs[0].usage.cached and runs[1].usage.hit > 0.8


def test_a_refusal_arrives_as_the_engine_gives_it_with_its_line(endpoint: ph.RuntimeEndpoint) -> None:
    @ph.function
    def long(s: ph.State) -> None:
        s += "word " * 9000 + ph.gen("x")

    with pytest.raises(ph.PhloemError) as caught:
        long.run(backend=endpoint)
    assert isinstance(caught.value, (ph.ContextLengthError, ph.CapacityError)) and "test_remote.py:" in str(caught.value.at)


def test_a_cancelled_program_ends_at_the_server_too(server: Server, endpoint: ph.RuntimeEndpoint) -> None:
    @ph.function
    def endless(s: ph.State) -> None:
        s += "Once upon a time" + ph.gen("story", max_tokens=1500, ignore_eos=True)

    with pytest.raises(ph.ProgramTimeout):
        endless.run(backend=endpoint, timeout=0.5)
    server.assert_idle()


def test_a_server_that_is_not_there_is_said_at_once() -> None:
    with pytest.raises(ph.BackendUnavailable, match="cannot be reached"):
        ph.RuntimeEndpoint("http://127.0.0.1:1")
    with pytest.raises(ph.InvalidRequestError, match="http://"):
        ph.RuntimeEndpoint("127.0.0.1:8000")


def test_another_tokenizer_is_noticed(endpoint: ph.RuntimeEndpoint) -> None:
    from phloem.lang.testing import byte_tokenizer

    with pytest.raises(ph.InvalidRequestError, match="other ids"):
        ph.RuntimeEndpoint(endpoint.name, tokenizer=byte_tokenizer())


# --------------------------------------------------------------------------------------------------------- other people's servers


class Fake:
    """A server of a few canned routes, on a real socket; remembers what it was asked."""

    def __init__(self, routes: dict[str, Any]) -> None:
        self.asked: list[tuple[str, Any]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                size = int(self.headers.get("content-length") or 0)
                body = json.loads(self.rfile.read(size)) if size else None
                fake.asked.append((self.path, body))
                made = routes[self.path](body) if callable(routes[self.path]) else routes[self.path]
                status, value, *headers = made if isinstance(made, tuple) else (200, made)
                data = json.dumps(value).encode()
                self.send_response(status)
                for name, text in [("content-length", str(len(data))), *headers]:
                    self.send_header(name, text)
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = _answer

            def log_message(self, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


def sglang(generate: Any) -> Fake:
    return Fake({
        "/get_model_info": {"model_path": "org/model", "is_generation": True}, "/v1/models": {"data": [{"id": "m", "owned_by": "sglang", "max_model_len": 2048}]},
        "/get_server_info": {"page_size": 1, "max_total_num_tokens": 4096}, "/generate": generate,
    })  # fmt: skip


def test_an_sglang_server_gets_its_own_fields_and_its_null_entry_is_skipped(engine: ph.Engine) -> None:
    tokenizer = engine.tokenizer

    def generate(body: Any) -> Any:
        ids = body["input_ids"]
        if body["sampling_params"]["max_new_tokens"] == 0:
            start = body.get("logprob_start_len", -1)
            entries = [
                [None if i == start else -0.5 - (tokenizer.decode([t]).strip() == "red"), t, None]
                for i, t in list(enumerate(ids))[start:]
            ]
            return {
                "text": "",
                "output_ids": [],
                "meta_info": {
                    "finish_reason": {"type": "length", "length": 0},
                    "cached_tokens": 3,
                    "completion_tokens": 0,
                    "input_token_logprobs": entries,
                },
            }
        out = tokenizer.encode_continuation(" blue sky")
        return {
            "text": " blue sky",
            "output_ids": out,
            "meta_info": {
                "finish_reason": {"type": "length", "length": len(out)},
                "cached_tokens": 5,
                "completion_tokens": len(out),
            },
        }

    fake = sglang(generate)
    try:

        @ph.function
        def program(s: ph.State) -> Any:
            s += "I like the" + ph.gen("what", max_tokens=2) + " and"
            s += ph.select("colour", [" red", " blue"])
            return s["what"], s["colour"]

        with ph.RuntimeEndpoint(fake.url, tokenizer=tokenizer) as backend:
            run = program.run(backend=backend, temperature=0)
            assert run.value == (" blue sky", " blue") and run.usage.cached > 0
            for bad in (ph.gen("n", int), ph.gen("t", tools=[add]), ph.gen("x", seed=1), ph.gen("x", logit_bias={1: 1.0})):

                @ph.function
                def refused(s: ph.State, node: Any = bad) -> None:
                    s += "a" + node

                with pytest.raises(ph.BackendUnsupported) as caught:
                    refused.run(backend=backend)
                assert "test_remote.py:" in str(caught.value.at)
        params = next(body["sampling_params"] for path, body in fake.asked if path == "/generate")
        assert params["max_new_tokens"] == 2 and "sampling_seed" not in params and "json_whitespace" not in params
    finally:
        fake.close()


def test_a_busy_server_is_asked_again_and_a_broken_one_is_told(engine: ph.Engine) -> None:
    times: list[float] = []

    def generate(body: Any) -> Any:
        times.append(time.monotonic())
        if len(times) < 3:
            return (
                429,
                {"error": {"message": "full", "type": "rate_limit_error", "code": "engine_overloaded"}},
                ("retry-after-ms", "20"),
            )
        return (500, {"error": {"message": "it broke", "type": "server_error", "code": "internal_error"}})

    fake = sglang(generate)
    try:

        @ph.function
        def program(s: ph.State) -> None:
            s += "a" + ph.gen("x")

        with (
            ph.RuntimeEndpoint(fake.url, tokenizer=engine.tokenizer) as backend,
            pytest.raises(ph.BackendUnavailable, match="it broke"),
        ):
            program.run(backend=backend)
        assert len(times) == 3
    finally:
        fake.close()


@ph.function
def chat(s: ph.State, question: str) -> Any:
    s += ph.system("Be brief.") + ph.user(question) + ph.assistant(ph.gen("a", max_tokens=8, stop="\n"))
    s += ph.user("As a ticket.") + ph.assistant(ph.gen("ticket", Ticket, max_tokens=60))
    return s["a"], s["ticket"]


def test_openai_by_messages_and_text(server: Server, endpoint: ph.RuntimeEndpoint, engine: ph.Engine) -> None:
    """Our own server, as one that speaks OpenAI only: at temperature 0 the same text as in the engine."""
    with ph.OpenAI(endpoint.name + "/v1", "default") as backend:
        there = chat.run(question="Why is the sky blue?", temperature=0, backend=backend)
        here = chat.run(question="Why is the sky blue?", temperature=0, backend=engine)
        assert there.value == here.value and isinstance(there.value[1], Ticket)
        assert there.usage.prompt > 0 and "gen a" in there.show()

        @ph.function
        def plain(s: ph.State) -> Any:
            s += "Once upon a time" + ph.gen("x", max_tokens=6) + " And" + ph.gen("y", max_tokens=3)
            return s["x"]

        assert plain.run(temperature=0, backend=backend).value == plain.run(temperature=0, backend=engine).value
    server.assert_idle()


@pytest.mark.parametrize("node, why", [
    (ph.select("x", ["a", "b"]), "select"), (ph.gen("x", regex="a+", open_end=False), "regex"), (ph.gen("x", int), "enforces no regex"), (ph.gen("x", tools=[add]), "tools"),
    (ph.gen("x", return_logprob=True), "logprobs"), (ph.gen("x", top_k=5), "top_k"), ("Sure: " + ph.gen("x"), "begins each assistant turn"),
])  # fmt: skip
def test_z1_what_openai_cannot_do_is_refused_at_its_line(node: Any, why: str, endpoint: ph.RuntimeEndpoint) -> None:
    @ph.function
    def program(s: ph.State) -> None:
        s += ph.user("Hi.") + ph.assistant(node)

    with ph.OpenAI(endpoint.name + "/v1", "default") as backend, pytest.raises(ph.BackendUnsupported, match=why) as caught:
        program.run(backend=backend)
    assert "test_remote.py:" in str(caught.value.at)
