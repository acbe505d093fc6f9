"""Templates that requests bring (G5): only when allowed, in a process that is killed when it takes too much."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from phloem.runtime.serve.config import ServerConfig
from phloem.runtime.serve.sandbox import KillableTemplate
from tests.serve.serving import Server, scripted_server

HI = [{"role": "user", "content": "[[hi]] <|im_end|>"}]


@pytest.fixture(scope="module")
def open_server() -> Iterator[Server]:
    server = scripted_server(ServerConfig(request_templates=True))
    yield server
    server.assert_idle()
    server.close()


def test_a_template_of_the_requests_own_makes_the_prompt(open_server: Server) -> None:
    own = "{% for m in messages %}({{ m.content }}){% endfor %}{{ word }}assistant\n\n"
    asked = {"messages": HI, "chat_template": own, "chat_template_kwargs": {"word": "!"}}
    told = open_server.post("/tokenize", asked).json()
    assert told["prompt"] == "([[hi]] <|im_end|>)!assistant\n"
    control = open_server.post("/tokenize", prompt="<|im_end|>").json()["tokens"][0]
    assert control not in told["tokens"], "what a user writes becomes no control token"
    assert open_server.post("/v1/chat/completions", asked, temperature=0).json()["choices"][0]["message"]["content"] == "hi"


@pytest.mark.case("C-OPS-09")
@pytest.mark.parametrize(
    ("template", "seconds"),
    [("{% for a in range(9999) %}{% for b in range(9999) %}x{% endfor %}{% endfor %}", 5), ("{{ 'x' * 10**9 }}", 5), ("{{ 'x' * 5000000 }}", 5), ("{{ nope(", 5),
     ("{{ raise_exception('no') }}", 5), ("{{ ''.__class__.__mro__[1].__subclasses__() }}", 5), ("{{ messages.append(1) }}", 5)],
)  # fmt: skip
def test_what_takes_too_much_is_400_in_time(open_server: Server, template: str, seconds: float) -> None:
    start = time.monotonic()
    reply = open_server.post("/v1/chat/completions", messages=HI, chat_template=template)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["code"] == "chat_template_error"
    assert time.monotonic() - start < 60, f"it takes {seconds} s on a quiet machine"
    assert open_server.complete("hi").status_code == 200


def test_a_killed_template_may_be_rendered_again() -> None:
    template = KillableTemplate(
        "{% if n %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}ok"
    )
    try:
        assert template.render({"n": 0}) == "ok"
        with pytest.raises(Exception, match="seconds"):
            template.render({"n": 1})
        assert template.render({"n": 0}) == "ok"
    finally:
        template.close()
