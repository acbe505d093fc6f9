"""Who may call what (G1–G7), and what routes that only tell say."""

from __future__ import annotations

import ast
import hmac
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phloem.runtime.errors import ConfigError
from phloem.runtime.serve.app import ROUTES
from phloem.runtime.serve.config import ServerConfig
from phloem.runtime.serve.errors import ApiError
from phloem.runtime.serve.guard import Keys, is_loopback
from phloem.runtime.serve.lower import namespace_of
from tests.serve.serving import Server, scripted_server

SOURCE = Path(__file__).resolve().parents[2] / "python"
ADMIN, ALICE, BOB = "admin-secret-0", "alice-secret-1", "bob-secret-2"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"# keys\nalice {ALICE}\n\nbob {BOB}\n")
    server = scripted_server(ServerConfig(api_key_file=str(keys), admin_key=ADMIN))
    yield server
    server.headers = {}
    server.assert_idle()
    server.close()


@pytest.fixture
def locked(guarded: Server) -> Server:
    guarded.headers = {}
    return guarded


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def code(reply: Any, status: int) -> str:
    assert reply.status_code == status, reply.text
    return reply.json()["error"]["code"]  # type: ignore[no-any-return]


def test_g1_every_route_declares_who_may_call_it(server: Server) -> None:
    for route in server.app.routes:
        assert route.endpoint.access in ("open", "key", "admin"), route  # type: ignore[attr-defined]
    described = {r.path for r in ROUTES} | {a for r in ROUTES for a in r.aliases} | {"/openapi.json"}
    assert {r.path.rstrip("/") for r in server.app.routes} == {p.rstrip("/") for p in described}  # type: ignore[attr-defined]
    assert {r.path for r in ROUTES if r.access == "open"} == {"/health", "/ready", "/metrics", "/version"}
    admin = {r.path for r in ROUTES if r.access == "admin"}
    assert "/flush_cache" in admin and not any(path.startswith("/v1") for path in admin)


@pytest.mark.parametrize("route", [r for r in ROUTES if r.access == "key"], ids=lambda r: r.path)
def test_g1_a_key_is_needed(locked: Server, route: Any) -> None:
    path = route.path.replace("{id:path}", "scripted")
    for headers in ({}, bearer("wrong"), {"authorization": "Basic eDp5"}, {"x-api-key": ""}, bearer(ALICE[:-1])):
        reply = locked.request(route.methods[0], path, headers=headers)
        assert code(reply, 401) == "invalid_api_key"
        assert reply.headers["www-authenticate"] == "Bearer"
    for headers in (bearer(ALICE), bearer(BOB), {"x-api-key": ALICE}, bearer(ADMIN)):
        assert locked.request(route.methods[0], path, headers=headers, json={}).status_code in (200, 400)


def test_g1_open_routes_need_none(locked: Server) -> None:
    for path in ("/health", "/ping", "/ready", "/metrics", "/version", "/openapi.json"):
        assert locked.get(path).status_code == 200, path
    for path in ("/health", "/ready", "/ping"):
        assert locked.request("HEAD", path).status_code == 200


def test_g1_the_admin_routes_take_the_admin_key_alone(locked: Server, server: Server) -> None:
    assert code(locked.post("/flush_cache"), 403) == "admin_required"
    assert code(locked.post("/flush_cache", headers=bearer(ALICE)), 403) == "admin_required"
    assert locked.post("/flush_cache", headers=bearer(ADMIN)).status_code == 200
    assert locked.get("/reset_prefix_cache", headers=bearer(ADMIN)).status_code == 200
    assert code(server.post("/flush_cache"), 403) == "admin_disabled", "G2: on loopback too"
    assert code(server.post("/abort_request", abort_all=True), 403) == "admin_disabled"


@pytest.mark.parametrize("text", ["alice", "alice a b", "alice x\nalice y", "# nothing", "é x", "admin x"])
def test_g1_a_key_file_that_is_none(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError):
        Keys(ServerConfig(api_key_file=str(file)))
    with pytest.raises(ConfigError):
        Keys(ServerConfig(api_key_file=str(tmp_path / "none")))
    with pytest.raises(ConfigError):
        Keys(ServerConfig(api_key=("",)))


