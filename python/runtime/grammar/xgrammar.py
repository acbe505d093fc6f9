"""xgrammar as a GrammarBackend: closed JSON Schema that passed its audit, EBNF, structural tags.

    static:  every mask of the grammar is made while compiling; fills take microseconds
    dynamic: masks are made when first needed; compiles in a millisecond whatever the grammar

A compile gets the static grammar if that takes at most 50 ms; else it starts on the dynamic one while the static one is finished
in the background, for later cursors (F7). The vocabulary is raw bytes; specials are prefixed with 0xFF, which no text is (G6).
"""

from __future__ import annotations

import functools
import json
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as NotYet
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phloem.runtime.errors import GrammarError
from phloem.runtime.grammar.base import AuditReport, Limits, NotMine, mask_mode, version_of
from phloem.runtime.grammar.engine_cursor import EngineCursor, Rules
from phloem.runtime.grammar.forced import canonical_run
from phloem.runtime.grammar.free_text import free_strings
from phloem.runtime.grammar.vocabulary import Vocabulary
from phloem.runtime.grammar.whitespace import xgrammar_options
from phloem.runtime.grammar.xgrammar_text import of_whole_characters, repaired
from phloem.runtime.request import GrammarSpec

__all__ = ["XGrammar"]

STATIC_SECONDS = 0.05
MAX_RUNS = 4096
"""Remembered canonical runs of one grammar."""

_lock = threading.Lock()
_one_static = threading.Lock()  # static compiles take turns: a large one must not take every core
_compilers: weakref.WeakKeyDictionary[Vocabulary, tuple[Any, Any]] = weakref.WeakKeyDictionary()
_infos: weakref.WeakKeyDictionary[Vocabulary, Any] = weakref.WeakKeyDictionary()


class XGrammar:
    """Follows base.GrammarBackend. Kinds: json_schema, ebnf, structural_tag.

    static_seconds: how long a compile waits for the static grammar; 0 takes the dynamic one and never makes the other.
    """

    name = "xgrammar"

    def __init__(self, static_seconds: float = STATIC_SECONDS) -> None:
        self.version = version_of("xgrammar")
        self._static_seconds = static_seconds

    def compile(self, spec: GrammarSpec, vocabulary: Vocabulary, limits: Limits) -> XGrammarGrammar:
        """Raises GrammarError for what it refuses, NotMine for other kinds."""
        if spec.kind not in ("json_schema", "ebnf", "structural_tag"):
            raise NotMine(spec.kind)
        static, dynamic = _compilers_of(vocabulary)
        report = AuditReport(
            backend=self.name,
            version=self.version,
            mask_mode=mask_mode(spec),
            whitespace=spec.json_whitespace if spec.kind == "json_schema" else None,
        )
        free = free_strings(spec.source, vocabulary.longest) if spec.kind == "json_schema" else None
        rules = Rules(vocabulary, report.mask_mode == "canonical", spec.open_end, free)

        def made_of(compiled: Any) -> XGrammarGrammar:
            grammar = XGrammarGrammar(compiled, rules, report)
            if spec.kind == "structural_tag" and not _names_tokens(json.loads(spec.source)):
                grammar.text_only = _text_only(vocabulary)  # free text is any bytes, those of special tokens too (G6)
            return grammar

        if not self._static_seconds:
            return made_of(_compile(dynamic, spec))
        later: Future[Any] = Future()
        # A daemon: nothing can stop a thread inside the engine, and no program should wait for one at its end.
        threading.Thread(target=_finish, args=(later, static, spec), name="phloem-xgrammar", daemon=True).start()
        try:
            return made_of(later.result(self._static_seconds))
        except NotYet:
            made = made_of(_compile(dynamic, spec))
            made.later = later
            later.add_done_callback(made.adopt)
            return made


class XGrammarGrammar:
    """Follows base.CompiledGrammar. rejected_runs: canonical runs that the engine refused; none was forced."""

    def __init__(self, compiled: Any, rules: Rules, report: AuditReport) -> None:
        self._compiled, self.rules, self.report = compiled, rules, report
        self.rejected_runs = 0
        self.later: Future[Any] | None = None  # the static grammar, while it is made
        self.text_only: NDArray[np.int32] | None = None
        self.runs: dict[tuple[tuple[int, ...], str, bytes], tuple[int, ...]] = {}

    @property
    def nbytes(self) -> int:
        return int(self._compiled.memory_size_bytes)

    def adopt(self, static: Future[Any]) -> None:
        """The static grammar is there: later cursors use it. If it failed, the dynamic one goes on serving."""
        if static.exception() is None:
            self.use(static.result())

    def use(self, compiled: Any) -> None:
        """Serve later cursors from this grammar of xgrammar's, of the same source."""
        self._compiled = compiled

    def static_is_there(self, timeout: float) -> bool:
        """Wait for the static grammar. False: not within `timeout` seconds."""
        if self.later is not None:
            wait([self.later], timeout)
        return self.later is None or self.later.done()

    def cursor(self, tail: Sequence[int] = ()) -> EngineCursor:
        import xgrammar

        return EngineCursor(_Matcher(xgrammar.GrammarMatcher(self._compiled), self), self.rules, tail)


