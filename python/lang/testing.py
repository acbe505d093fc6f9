"""Programs without weights: the engine is the real one (planner, tree, grammars), what the model says is written down (U10).

    backend = ph.Scripted({"severity": "high", "step": ["look", "act"]})
    run = triage.run(mail="…", backend=backend)                           the same Requests, in the same tree

A scripted text that breaks its gen's grammar, or a gen that the script does not know, fails the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from phloem.lang.backend import Capabilities, EngineBackend, Job, Record
from phloem.lang.script import Script, ScriptedDevice
from phloem.runtime.engine.client import InprocClient
from phloem.runtime.engine.core import CoreSettings, EngineCore
from phloem.runtime.engine.grammars import Grammars, vocabulary_of
from phloem.runtime.engine.stats import EngineStats
from phloem.runtime.errors import ProgramError
from phloem.runtime.text.parts import TokenizerParts
from phloem.runtime.text.pieces import byte_level_alphabet
from phloem.runtime.text.tokenizer import Tokenizer

__all__ = ["CHATML", "Scripted", "byte_tokenizer"]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer(template: str | None = CHATML) -> Tokenizer:
    """One token a byte, then <|im_start|> and <|im_end|>: an output has as many tokens as its text has bytes, and one for the end."""
    backend = tokenizers.Tokenizer(models.BPE(dict(byte_level_alphabet()), []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    end = backend.token_to_id("<|im_end|>")
    assert end is not None
    templates = {} if template is None else {"default": template}
    return Tokenizer(TokenizerParts(backend, {"eos_token": "<|im_end|>"}, frozenset((end,)), templates))


class Scripted:
    """A backend that says what it is told.

    script: texts by the name of the gen or select. A text answers every time, a list once each, in the order in which gens are recorded; what is no
        text is written as JSON. Or a function (record, prompt text) -> text.
    tokenizer: None for `byte_tokenizer()`.   kv_tokens: size of the pool, rounded down to whole pages.   max_context: prompt and output.
    """

    def __init__(
        self,
        script: Mapping[str | None, Any] | Callable[[Record, str], Any],
        tokenizer: Tokenizer | None = None,
        *,
        page_size: int = 16,
        kv_tokens: int = 65_536,
        max_context: int = 8192,
        max_running: int = 256,
        max_step_tokens: int = 2048,
        capabilities: Capabilities | None = None,
    ) -> None:
        self.tokenizer = tokenizer if tokenizer is not None else byte_tokenizer()
        width, num_pages = self.tokenizer.vocab_size, kv_tokens // page_size
        ends = frozenset(self.tokenizer.eos_ids)
        grammars = Grammars(lambda: vocabulary_of(self.tokenizer, ends, width), self.tokenizer.eos_id)
        self._device = ScriptedDevice(self.tokenizer, page_size=page_size, num_pages=num_pages, width=width)
        settings = CoreSettings(
            page_size=page_size,
            num_pages=num_pages,
            max_context=min(max_context, num_pages * page_size),
            vocab_size=width,
            width=width,
            max_running=max_running,
            max_step_tokens=max_step_tokens,
            eos_ids=ends,
            seed=0,
        )
        self.client = InprocClient(EngineCore(settings, self._device, grammar=grammars), on_close=grammars.close)
        self._script = Script(script, self.tokenizer)
        self._unanswered: dict[Job, ProgramError] = {}
        self._backend = _ScriptedBackend(
            self.client,
            self.tokenizer,
            name="scripted",
            page_size=page_size,
            max_context=settings.max_context,
            kv_tokens=num_pages * page_size,
            capabilities=capabilities or Capabilities(),
            keep=self,
        )

    def lang_backend(self) -> EngineBackend:
        return self._backend

    def prepare(self, job: Job) -> None:
        """Write down what a job gets, in the order in which jobs are recorded: how a stage is arranged changes nothing (Y4)."""
        try:
            self._device.texts[job.request.id] = self._script.answer(job)
        except ProgramError as error:
            self._unanswered[job] = error

    def answered(self, jobs: Sequence[Job]) -> list[Job]:
        """Those without an answer fail."""
        good = []
        for job in jobs:
            error = self._unanswered.pop(job, None)
            if error is None:
                good.append(job)
            else:
                job.fail(error)
        return good

    @property
    def forwards(self) -> int:
        """Steps that computed something."""
        return self._device.forwards

    def stats(self) -> EngineStats:
        return self._call("stats")  # type: ignore[no-any-return]

    def flush(self) -> int:
        """Empty the tree, but for what is held. Returns the pages freed."""
        return int(self._call("flush"))

    def check(self) -> None:
        """Raises AssertionError if the page accounting is broken."""
        self._call("check")

    def _call(self, verb: Any) -> Any:
        future = self.client.call(verb)
        self.client.run(future.done)
        return future.result()

    def close(self) -> None:
        self.client.close()

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _ScriptedBackend(EngineBackend):
    def prepare(self, job: Job) -> None:
        self.keep.prepare(job)

    def submit(self, jobs: Sequence[Job]) -> None:
        super().submit(self.keep.answered(jobs))