def test_g1_every_key_is_compared_whichever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    """In constant time each, as digests of one length; how many comparisons there are tells nothing of the key either."""
    compared: list[tuple[bytes, bytes]] = []

    def spied(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return real(a, b)

    real = hmac.compare_digest
    monkeypatch.setattr("phloem.runtime.serve.guard.hmac.compare_digest", spied)
    keys = Keys(ServerConfig(api_key=("first", "second", "third"), admin_key="boss"))
    counts = set()
    for sent in ("first", "third", "thirD", "x" * 5000, "é"):
        compared.clear()
        try:
            keys.admit("key", {"authorization": f"Bearer {sent}"})
        except ApiError as error:
            assert error.status == 401
        counts.add(len(compared))
        assert all(len(a) == len(b) == 32 for a, b in compared)
    assert counts == {4}


def test_g4_loopback_is_the_default() -> None:
    assert is_loopback(ServerConfig().host)


def test_g3_a_namespace_is_the_tuple_not_its_text() -> None:
    tuples = [
        ("", None, None),
        ("a", None, None),
        ("", "a", None),
        ("", None, "a"),
        ("a", "b", None),
        ('a","b', None, None),
        ("a", "b", "c"),
        ("", '",null]', None),
    ]
    assert len({namespace_of(*t) for t in tuples}) == len(tuples)
    assert namespace_of("", None, None) == namespace_of("", "", "") == ""


@pytest.mark.case("C-SCHED-11")
def test_g3_across_namespaces_nothing_is_told(locked: Server) -> None:
    prompt = "a prompt that is long enough to fill several pages of the cache"

    def cached(headers: dict[str, str], **fields: Any) -> int:
        reply = locked.complete(prompt=prompt, max_tokens=1, headers=headers, **fields)
        return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]  # type: ignore[no-any-return]

    assert cached(bearer(ALICE)) == 0 and cached(bearer(ALICE)) > 0
    assert cached(bearer(BOB)) == 0 and cached(bearer(BOB)) > 0
    assert cached(bearer(ALICE), cache_salt="s") == 0 and cached(bearer(ALICE), cache_salt="s") > 0
    assert cached(bearer(ALICE), extra_key="s") == 0
    assert cached(bearer(ADMIN)) == 0


@pytest.mark.parametrize(("host", "ok"), [("127.0.0.1:8000", True), ("localhost", True), ("[::1]:8000", True), ("127.9.9.9", True), ("evil.example", False),
                                          ("127.0.0.1.evil.example:8000", False), ("localhost.evil", False)])  # fmt: skip
def test_g4_on_loopback_only_loopback_names(server: Server, host: str, ok: bool) -> None:
    reply = server.get("/version", headers={"host": host})
    assert reply.status_code == 200 if ok else code(reply, 403) == "origin_not_allowed"


def test_g4_pages_of_other_origins(server: Server) -> None:
    assert server.get("/version", headers={"origin": "http://127.0.0.1:8000"}).status_code == 200
    for origin in ("http://evil.example", "null", "http://127.0.0.1:9999", "https://127.0.0.1"):
        assert code(server.get("/version", headers={"origin": origin}), 403) == "origin_not_allowed"
        assert code(server.post("/v1/completions", headers={"origin": origin}), 403) == "origin_not_allowed"
    allowed = scripted_server(ServerConfig(allow_origin=("https://app.example",), host="0.0.0.0"))
    try:
        reply = allowed.get("/version", headers={"origin": "https://app.example", "host": "anything"})
        assert reply.status_code == 200 and reply.headers["access-control-allow-origin"] == "https://app.example"
        preflight = allowed.request(
            "OPTIONS", "/v1/completions", headers={"origin": "https://app.example", "access-control-request-method": "POST"}
        )
        assert preflight.status_code == 200
        assert allowed.get("/version", headers={"origin": "https://other.example"}).status_code == 403
    finally:
        allowed.close()


def test_is_loopback() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "::1", "[::1]")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example", "")))


@pytest.mark.case("C-OPS-05")
def test_g6_nothing_is_unpickled() -> None:
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [a.name for a in node.names] + [getattr(node, "module", None) or ""]
                assert not {"pickle", "cPickle", "dill", "marshal", "shelve", "cloudpickle"} & {
                    n.split(".")[0] for n in names
                }, file
            if isinstance(node, ast.Attribute):
                assert node.attr not in ("recv_pyobj", "send_pyobj"), file
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                assert any(k.arg == "weights_only" for k in node.keywords), file


@pytest.mark.case("C-OPS-06")
def test_no_route_shows_a_key(locked: Server) -> None:
    secrets = (ADMIN, ALICE, BOB)
    for headers in ({}, bearer(ADMIN), bearer(ALICE), bearer("wrong-key-xyz")):
        for route in ROUTES:
            if route.access == "admin" and route.path != "/flush_cache" and headers == bearer(ADMIN):
                continue  # they would take the engine from under the other tests
            for path in (route.path, *route.aliases):
                for method in route.methods:
                    reply = locked.request(method, path.replace("{id:path}", "x"), headers=headers)
                    seen = reply.text + str(reply.headers)
                    assert not any(s in seen for s in (*secrets, "wrong-key-xyz")), path
    info = locked.get("/get_server_info", headers=bearer(ALICE)).json()
    assert info["admin_key"] == "set" and info["api_key"] is None and info["api_key_file"] == "keys"
    assert not any(s in repr(vars(locked.app.state.phloem.keys)) for s in secrets)


