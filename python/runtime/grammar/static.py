"""xgrammar's static grammars of vetted specs, made in idle moments: their masks are quicker, and later cursors use them (F7, C4).

    want(grammar, spec) -> queue -> one thread: worker, when no request has to do with one -> here: compile again, or read it

The thread lives as long as there is something to make. A grammar that nobody keeps any more is not made.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from phloem.runtime.errors import PhloemError
from phloem.runtime.grammar.compile import Workers
from phloem.runtime.grammar.vocabulary import Vocabulary
from phloem.runtime.grammar.xgrammar import XGrammarGrammar, compile_static, read_static
from phloem.runtime.request import GrammarSpec

__all__ = ["Statics"]

MOST_WANTED = 256
"""Under a steady stream of new schemas no idle moment comes: the oldest ones are given up, their dynamic grammars serve on."""


class Statics:
    """Thread-safe. vocabulary: is there already when something is wanted."""

    def __init__(self, workers: Workers, vocabulary: Callable[[], Vocabulary]) -> None:
        self._workers, self._vocabulary = workers, vocabulary
        self._lock = threading.Lock()
        self._wanted: deque[tuple[weakref.ref[XGrammarGrammar], GrammarSpec]] = deque(maxlen=MOST_WANTED)
        self._running = False

    def want(self, grammar: XGrammarGrammar, spec: GrammarSpec) -> None:
        """spec: the vetted one, with the lowered source. Returns at once."""
        with self._lock:
            self._wanted.append((weakref.ref(grammar), spec))
            if not self._running:
                self._running = True
                # A daemon: no program should wait at its end for an idle moment.
                threading.Thread(target=self._run, name="phloem-grammar-static", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._wanted:
                    self._running = False
                    return
                kept, spec = self._wanted.popleft()
            if kept() is not None:
                # A refusal here is of the static form alone, as memory that only this one takes.
                with suppress(PhloemError):
                    self._make(kept, spec)

    def _make(self, kept: weakref.ref[XGrammarGrammar], spec: GrammarSpec) -> None:
        static, vocabulary = self._workers.static(spec), self._vocabulary()
        grammar = kept()
        if static is not None and grammar is not None:
            grammar.use(compile_static(spec, vocabulary) if static.blob is None else read_static(static.blob, vocabulary))
