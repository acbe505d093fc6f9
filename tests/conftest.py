"""Shared fixtures and the `case` marker: ids of tests/cases.yaml, checked, and listed by `pytest --cases`."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from hypothesis import settings

if TYPE_CHECKING:
    import phloem

CASES_FILE = Path(__file__).parent / "cases.yaml"


def case_ids() -> list[str]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [case["id"] for case in yaml.load(CASES_FILE.read_text(), Loader=loader)["cases"]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases", action="store_true", help="print the ids of tests/cases.yaml with the number of tests that cover each"
    )


def pytest_configure(config: pytest.Config) -> None:
    """A job that a shell runs in the background ignores SIGINT, and so would the programs that tests interrupt.

    Hypothesis draws the same examples in each run of the default suite, so that a change is judged by what it changes; `make test-all`
    draws new ones.
    """
    if config.getoption("markexpr") == "not slow":
        settings.register_profile("same", derandomize=True, deadline=None)
        settings.load_profile("same")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    known = dict.fromkeys(case_ids(), 0)
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(3600))  # minutes of work on two idle cores; far more beside other work
        for marker in item.iter_markers("case"):
            for case in marker.args:
                if case not in known:
                    raise pytest.UsageError(f"{item.nodeid} cites case {case!r}, which tests/cases.yaml does not have.")
                known[case] += 1
    if config.getoption("--cases"):
        for case, count in known.items():
            print(f"{case:14} {count or '-'}")
        items.clear()


@pytest.fixture(scope="session")
def engine() -> Iterator[phloem.Engine]:
    """The embedded model on the `cpu` backend, shared by tests that leave it idle."""
    import phloem

    with phloem.Engine(kv_tokens=8192) as shared:
        yield shared


@pytest.fixture
def idle_engine(engine: phloem.Engine) -> Iterator[phloem.Engine]:
    """The shared engine with an empty tree; afterwards nothing may be live or pinned (P2)."""
    engine.flush()
    yield engine
    engine.check()
    stats = engine.stats()
    assert stats.running == stats.waiting == 0
    assert stats.pages_live == 0