def test_models(server: Server) -> None:
    listed = server.get("/v1/models").json()
    (card,) = listed["data"]
    assert listed["object"] == "list" and server.get("/v1/models/scripted").json() == card
    assert set(card) == {"id", "object", "created", "owned_by", "max_model_len", "root", "parent"}
    assert (card["id"], card["owned_by"], card["max_model_len"], card["parent"]) == ("scripted", "phloem", 2048, None)


def test_served_names_and_aliases() -> None:
    server = scripted_server(ServerConfig(served_model_name=("org/name", "other")))
    try:
        assert [c["id"] for c in server.get("/v1/models").json()["data"]] == ["org/name", "other"]
        assert server.get("/v1/models/org/name").json()["id"] == "org/name"
        for asked, told in (
            (None, "org/name"),
            ("default", "org/name"),
            ("other", "other"),
            ("org/name", "org/name"),
            ("scripted", "org/name"),
        ):
            assert server.complete("hi", model=asked).json()["model"] == told
        reply = server.complete("hi", model="nope")
        assert code(reply, 404) == "model_not_found" and "org/name" in reply.json()["error"]["message"]
    finally:
        server.close()


def test_what_routes_tell(server: Server) -> None:
    assert set(server.get("/version").json()) == {"version"}
    info = server.get("/get_model_info").json()
    assert info == server.get("/model_info").json()
    assert set(info) == {
        "model_path", "served_model_name", "tokenizer_path", "is_generation", "weight_version", "model_type", "architectures", "max_model_len", "tool_parser",
        "has_chat_template",
    }  # fmt: skip
    assert (info["is_generation"], info["tool_parser"], info["has_chat_template"]) == (True, "hermes", True)
    full = server.get("/server_info").json()
    assert full["max_total_num_tokens"] == 4096 and full["page_size"] == 4 and full["internal_states"][0]["running"] == 0
    assert server.get("/metrics").text == "phloem_up 1\n"
    assert server.get("/health_generate").json() == {"status": "ok"}


def test_observer_hears_of_routes_by_their_pattern(server: Server) -> None:
    server.get("/v1/models/" + "x" * 50)
    server.get("/made/up/path")
    assert server.watcher.others == [("/v1/models/{id:path}", "GET", 404), ("", "GET", 404)]


class Phase:
    """A Life that tests set."""

    def __init__(self) -> None:
        self.phase: Any = "ready"
        self.progress = "weights 40%"
        self.asleep = False
        self.late: float | None = None

    def stalled(self) -> float | None:
        return self.late


@pytest.mark.case("C-OPS-02")
def test_l3_health_and_requests_by_the_state_of_life(server: Server) -> None:
    life, before = Phase(), server.host.life
    server.host.life = life
    try:
        table: list[tuple[dict[str, Any], int, int, int, str | None]] = [
            ({"phase": "ready"}, 200, 200, 200, None),
            ({"phase": "loading"}, 503, 503, 503, "loading"),
            ({"phase": "draining"}, 200, 503, 503, "draining"),
            ({"phase": "dead"}, 503, 503, 503, "engine_dead"),
            ({"phase": "ready", "asleep": True}, 200, 503, 503, "sleeping"),
            ({"phase": "ready", "asleep": False, "late": 9.0}, 503, 503, 200, None),
            ({"phase": "ready", "late": None}, 200, 200, 200, None),
        ]
        for state, health, ready, request, why in table:
            vars(life).update(state)
            assert server.get("/health").status_code == health, state
            assert server.get("/ready").status_code == ready, state
            for path, body in (
                ("/v1/completions", {"prompt": "[[hi]]"}),
                ("/v1/chat/completions", {"messages": []}),
                ("/generate", {"text": "[[hi]]"}),
            ):
                reply = server.post(path, body)
                if why is not None:
                    assert code(reply, 503) == why
                    assert 1 <= int(reply.headers["retry-after"]) <= 60
                else:
                    assert reply.status_code in (request, 400)
    finally:
        server.host.life = before
    assert server.get("/health").json() == {"status": "ok"}


def test_while_loading_nothing_but_health_answers() -> None:
    from phloem.runtime.serve.app import create_app
    from phloem.runtime.serve.host import Host

    server = scripted_server()
    config = ServerConfig()
    host = Host(config)
    host.life = Phase()
    host.life.phase = "loading"
    before, server.app = server.app, create_app(config, host)
    server.http = server.run(server._made())
    try:
        for path in ("/v1/models", "/get_model_info", "/tokenizer_info"):
            reply = server.get(path)
            assert code(reply, 503) == "loading" and "weights 40%" in reply.text
        assert server.get("/version").status_code == server.get("/metrics").status_code == 200
        host.ready(server.client, server.model)
        host.life.phase = "ready"
        assert server.get("/v1/models").status_code == 200 and server.complete("hi").json()["choices"][0]["text"] == "hi"
    finally:
        server.app = before
        server.close()
