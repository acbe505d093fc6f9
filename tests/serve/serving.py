"""A server in this process, for tests: the real app over a scripted device that says what its prompt tells it to, or over an engine.

    prompt "… [[hello]] …"   ─>  the device says "hello" and ends         exact text, no weights
    prompt without [[…]]     ─>  hashed noise, the same for the same tokens

`Server.post(path, **fields)` talks to the app as a client does, from any test function; `Server.events` splits a stream.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
import tokenizers
import uvicorn
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from phloem.runtime.config import Hardware, make_config, resolve
from phloem.runtime.engine.client import EngineClient, InprocClient
from phloem.runtime.engine.core import CoreSettings, EngineCore
from phloem.runtime.engine.grammars import Grammars, vocabulary_of
from phloem.runtime.serve.app import create_app
from phloem.runtime.serve.config import ServerConfig
from phloem.runtime.serve.host import Host, RequestRecord, Served
from phloem.runtime.text.parts import TokenizerParts
from phloem.runtime.text.pieces import byte_level_alphabet
from phloem.runtime.text.tokenizer import Tokenizer
from tests.fakes import History, ScriptedExecutor, hashed_logits

__all__ = [
    "CHATML",
    "HERMES",
    "Loopback",
    "Server",
    "Watcher",
    "byte_tokenizer",
    "embedded_server",
    "events",
    "scripted_server",
]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HERMES = (
    "{%- if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<tool_call></tool_call><|im_end|>\n{% endif -%}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n'
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END, START, BOS = "<|im_end|>", "<|im_start|>", "<|endoftext|>"


def byte_tokenizer(template: str | None = CHATML, words: Sequence[str] = ()) -> Tokenizer:
    """A token a byte, and chatml's markup. words: further tokens, of several characters."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=byte_level_alphabet(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    for spelling in (BOS, START, END):
        backend.add_tokens([AddedToken(spelling, special=True, normalized=False)])
    for word in words:
        backend.add_tokens([AddedToken(word, special=False, normalized=False)])
    end = backend.token_to_id(END)
    assert end is not None
    templates = {} if template is None else {"default": template}
    return Tokenizer(TokenizerParts(backend, {"bos_token": BOS, "eos_token": END}, frozenset((end,)), templates))


_SCRIPT = re.compile(rb"\[\[(.*?)\]\]", re.DOTALL)


class Script:
    """logits = f(history): what stands between [[ and ]] in the prompt is said after it, then the end. The prompt ends with the
    last assistant header and the `opening` behind it, or else with the last "]]" and all that is not yet said."""

    def __init__(self, tokenizer: Tokenizer, opening: str = "") -> None:
        self._tokenizer, self._header = tokenizer, b"assistant\n" + opening.encode()
        self._end = tokenizer.eos_id
        self._byte_id = {tokenizer.token_bytes(i): i for i in range(256)}
        marks = {mark: tokenizer.token_to_id(mark.decode()) for mark in (b"<think>", b"</think>")}
        self._marks = {mark: i for mark, i in marks.items() if i is not None}

    def __call__(self, history: History, width: int) -> Sequence[float]:
        noise = hashed_logits(history, width)
        data = b"".join(self._tokenizer.token_bytes(t) for t in history.tokens())
        found = list(_SCRIPT.finditer(data))
        if not found:
            return noise
        said = found[-1].group(1)
        header = data.rfind(self._header)
        start = header + len(self._header) if header > found[-1].end() else found[-1].end()
        so_far = data[start:]
        rest = said[len(so_far) :]
        wanted = self._end
        if rest and said.startswith(so_far):
            wanted = next((i for mark, i in self._marks.items() if rest.startswith(mark)), self._byte_id[rest[:1]])
        assert wanted is not None
        logits = list(noise)
        logits[wanted] += 100.0
        return logits


class Watcher:
    """An Observer that remembers."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []
        self.others: list[tuple[str, str, int]] = []
        self.warnings: list[str] = []
        self.failures: list[BaseException] = []

    def request(self, record: RequestRecord) -> None:
        self.records.append(record)

    def other(self, endpoint: str, method: str, status: int, seconds: float) -> None:
        self.others.append((endpoint, method, status))

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    def failed(self, request_id: str, error: BaseException) -> None:
        self.failures.append(error)

    def metrics(self) -> bytes:
        return b"phloem_up 1\n"


def events(text: str) -> list[Any]:
    """The data of a stream's events, [DONE] as a string."""
    found = []
    for block in text.split("\n\n"):
        if block.startswith("data: "):
            data = block.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
        else:
            assert block == "" or block.startswith(":"), block
    return found


