"""The dialect: what it accepts matches under Python's `re` and under its ASCII reading; what it can't say is refused by name."""

from __future__ import annotations

import itertools
import random
import re
import unicodedata

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from phloem.runtime.errors import GrammarError
from phloem.runtime.grammar.base import Limits, NotMine
from phloem.runtime.grammar.byte_dfa import DEAD, START, ByteDfa, dfa_of_texts
from phloem.runtime.grammar.regex_classes import complement, union
from phloem.runtime.grammar.regex_dfa import dfa_of_regex
from phloem.runtime.grammar.regex_syntax import parse_regex, portable_pattern
from phloem.runtime.grammar.token_fsm import TokenFsm
from phloem.runtime.grammar.vocabulary import Vocabulary


def compiled(pattern: str) -> ByteDfa:
    return dfa_of_regex(parse_regex(pattern))


def matches(dfa: ByteDfa, data: bytes | str) -> bool:
    state = DEAD if dfa.is_empty else dfa.walk(START, data.encode() if isinstance(data, str) else data)
    return bool(state) and bool(dfa.accept[state])


CORNERS = ["(k|)m", "((1|2|)[0-9]-){2}z", "^x$", "a$|b", "(?:ab)+?", "x*", "", "^(?:a|b)$", "(^a|b)c?", "a(b$|c)", "(?P<n>a)b"]
SHAPES = [
    "abab", "ab(ab)?", "(a|b)*a(a|b){2}", "a{2,4}b{0,2}", "(a?b?){2,3}", "(a*)*", "(a|ab)(c|bcd)", "(a?){3}b", "((a{0,2})b){1,3}",
    "(ab){2,}c?", "a{3,}", "(a|b?){2,}", "a{0}b", "(a{0,1}){0}b?", "a|", "()|()", "(|a)+", "((((a))))", "a??b*?c+?", "(a+)+", "x{a}", "x{", "}]", "[a-]",
    "[-a]", r"[\]a]", "[a^]", "[^^a]", r"a\.b", r"\-\/\!", r"[\b]|a", r"\x61\u0062", r"[\d-]", "[a-c-]", "[.$|(){}*+?]", "a{2}{", r"\0?a",
]  # fmt: skip


@pytest.mark.case("C-STRUCT-12")
@pytest.mark.parametrize("pattern", CORNERS + SHAPES)
def test_the_language_is_pythons(pattern: str) -> None:
    dfa = compiled(pattern)
    for alphabet in ("ab", "abc", "xkm12z-", "^$.|", "a{2}]-^", "0\x00\x08a."):
        for n in range(6 if len(alphabet) < 5 else 4):
            for t in map("".join, itertools.product(alphabet, repeat=n)):
                assert matches(dfa, t) == bool(re.fullmatch(pattern, t)), t


@pytest.mark.case("C-STRUCT-12")
@pytest.mark.parametrize("pattern", CORNERS)
def test_samples_of_the_corners_match(pattern: str, smollm2: Vocabulary) -> None:
    for text in sampled(pattern, smollm2, 10, max_tokens=40):
        assert re.fullmatch(pattern, text), text


@pytest.mark.case("C-STRUCT-02", "C-STRUCT-12")
@pytest.mark.parametrize(
    ("pattern", "named"),
    [
        ("[]a]", "']' first in a class"), ("[^]", "']' first in a class"), ("a{,3}", "'{,'"), (r"\bword\b", "a word boundary"),
        (r"a\B", "a word boundary"), ("(?i)yes", "a flag"), ("(?i:a)", "a flag"), (r"(a)\1", "a backreference"), (r"\k<x>", "a backreference"),
        ("(?P<x>a)(?P=x)", "a backreference"), ("(?<x>a)", "a group named"), ("(?=a)b", "look-ahead"), ("a(?!b)", "look-ahead"),
        ("(?<=a)b", "look-behind"), ("(?<!a)b", "look-behind"), ("a{3,1}", "wrong way round"), (r"\p{L}+", "a Unicode property"),
        (r"\P{L}", "a Unicode property"), ("[[:alpha:]]", "a POSIX class"), ("a**", "a quantifier on a quantifier"),
        ("a*+", "possessive"), ("a{2}+", "possessive"), ("(?>a)", "an atomic group"), ("(?(1)a|b)", "a conditional"),
        ("(?#x)", "a comment"), ("{2}", "repeats nothing"), ("*a", "repeats nothing"), ("a|+", "repeats nothing"), ("^*", "is repeated"),
        ("a^b", "in the middle"), ("a$b", "in the middle"), ("(^a)*", "in the middle"), ("(a$)+", "in the middle"), ("[a", "never ends"),
        ("(a", "never ends"), ("a)", "closes nothing"), ("a\\", "a backslash at the end"), ("[z-a]", "wrong way round"),
        (r"[\w-x]", "a range that ends in a class"), (r"[a-\d]", "a range that ends in a class"), (r"\x4", "unfinished"),
        (r"\u12", "unfinished"), (r"\u{61}", "unfinished"), (r"\ud83d\ude00", "half a surrogate"), ("\ud83d", "half a surrogate"),
        (r"\A", "no one meaning"), (r"\Z", "no one meaning"), (r"\cA", "no one meaning"), (r"\a", "no one meaning"), (r"\01", "a backreference"),
        ("(" * 65 + ")" * 65, "nested deeper"), ("((a{1,1000}){1,1000})", "repeats 1000000 times"), ("a" * 4097, "4097 bytes"),
    ],
)  # fmt: skip
def test_what_is_refused_is_named(pattern: str, named: str) -> None:
    """F1, C1: a 400 that says what, where, and what to do. The same on repeat."""
    for _ in range(2):
        with pytest.raises(GrammarError, match=re.escape(named)) as caught:
            parse_regex(pattern)
        assert caught.value.param == "regex" and caught.value.status == 400 and caught.value.code == "invalid_grammar"


