"""An engine process for tests of the whole server: the scripted device behind a byte tokenizer, as in serving.py, in a second or less.

`tokenizer_folder(path)` writes the tokenizer that both processes load. Options of `scripted`, beside EngineConfig's fields:
directory, pause (seconds a step), load_seconds, fails ("model", "memory"), die_after (steps; the process kills itself then).
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phloem.runtime.config import Hardware, make_config, resolve
from phloem.runtime.engine import wire
from phloem.runtime.engine.child import Made, Report
from phloem.runtime.engine.core import CoreSettings, EngineCore
from phloem.runtime.engine.grammars import Grammars, vocabulary_of
from phloem.runtime.errors import ConfigError, ModelLoadError
from phloem.runtime.step import StepPlan
from phloem.runtime.text.tokenizer import Tokenizer
from tests.fakes import ScriptedExecutor, ScriptedTicket
from tests.serve.serving import BOS, CHATML, END, Script, byte_tokenizer

FACTORY = "tests.serve.child_parts:scripted"
CONTEXT, PAGES = 2048, 4096


class Paused(ScriptedExecutor):
    pause = 0.0
    die_after = 0

    def launch(self, plan: StepPlan) -> ScriptedTicket:
        time.sleep(self.pause)
        if self.die_after and self.launches >= self.die_after:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().launch(plan)


def tokenizer_folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    byte_tokenizer()._parts.backend.save(str(path / "tokenizer.json"))
    config = {"bos_token": BOS, "eos_token": END, "chat_template": CHATML, "tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def scripted(options: Mapping[str, Any], report: Report) -> Made:
    own = dict(options)
    extra = {name: own.pop(name, None) for name in ("directory", "pause", "load_seconds", "fails", "die_after")}
    report.stage("the weights")
    time.sleep(extra["load_seconds"] or 0.0)
    if extra["fails"] == "model":
        raise ModelLoadError("nowhere: no such file or directory.", param="model")
    if extra["fails"] == "memory":
        raise ConfigError("the KV pool has no room for one page of 64 bytes.", param="kv_memory")
    tokenizer = Tokenizer.from_directory(extra["directory"])
    width = tokenizer.vocab_size
    report.opened(wire.Opened(None, extra["directory"], width, "scripted", "scripted", "scripted", ["Scripted"], {}))
    report.stage("weights 50%")
    report.stage("weights 100%")
    config = make_config(**{"page_size": 4, "kv_tokens": PAGES * 4, "device": "reference", **own})
    resolved = resolve(
        config, Hardware(1, 1 << 40), model_context=CONTEXT, kv_bytes_per_token_f32=64, weight_bytes=0
    )  # fmt: skip
    executor = Paused(4, resolved.num_pages, width, logits=Script(tokenizer))
    executor.pause, executor.die_after = extra["pause"] or 0.0, extra["die_after"] or 0
    ends = frozenset((tokenizer.eos_id or 0,))
    grammars = Grammars(lambda: vocabulary_of(tokenizer, ends, width), tokenizer.eos_id)
    settings = CoreSettings(
        page_size=4, num_pages=resolved.num_pages, max_context=resolved.max_context, vocab_size=width, width=width, eos_ids=ends,
        max_running=config.max_running, max_step_tokens=config.max_step_tokens, seed=config.seed,
    )  # fmt: skip
    core = EngineCore(settings, executor, grammar=grammars)
    return Made(core, resolved, width, "abcd1234", "scripted", grammars.close, grammars)
