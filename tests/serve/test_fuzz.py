"""Bodies mutated at random: no 5xx, no hang, no page lost, and the next good request is served. Seeded: a failure names its seed."""

from __future__ import annotations

import json

import pytest

from tests.serve.mutate import mutated
from tests.serve.serving import Server, events


def run(server: Server, seeds: range) -> dict[int, int]:
    statuses: dict[int, int] = {}
    for seed in seeds:
        path, body = mutated(seed)
        reply = server.post(path, body)
        statuses[reply.status_code] = statuses.get(reply.status_code, 0) + 1
        assert reply.status_code in (200, 400, 403, 404, 409, 413), (seed, path, body[:2000], reply.text)
        if reply.status_code != 200:
            assert set(reply.json()["error"]) == {"message", "type", "param", "code"}, (seed, reply.text)
        elif reply.headers["content-type"].startswith("text/event-stream"):
            assert events(reply.text)[-1] == "[DONE]", (seed, reply.text)
        else:
            json.loads(reply.text)
        assert not server.watcher.failures, (seed, path, body[:2000], server.watcher.failures)
        if seed % 50 == 0:
            assert server.complete("good").json()["choices"][0]["text"] == "good", seed
            server.assert_idle()
    return statuses


@pytest.mark.parametrize("part", range(4))
def test_mutated_bodies(server: Server, part: int) -> None:
    statuses = run(server, range(part * 100, part * 100 + 100))
    assert statuses[200] > 10 and statuses[400] > 10, statuses


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_ten_thousand_mutated_bodies(server: Server, part: int) -> None:
    run(server, range(1000 + part * 500, 1000 + part * 500 + 500))