class Server:
    """The app, a loop in a thread that serves it, and a client. close() ends all of it."""

    def __init__(
        self,
        client: EngineClient,
        model: Served,
        config: ServerConfig | None = None,
        *,
        close: Callable[[], None] | None = None,
    ) -> None:
        self.client, self.model = client, model
        self.config = config or ServerConfig()
        self.watcher = Watcher()
        self.host = Host(self.config, observer=self.watcher)
        self.host.ready(client, model)
        self.app = create_app(self.config, self.host)
        self.answers = 0  # that have begun: their status is out
        self._close = close
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.http = self.run(self._made())
        self.headers: dict[str, str] = {}

    async def _made(self) -> httpx.AsyncClient:
        async def counted(scope: Any, receive: Any, send: Any) -> None:
            async def spy(message: Any) -> None:
                self.answers += message["type"] == "http.response.start"
                await send(message)

            await self.app(scope, receive, spy)

        transport = httpx.ASGITransport(counted, raise_app_exceptions=True)
        return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", timeout=120)

    def run(self, work: Any) -> Any:
        """A coroutine, on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=120)

    # ---- asking ---------------------------------------------------------------------------------------------------------

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        options["headers"] = {**self.headers, **options.get("headers", {})}
        return self.run(self.http.request(method, path, **options))  # type: ignore[no-any-return]

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(
        self, path: str, body: Mapping[str, Any] | bytes | str | None = None, *, headers: Mapping[str, str] = {}, **fields: Any
    ) -> httpx.Response:
        if isinstance(body, (bytes, str)):
            return self.request("POST", path, content=body, headers={"content-type": "application/json", **headers})
        return self.request("POST", path, json={**(body or {}), **fields}, headers=headers)

    def chat(self, say: str = "", **fields: Any) -> httpx.Response:
        messages = fields.pop("messages", [{"role": "user", "content": f"[[{say}]]"}])
        return self.post("/v1/chat/completions", messages=messages, **{"temperature": 0, **fields})

    def complete(self, say: str = "", **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", **{"prompt": f"[[{say}]]", "temperature": 0, "max_tokens": 200, **fields})

    def generate(self, say: str = "", *, sampling: Mapping[str, Any] = {}, **fields: Any) -> httpx.Response:
        if "input_ids" not in fields:
            fields.setdefault("text", f"[[{say}]]")
        return self.post("/generate", sampling_params={"temperature": 0, **sampling}, **fields)

    # ---- what must hold afterwards --------------------------------------------------------------------------------------

    def stats(self) -> Any:
        return self.client.call("stats").result(timeout=60)

    def assert_idle(self) -> None:
        """Nothing lives, nothing waits, no page is held (P2)."""
        deadline = time.monotonic() + 30
        while True:
            stats = self.stats()
            if (stats.running, stats.waiting, stats.pages_live) == (0, 0, 0) and self.host.num_open == 0:
                break
            assert time.monotonic() < deadline, stats
            time.sleep(0.005)
        self.client.call("check").result(timeout=60)
        assert self.host.waiting == self.host.waiting_tokens == 0
        assert not self.watcher.failures, self.watcher.failures

    def close(self) -> None:
        self.run(self.http.aclose())
        if self._close is not None:
            self._close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


def scripted_server(
    config: ServerConfig | None = None,
    *,
    template: str | None = CHATML,
    words: Sequence[str] = (),
    opening: str = "",
    num_pages: int = 1024,
    max_context: int = 2048,
    sampling_defaults: Mapping[str, float] = {},
    policy: Any = "prefix",
    **settings: Any,
) -> Server:
    """opening: what the template puts behind the assistant's header.   settings: of CoreSettings."""
    tokenizer = byte_tokenizer(template, words)
    width = tokenizer.vocab_size
    engine = make_config(page_size=4, kv_tokens=num_pages * 4, max_context=max_context, device="reference", policy=policy)
    resolved = resolve(
        engine, Hardware(1, 1 << 40), model_context=max_context, kv_bytes_per_token_f32=64, weight_bytes=0
    )  # fmt: skip
    executor = ScriptedExecutor(4, num_pages, width, logits=Script(tokenizer, opening))
    assert tokenizer.eos_id is not None
    ends = frozenset((tokenizer.eos_id,))
    grammars = Grammars(lambda: vocabulary_of(tokenizer, ends, width), tokenizer.eos_id)
    known: dict[str, Any] = {"max_running": 16, "max_step_tokens": 256, "seed": 0}
    core = EngineCore(
        CoreSettings(page_size=4, num_pages=num_pages, max_context=max_context, vocab_size=width, width=width, eos_ids=ends, policy=policy, **(known | settings)),
        executor, grammar=grammars,
    )  # fmt: skip
    namespaces: dict[str, str] = {}
    executor.salt = lambda request_id: (namespaces.get(request_id, ""), core.weights_version)
    add = core.add

    def remember(request: Any) -> None:
        namespaces[request.id] = request.namespace
        add(request)

    core.add = remember  # type: ignore[method-assign]
    client = InprocClient(core, on_close=grammars.close)
    thread = threading.Thread(target=client.serve, daemon=True)
    thread.start()
    model = Served.of(
        tokenizer, resolved, name="scripted", path="scripted", sampling_defaults=sampling_defaults, model_type="scripted"
    )

    def close() -> None:
        client.close()
        thread.join(10)

    return Server(client, model, config, close=close)


class Loopback:
    """The app on a real socket of 127.0.0.1, by uvicorn in a thread: what SDKs and disconnects need."""

    def __init__(self, app: Any) -> None:
        options = uvicorn.Config(
            app,
            host="127.0.0.1",
            port=0,
            log_level="warning",
            access_log=False,
            loop="uvloop",
            http="httptools",
            lifespan="off",
        )
        self._server = uvicorn.Server(options)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 60
        while not self._server.started:
            assert time.monotonic() < deadline and self._thread.is_alive(), "uvicorn did not start"
            time.sleep(0.005)
        self.port: int = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()


def embedded_server(config: ServerConfig | None = None, **options: Any) -> Server:
    """The embedded model on the real kernels."""
    from phloem.runtime.engine.build import build

    parts = build(make_config(None, kv_tokens=8192, **options))
    client = InprocClient(parts.core, on_close=parts.on_close)
    thread = threading.Thread(target=client.serve, daemon=True)
    thread.start()

    def close() -> None:
        client.close()
        thread.join(10)

    return Server(client, Served.of(parts.tokenizer, parts.resolved, model_type="llama"), config, close=close)
