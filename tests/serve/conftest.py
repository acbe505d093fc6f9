"""Servers that the tests of the HTTP surface share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.serving import HERMES, Loopback, Server, embedded_server, scripted_server


@pytest.fixture(scope="session")
def scripted() -> Iterator[Server]:
    """The real app over a scripted device, shared; tests leave it idle."""
    server = scripted_server()
    yield server
    server.assert_idle()
    server.close()


@pytest.fixture
def server(scripted: Server) -> Iterator[Server]:
    """The scripted server; afterwards nothing lives and no page is held."""
    scripted.watcher.records.clear()
    scripted.watcher.others.clear()
    scripted.watcher.warnings.clear()
    yield scripted
    scripted.assert_idle()


@pytest.fixture(scope="session")
def tool_server() -> Iterator[Server]:
    """Likewise, with a template that knows tools."""
    made = scripted_server(template=HERMES)
    yield made
    made.assert_idle()
    made.close()


@pytest.fixture(scope="session")
def embedded() -> Iterator[Server]:
    """The embedded model behind the real app."""
    made = embedded_server()
    yield made
    made.assert_idle()
    made.close()


@pytest.fixture(scope="session")
def loopback(embedded: Server) -> Iterator[Loopback]:
    """The same on a socket."""
    made = Loopback(embedded.app)
    yield made
    made.close()
