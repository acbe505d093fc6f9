"""Every RolloutEngine that a test of this folder makes is checked when the test ends: pages balanced, none live (rl I17)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from phloem import rl
from tests.rl.tiny import attach, tiny_module


@pytest.fixture
def engines() -> Iterator[list[rl.RolloutEngine]]:
    made: list[rl.RolloutEngine] = []
    yield made
    for engine in made:
        if not engine._client.closed:  # type: ignore[attr-defined]
            engine.check()
            stats = engine.stats().engine
            assert stats.running == stats.waiting == 0
            assert stats.pages_live == 0
        engine.close()


@pytest.fixture
def attached(engines: list[rl.RolloutEngine]) -> Callable[..., tuple[Any, rl.RolloutEngine]]:
    """attached(**options) -> (module, engine). `module=`, or tiny_module's arguments in `of`."""

    def make(module: Any = None, of: dict[str, Any] | None = None, **options: Any) -> tuple[Any, rl.RolloutEngine]:
        module = tiny_module(**(of or {})) if module is None else module
        engine = attach(module, **options)
        engines.append(engine)
        return module, engine

    return make


@pytest.fixture
def grammar_engine(attached: Callable[..., tuple[Any, rl.RolloutEngine]], tmp_path: Path) -> tuple[Any, rl.RolloutEngine]:
    """The tiny task's model and tokenizer: 32 ids, digits, letters a to q, BOS 11, EOS 12."""
    from examples import grpo_arithmetic as task

    return attached(task.make_model(0), tokenizer=task.tokenizer_folder(tmp_path))
