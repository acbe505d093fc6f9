"""Parts of an engine without weights: the real core over the scripted device, text whose ids are bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phloem.runtime.config import Hardware, make_config, resolve
from phloem.runtime.engine.build import Parts
from phloem.runtime.engine.collect import Collector
from phloem.runtime.engine.core import CoreSettings, EngineCore
from phloem.runtime.errors import InvalidRequestError
from phloem.runtime.request import Request
from phloem.runtime.step import StepPlan
from phloem.runtime.text.detokenizer import Detokenizer
from tests.fakes import ScriptedExecutor, ScriptedTicket

VOCABULARY = 128
EOS = 0


class Bytes:
    """A tokenizer whose ids are ASCII codes."""

    special_ids: frozenset[int] = frozenset()
    vocab_size = VOCABULARY

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode()

    def detokenizer(self, skip_special_tokens: bool = True, continuation: bool = False) -> Detokenizer:
        return Detokenizer([bytes([i]) for i in range(VOCABULARY)])


class ByteText:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        if any("content" not in m for m in messages):
            raise InvalidRequestError("messages[0].content is missing.", param="messages[0].content")
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>")

    def collector(self, request: Request) -> Collector:
        return Collector(request, Bytes())  # type: ignore[arg-type]


class SlowExecutor(ScriptedExecutor):
    """pause: seconds a step takes.   started: set at each launch.   hook: called at each launch."""

    pause = 0.0
    hook: Callable[[], None] | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.started = threading.Event()

    def launch(self, plan: StepPlan) -> ScriptedTicket:
        self.started.set()
        if self.hook is not None:
            self.hook()
        if self.pause:
            time.sleep(self.pause)
        return super().launch(plan)


def parts(pause: float = 0.0, **options: Any) -> Parts:
    """Parts for `Engine.from_parts`; `parts.core.executor` is the SlowExecutor."""
    config = make_config(None, **{"kv_tokens": 1024, "page_size": 4, "seed": 1, **options})
    resolved = resolve(
        config, Hardware(cores=1, memory_bytes=2**30), model_context=512, kv_bytes_per_token_f32=4, weight_bytes=0
    )
    executor = SlowExecutor(config.page_size, resolved.num_pages, VOCABULARY)
    executor.pause = pause
    settings = CoreSettings(
        page_size=config.page_size,
        num_pages=resolved.num_pages,
        max_context=resolved.max_context,
        vocab_size=VOCABULARY,
        width=VOCABULARY,
        max_running=config.max_running,
        max_step_tokens=config.max_step_tokens,
        policy=config.policy,
        overlap=resolved.overlap,
        cache_enabled=config.cache_mode == "on",
        eos_ids=frozenset({EOS}),
        seed=config.seed,
    )
    core = EngineCore(settings, executor)  # type: ignore[arg-type]
    return Parts(core, ByteText(), Bytes(), config, resolved, lambda: None)  # type: ignore[arg-type]
