"""llguidance as a GrammarBackend: open JSON Schema, Lark, and the regexes and choices too large for token_fsm.

Its mask is canonical by itself, and `compute_ff_tokens` is the run (J9); permissive wraps the grammar in `no_forcing` (J4). Two
of its switches would unsay the schema, `lenient` and `coerce_one_of`: never set, and `x-guidance` of a schema never reaches it.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phloem.runtime.errors import GrammarError
from phloem.runtime.grammar.base import AuditReport, Limits, NotMine, mask_mode, version_of
from phloem.runtime.grammar.engine_cursor import EngineCursor, Rules
from phloem.runtime.grammar.free_text import free_strings
from phloem.runtime.grammar.regex_syntax import parse_regex, portable_pattern
from phloem.runtime.grammar.vocabulary import Vocabulary
from phloem.runtime.grammar.whitespace import llguidance_options
from phloem.runtime.request import GrammarSpec

__all__ = ["LLGuidance"]

NBYTES = 1 << 20
"""What a compiled grammar counts as: the engine tells no size (C5)."""

_lock = threading.Lock()
_tokenizers: weakref.WeakKeyDictionary[Vocabulary, Any] = weakref.WeakKeyDictionary()


class LLGuidance:
    """Follows base.GrammarBackend. Kinds: json_schema, json_object, lark, regex, choices."""

    name = "llguidance"

    def __init__(self) -> None:
        self.version = version_of("llguidance")

    def compile(self, spec: GrammarSpec, vocabulary: Vocabulary, limits: Limits) -> LLGrammar:
        """Raises GrammarError for what it refuses, NotMine for EBNF and structural tags."""
        import llguidance

        grammar = _grammar_of(spec)
        # The engine's message may quote the schema; whose, the log of another tenant need not know.
        bounds = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(_tokenizer(vocabulary, _is_json(spec)), grammar, log_level=0, limits=bounds)
        if matcher.is_error():
            raise _refusal(spec, matcher.get_error())
        report = AuditReport(
            backend=self.name,
            version=self.version,
            mask_mode=mask_mode(spec),
            whitespace=spec.json_whitespace if _is_json(spec) else None,
        )
        free = free_strings(spec.source or "{}", vocabulary.longest) if _is_json(spec) else None
        return LLGrammar(matcher, Rules(vocabulary, report.mask_mode == "canonical", spec.open_end, free), report)


@dataclass(frozen=True, slots=True)
class LLGrammar:
    """Follows base.CompiledGrammar. The matcher is the start state, and never moves."""

    matcher: Any
    rules: Rules
    report: AuditReport
    nbytes: int = NBYTES

    def cursor(self, tail: Sequence[int] = ()) -> EngineCursor:
        return EngineCursor(_Matcher(self.matcher.deep_copy()), self.rules)  # it takes its left context from its own tokens


class _Matcher:
    __slots__ = ("_m",)

    def __init__(self, matcher: Any) -> None:
        self._m = matcher

    def mask(self, row: NDArray[np.int32]) -> None:
        self._m.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._m.is_error():
            raise GrammarError(f"the constraint is too complex to follow: {_first_line(self._m.get_error())}")

    def complete(self) -> bool:
        return bool(self._m.is_accepting())

    def accept(self, token: int) -> bool:
        # An illegal one would poison the matcher for good (G3). None comes: EngineCursor has seen its bit in the mask, or it is a run's.
        return bool(self._m.consume_token(token))

    def rollback(self, n: int) -> None:
        if not self._m.rollback(n):
            raise AssertionError(f"llguidance did not roll back {n} tokens: {self._m.get_error()}")

    def fork(self) -> _Matcher:
        return _Matcher(self._m.deep_copy())

    def run(self, tail: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self._m.compute_ff_tokens())


def _tokenizer(vocabulary: Vocabulary, json_slices: bool) -> Any:
    """One a vocabulary: 0.1 s for 49 k tokens."""
    import llguidance

    with _lock:
        pair = _tokenizers.get(vocabulary)
        if pair is None:
            plain = llguidance.LLTokenizer(
                llguidance.TokenizerWrapper(_Words(vocabulary)), n_vocab=vocabulary.width, eos_token=list(vocabulary.stop_ids)
            )
            assert plain.is_canonical, "llguidance takes this tokenizer for one whose encoding it cannot ask"
            pair = _tokenizers[vocabulary] = (plain, plain.with_slices(llguidance.LLTokenizer.json_slices()))
        return pair[json_slices]


class _Words:
    """A Vocabulary as TokenizerWrapper wants it. Specials and stop ids are no text (G6)."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._encode = vocabulary.encode
        self.eos_token_id = vocabulary.stop_ids[0]
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = sorted(vocabulary.special_ids.union(vocabulary.stop_ids))

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text.decode() if isinstance(text, bytes) else text)


def _is_json(spec: GrammarSpec) -> bool:
    return spec.kind in ("json_schema", "json_object")


def _grammar_of(spec: GrammarSpec) -> str:
    import llguidance

    if _is_json(spec):
        schema = json.loads(spec.source) if spec.kind == "json_schema" else {"type": "object"}
        options: Any = {**llguidance_options(spec.json_whitespace), "json_allow_general_unicode_escapes": True}
        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        if mask_mode(spec) == "canonical":
            return str(llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options))
        return _unforced(f"start: %json {json.dumps({**schema, 'x-guidance': options})}")
    if spec.kind == "regex":
        lark = f"start: /{portable_pattern(parse_regex(spec.source))}/"
    elif spec.kind == "choices":
        lark = "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(spec.source))
    elif spec.kind == "lark":
        lark = spec.source
    else:
        raise NotMine(spec.kind)
    return lark if mask_mode(spec) == "canonical" else _unforced(lark)


def _unforced(lark: str) -> str:
    """With no_forcing, beside whatever options the grammar opens with."""
    options: dict[str, Any] = {}
    if lark.lstrip().startswith("%llguidance"):
        head = lark.lstrip().removeprefix("%llguidance").lstrip()
        try:
            options, end = json.JSONDecoder().raw_decode(head)
        except ValueError:
            return lark  # the engine says what is wrong with it
        lark = head[end:]
    return f"%llguidance {json.dumps({**options, 'no_forcing': True})}\n{lark}"


def _refusal(spec: GrammarSpec, message: str) -> GrammarError:
    json_schema = spec.kind == "json_schema"
    return GrammarError(
        f"the {spec.kind.replace('_', ' ')} cannot be compiled: {_first_line(message)}",
        param=spec.kind,
        code="invalid_json_schema" if json_schema else "invalid_grammar",
    )


def _first_line(message: str) -> str:
    return next((line.strip() for line in message.splitlines() if line.strip()), "no reason given")[:200]