@pytest.mark.case("C-STRUCT-02")
def test_a_needless_escape_is_the_character() -> None:
    assert matches(compiled(r"^abc\!$"), "abc!") and not matches(compiled(r"^abc\!$"), r"abc\!")


# ------------------------------------------------------------------------------------------------------------- Unicode

UNICODE = ["[é]{2}", "[à-ÿ]{3}", "[^a]{2}", "[一-龥]{2}", "😀+x", "(é|ü)z", ".", r"\w{2}", r"\W", r"\D\d", r"\s\S", "[^\\s\\w]"]


@pytest.mark.case("C-STRUCT-11")
@pytest.mark.parametrize("pattern", UNICODE)
def test_samples_match_under_both_readings(pattern: str, smollm2: Vocabulary) -> None:
    """Valid UTF-8, characters counted as one, and `re.fullmatch` with Unicode and with ASCII classes."""
    for text in sampled(pattern, smollm2, 10, max_tokens=20):
        assert re.fullmatch(pattern, text) and re.fullmatch(pattern, text, re.ASCII), text


def test_classes_are_complete_over_all_characters() -> None:
    """Every character, against `re`: accepted if and only if every reading accepts it."""
    ecma_space = "[\t\n\v\f\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff]"
    readings = {
        r"\d": [r"\d", "[0-9]"], r"\D": [r"\D", "[^0-9]"], r"\w": [r"\w", "[0-9A-Za-z_]"], r"\W": [r"\W", "[^0-9A-Za-z_]"],
        r"\S": [r"\S", "[^" + ecma_space[1:]], ".": [".", "[^\n\r\u2028\u2029]"], "[^a-é]": ["[^a-é]"], r"[^\d\W]": [r"[^\d\W]", "[a-zA-Z_]"],
    }  # fmt: skip
    rng = random.Random(0)
    points = {*range(0x3100), *rng.sample(range(0x110000), 3000), *range(0x10FF00, 0x110000), *range(0xFE00, 0x10100)}
    for pattern, wanted in readings.items():
        dfa, checks = compiled(pattern), [re.compile(w) for w in wanted]
        for point in points:
            if not 0xD800 <= point <= 0xDFFF:
                expected = all(check.fullmatch(chr(point)) for check in checks)
                assert matches(dfa, chr(point)) == expected, (pattern, hex(point), unicodedata.name(chr(point), "?"))
    space = compiled(r"\s")
    assert {chr(p) for p in points if not 0xD800 <= p <= 0xDFFF and matches(space, chr(p))} == set("\t\n\v\f\r ")


@given(data=st.binary(max_size=5))
@settings(max_examples=500, deadline=None)
def test_bytes_that_are_no_utf8_never_match(data: bytes) -> None:
    try:
        expected = len(data.decode()) == 1
    except UnicodeDecodeError:
        expected = False
    assert matches(ANYTHING, data) == expected


ANYTHING = compiled(r"[\s\S]|[^\s]")