class _Matcher:
    __slots__ = ("_grammar", "_m")

    def __init__(self, matcher: Any, grammar: XGrammarGrammar) -> None:
        self._m, self._grammar = matcher, grammar

    def mask(self, row: NDArray[np.int32]) -> None:
        self._m.fill_next_token_bitmask(row)
        if self._grammar.text_only is not None:
            np.bitwise_and(row, self._grammar.text_only, out=row)

    def complete(self) -> bool:
        return bool(self._m.is_completed())

    def accept(self, token: int) -> bool:
        return bool(self._m.accept_token(token))

    def rollback(self, n: int) -> None:
        self._m.rollback(n)

    def fork(self) -> _Matcher:
        return _Matcher(self._m.fork(), self._grammar)

    def run(self, tail: tuple[int, ...]) -> tuple[int, ...]:
        """J9: the tokens which the tokenizer itself would write for what is forced."""
        text = self._m.find_jump_forward_string()
        if not text:
            return ()
        vocabulary = self._grammar.rules.vocabulary
        behind = np.empty(vocabulary.num_words, np.int32)
        if not self._m.accept_string(text):
            return ()
        self._m.fill_next_token_bitmask(behind)
        self._m.rollback(1)
        key = (tail, text, behind.tobytes())
        run = self._grammar.runs.get(key)
        if run is None:
            run = tuple(
                canonical_run(list(tail), text.encode(), lambda b: bool((behind & vocabulary.starts[b]).any()), vocabulary)
            )
            if not self._takes(run):
                self._grammar.rejected_runs += 1
                run = ()
            if len(self._grammar.runs) < MAX_RUNS:
                self._grammar.runs[key] = run
        return run

    def _takes(self, run: tuple[int, ...]) -> bool:
        taken = 0
        for token in run:
            if not self._m.accept_token(token):
                break
            taken += 1
        if taken:
            self._m.rollback(taken)
        return taken == len(run)


def _names_tokens(tag: Any) -> bool:
    """Whether a structural tag names tokens by id or spelling: those must stay legal."""
    if isinstance(tag, list):
        return any(map(_names_tokens, tag))
    if not isinstance(tag, dict):
        return False
    kind = tag.get("type")
    if isinstance(kind, str) and "token" in kind:
        return True
    return any(_names_tokens(part) for key, part in tag.items() if key != "json_schema")


def _text_only(vocabulary: Vocabulary) -> NDArray[np.int32]:
    row = np.full(vocabulary.num_words, 0xFFFFFFFF, np.uint32)
    for i in vocabulary.special_ids.difference(vocabulary.stop_ids):
        row[i >> 5] &= np.uint32(~(1 << (i & 31)) & 0xFFFFFFFF)
    return row.view(np.int32)


def compile_static(spec: GrammarSpec, vocabulary: Vocabulary) -> Any:
    """xgrammar's own static grammar, however long that takes."""
    return _compile(_compilers_of(vocabulary)[0], spec)


def read_static(blob: str, vocabulary: Vocabulary) -> Any:
    """What `serialize_json` of a static grammar wrote, for the same vocabulary."""
    import xgrammar

    return xgrammar.CompiledGrammar.deserialize_json(blob, _infos[vocabulary])


def _finish(later: Future[Any], compiler: Any, spec: GrammarSpec) -> None:
    with _one_static:
        try:
            later.set_result(_compile(compiler, spec))
        except BaseException as error:
            later.set_exception(error)


def _compilers_of(vocabulary: Vocabulary) -> tuple[Any, Any]:
    """(static, dynamic), one pair a vocabulary. The engine's own caches are off: ours is bounded and knows what a key is (C5)."""
    import xgrammar

    with _lock:
        pair = _compilers.get(vocabulary)
        if pair is None:
            hidden = vocabulary.special_ids.difference(vocabulary.stop_ids)
            words = [b"\xff" + word if i in hidden else word for i, word in enumerate(vocabulary.tokens)]
            info = xgrammar.TokenizerInfo(
                words, xgrammar.VocabType.RAW, vocab_size=vocabulary.width, stop_token_ids=list(vocabulary.stop_ids)
            )
            _infos[vocabulary] = info
            make: Callable[..., Any] = functools.partial(xgrammar.GrammarCompiler, info, max_threads=1, cache_enabled=False)
            pair = _compilers[vocabulary] = (make(), make(enable_dynamic_compilation=True))
        return pair


def _compile(compiler: Any, spec: GrammarSpec) -> Any:
    from xgrammar import Grammar

    try:
        if spec.kind == "json_schema":
            options = xgrammar_options(spec.json_whitespace)
            text = repaired(str(Grammar.from_json_schema(spec.source, strict_mode=False, **options)))
        elif spec.kind == "structural_tag":
            text = repaired(str(Grammar.from_structural_tag(spec.source)), spec.json_whitespace)
        else:
            text = of_whole_characters(str(Grammar.from_ebnf(spec.source)))
        return compiler.compile_grammar(text)
    except Exception as error:  # its errors are RuntimeErrors and classes of its own, all about the source
        message = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]
        raise GrammarError(
            f"the {spec.kind.replace('_', ' ')} cannot be compiled: {message}",
            param=spec.kind,
            code="invalid_json_schema" if spec.kind == "json_schema" else "invalid_grammar",
        ) from None