@given(st.lists(st.tuples(st.integers(0, 0x10FFFF), st.integers(0, 3000)), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_ranges_of_code_points_become_exactly_their_utf8(spans: list[tuple[int, int]]) -> None:
    ranges = union((a, min(a + n, 0x10FFFF)) for a, n in spans)
    assume(ranges)
    assert complement(complement(ranges)) == ranges
    dfa = compiled("[" + "".join(f"{escaped(a)}-{escaped(b)}" for a, b in ranges) + "]")
    borders = {p + d for r in ranges for p in r for d in (-1, 0, 1)} | {0, 0x7F, 0x80, 0x7FF, 0x800, 0xFFFF, 0x10000}
    for point in borders:
        if 0 <= point <= 0x10FFFF and not 0xD800 <= point <= 0xDFFF:
            assert matches(dfa, chr(point)) == any(a <= point <= b for a, b in ranges)


def escaped(point: int) -> str:
    return "\\" + chr(point) if chr(point) in "]\\^-[" else chr(point)


# ---------------------------------------------------------------------------------------------------------- random trees


@st.composite
def patterns(draw: st.DrawFn, depth: int = 3) -> str:
    kind = draw(st.sampled_from(["char", "class", "cat", "alt", "repeat"] if depth else ["char", "class"]))
    if kind == "char":
        return draw(st.sampled_from(["a", "b", "é", r"\d", "."]))
    if kind == "class":
        return draw(st.sampled_from(["[ab]", "[^b]", "[a-é]", r"[\d_]"]))
    if kind == "repeat":
        inner = draw(patterns(depth - 1))
        return f"(?:{inner})" + draw(st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,3}", "{2,}", "{0}"]))
    parts = [draw(patterns(depth - 1)) for _ in range(draw(st.integers(1, 3)))]
    return "".join(parts) if kind == "cat" else "(" + "|".join([*parts, *draw(st.sampled_from([[], [""]]))]) + ")"


@settings(max_examples=150, deadline=None)
@given(patterns(), st.lists(st.text("abé1_\n", max_size=6), max_size=30))
def test_random_patterns_agree_with_re(pattern: str, texts: list[str]) -> None:
    try:
        dfa = compiled(pattern)
    except NotMine:
        return
    for text in texts:
        assert matches(dfa, text) == bool(re.fullmatch(pattern, text, re.ASCII))


@settings(max_examples=100, deadline=None)
@given(patterns())
def test_the_portable_form_says_the_same(pattern: str) -> None:
    """Written back with code points spelled as Python would."""
    written = portable_pattern(parse_regex(pattern))
    python = re.sub(r"\\x\{([0-9A-F]+)\}", lambda m: f"\\U{int(m[1], 16):08x}", written)
    for n in range(4):
        for text in map("".join, itertools.product("abé1", repeat=n)):
            assert bool(re.fullmatch(python, text)) == bool(re.fullmatch(pattern, text, re.ASCII))


def test_size_of_automata() -> None:
    """Dates take a dozen states, not the two hundred of Unicode digits."""
    assert compiled(r"\d{4}-\d{2}-\d{2}").num_states == 12
    assert compiled(".").num_states < 15


def test_states_that_lead_nowhere_are_dropped() -> None:
    dfa = compiled(r"ab[^\s\S]|ac")
    assert dfa.num_states == 4
    assert dfa.walk(START, b"ab") == DEAD
    assert compiled(r"a[^\s\S]").is_empty


@given(st.sets(st.binary(min_size=1, max_size=4), min_size=1, max_size=20))
def test_tries_of_texts(texts: set[bytes]) -> None:
    dfa = dfa_of_texts(texts)
    for text in texts:
        for n in range(len(text) + 1):
            assert matches(dfa, text[:n]) == (text[:n] in texts)
        assert not matches(dfa, text + b"\x00\x00\x00\x00\x00")


def test_a_trie_over_all_bytes() -> None:
    dfa = dfa_of_texts(bytes((b, b)) for b in range(256))
    assert all(matches(dfa, bytes((a, b))) == (a == b) for a in range(256) for b in range(0, 256, 5))


def sampled(pattern: str, v: Vocabulary, n: int, max_tokens: int) -> list[str]:
    """Texts of random legal tokens that came to an end."""
    grammar = TokenFsm().regex(pattern, v, Limits())
    row, texts = np.zeros(v.num_words, np.int32), []
    for seed in range(n):
        rng, cursor, ids = random.Random(seed), grammar.cursor(), []
        for _ in range(max_tokens):
            if cursor.done:
                break
            cursor.fill(row)
            legal = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            assert len(legal)
            ends = [i for i in v.stop_ids if i in legal]
            ids.append(ends[0] if ends and rng.random() < 0.3 else int(legal[rng.randrange(len(legal))]))
            assert cursor.accept(ids[-1])
        if cursor.done:
            texts.append(v.join(i for i in ids if i not in v.stop_ids).decode())
    assert texts
    return texts
