r"""Reads a regex of Phloem's dialect into a tree: what Python's `re` and ECMA-262 read alike, matched against the whole text.

    "(a|b)+c{2}"  ->  Cat(Repeat(Alt(a, b), 1, None), Repeat(c, 2, 2))

Anchors may stand where they must hold (at the ends), and are dropped. Refused by name: look-around, backreferences, word
boundaries, flags, possessive and atomic parts, `\p{…}`, and what the two dialects read differently (`a{,3}`, `[]a]`).
Knows nothing of bytes, automata or tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from phloem.runtime.errors import GrammarError
from phloem.runtime.grammar.base import Limits
from phloem.runtime.grammar.regex_classes import ANY, DOT, Class, Ranges, shorthand, union

__all__ = ["Alt", "Cat", "Chars", "Node", "Repeat", "parse_regex", "portable_pattern"]


@dataclass(frozen=True, slots=True)
class Chars:
    """One character out of these ranges."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Cat:
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """high: None for no bound."""

    part: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class _Anchor:
    sign: str
    at: int


Node: TypeAlias = Chars | Cat | Alt | Repeat | _Anchor

_CONTROL = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11}
_BOUNDS = re.compile(r"\{([0-9]+)(,([0-9]*))?\}")
_GROUPS = {
    "=": "look-ahead", "!": "look-ahead", "<=": "look-behind", "<!": "look-behind", ">": "an atomic group",
    "#": "a comment", "(": "a conditional", "P=": "a backreference", "P>": "a recursion", "<": "a group named by (?<…>)",
}  # fmt: skip


def parse_regex(pattern: str, limits: Limits | None = None, *, param: str = "regex") -> Node:
    """The tree of `pattern`, without anchors. Raises GrammarError that names the character, blaming `param`."""
    limits = limits or Limits()
    size = len(pattern.encode("utf-8", "replace"))
    if size > limits.pattern_bytes:
        raise GrammarError(f"the regex has {size} bytes; at most {limits.pattern_bytes} are compiled. Split it.", param=param)
    node = _Parser(pattern, limits.depth, param).parse()
    product = _repeats(node)
    if product > limits.repeats:
        raise GrammarError(
            f"the regex repeats {product} times when its nested bounds are multiplied; at most {limits.repeats}. Lower a bound.",
            param=param,
        )
    return node


class _Parser:
    def __init__(self, text: str, max_depth: int, param: str) -> None:
        self.text, self.at, self.depth, self.max_depth, self.param = text, 0, 0, max_depth, param

    def parse(self) -> Node:
        node = self.alternatives()
        if self.at < len(self.text):
            self.refuse("')' closes nothing", "escape it as \\)")
        return self.without_anchors(node, True, True)

    def refuse(self, what: str, do: str, at: int | None = None) -> NoReturn:
        where = self.at if at is None else at
        raise GrammarError(f"the regex cannot be used: {what} at character {where}; {do}.", param=self.param)

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    # ------------------------------------------------------------------------------------------------------- structure

    def alternatives(self) -> Node:
        options = [self.sequence()]
        while self.peek() == "|":
            self.at += 1
            options.append(self.sequence())
        return options[0] if len(options) == 1 else Alt(tuple(options))

    def sequence(self) -> Node:
        parts: list[Node] = []
        while (c := self.peek()) and c not in "|)":
            parts.append(self.repeated(self.atom()))
        return parts[0] if len(parts) == 1 else Cat(tuple(parts))

    def repeated(self, part: Node) -> Node:
        start = self.at
        bounds = self.bounds()
        if bounds is None:
            return part
        if isinstance(part, _Anchor):
            self.refuse(f"{part.sign!r} is repeated", "an anchor cannot be", start)
        if self.peek() == "?":  # lazy: the same texts
            self.at += 1
        elif self.peek() == "+":
            self.refuse("a possessive quantifier", "write it without the '+'")
        if self.bounds() is not None:
            self.refuse("a quantifier on a quantifier", "put the inner one in (?:…)", start)
        return Repeat(part, *bounds)

    def bounds(self) -> tuple[int, int | None] | None:
        c = self.peek()
        if c and c in "*+?":
            self.at += 1
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[c]
        if c != "{":
            return None
        if re.compile(r"\{,[0-9]*\}").match(self.text, self.at):
            self.refuse("'{,' is a bound to Python and text to ECMA", "write {0,n}, or \\{ for the character")
        found = _BOUNDS.match(self.text, self.at)
        if found is None:
            return None  # an ordinary brace, to both dialects
        low = int(found[1])
        high = low if found[2] is None else int(found[3]) if found[3] else None
        if high is not None and high < low:
            self.refuse(f"the bounds {found[0]} are the wrong way round", "expected {low,high}")
        self.at = found.end()
        return low, high

    def atom(self) -> Node:
        at, c = self.at, self.text[self.at]
        if self.bounds() is not None:
            self.refuse(f"{c!r} repeats nothing", f"escape it as \\{c} for the character", at)
        self.at += 1
        if c == "(":
            return self.group(at)
        if c == "[":
            return Chars(self.char_class(at).ranges)
        if c == ".":
            return Chars(DOT)
        if c in "^$":
            return _Anchor(c, at)
        if c == "\\":
            return Chars(self.escape(at, in_class=False).ranges)
        return Chars(self.literal(c, at))

    def literal(self, c: str, at: int) -> Ranges:
        if 0xD800 <= ord(c) <= 0xDFFF:
            self.refuse("half a surrogate pair", "it is no character", at)
        return ((ord(c), ord(c)),)

    def group(self, at: int) -> Node:
        if self.peek() == "?":
            if self.text.startswith("?:", self.at):
                self.at += 2
            elif named := re.compile(r"\?P<[A-Za-z_][A-Za-z_0-9]*>").match(self.text, self.at):
                self.at = named.end()
            else:
                rest = self.text[self.at + 1 :]
                what = next((n for n in sorted(_GROUPS, key=len, reverse=True) if rest.startswith(n)), None)
                self.refuse(
                    _GROUPS[what] if what is not None else "a flag",
                    "no engine here enforces it: rewrite the pattern with (?:…), classes and alternatives",
                    at,
                )
        self.depth += 1
        if self.depth > self.max_depth:
            self.refuse(f"groups nested deeper than {self.max_depth}", "flatten them", at)
        inner = self.alternatives()
        if self.peek() != ")":
            self.refuse("a group that never ends", "close it with ')'", at)
        self.at += 1
        self.depth -= 1
        # An anchor must stay seen through the group, a quantifier behind it must not split a Cat: (ab)* is one part.
        return inner if not isinstance(inner, _Anchor) else Cat((inner,))

    # ---------------------------------------------------------------------------------------------------------- classes

    def escape(self, at: int, in_class: bool) -> Class:
        """What stands behind a backslash, which is already read."""
        c = self.peek()
        self.at += 1
        if not c:
            self.refuse("a backslash at the end", "write \\\\ for the character", at)
        if c in "dDwWsS":
            return shorthand(c)
        point: int | None = _CONTROL.get(c)
        if c == "b" and in_class:
            point = 8
        elif c in "xu":
            digits = self.text[self.at : self.at + (2 if c == "x" else 4)]
            if not re.fullmatch(r"[0-9A-Fa-f]{2}([0-9A-Fa-f]{2})?", digits) or len(digits) != (2 if c == "x" else 4):
                self.refuse(f"an unfinished \\{c} escape", f"expected {2 if c == 'x' else 4} hexadecimal digits", at)
            self.at += len(digits)
            point = int(digits, 16)
            if 0xD800 <= point <= 0xDFFF:
                self.refuse("half a surrogate pair", "write the character itself", at)
        elif c == "0" and not self.peek().isdigit():
            point = 0
        elif c.isascii() and not c.isalnum():
            point = ord(c)
        if point is None:
            words = {"b": "a word boundary", "B": "a word boundary", "p": "a Unicode property", "P": "a Unicode property"}
            what = words.get(c, "a backreference" if c.isdigit() or c == "k" else f"\\{c}, which has no one meaning")
            self.refuse(what, "no engine here enforces it: write out the characters that you mean", at)
        return Class.of(((point, point),))

    def char_class(self, at: int) -> Class:
        negated = self.peek() == "^"
        self.at += negated
        if self.peek() == "]":
            self.refuse("']' first in a class is a member to Python and the end to ECMA", "write \\] for the character")
        members: list[Class] = []
        while True:
            low_at = self.at
            if not self.peek():
                self.refuse("a class that never ends", "close it with ']'", at)
            if self.peek() == "]":
                self.at += 1
                break
            low = self.member()
            if self.peek() == "-" and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                members.append(self.span(low, self.member(), low_at))
            else:
                members.append(low)
        found = Class.union(members)
        return found.negated() if negated else found

    def member(self) -> Class:
        at, c = self.at, self.text[self.at]
        if c == "[" and self.text[at + 1 : at + 2] in tuple(":.="):
            self.refuse("a POSIX class", "write its characters, or \\[ for the bracket")
        self.at += 1
        if c == "\\":
            return self.escape(at, in_class=True)
        return Class.of(self.literal(c, at))

    def span(self, low: Class, high: Class, at: int) -> Class:
        ends = [r[0][0] for r in (low.ranges, high.ranges) if len(r) == 1 and r[0][0] == r[0][1]]
        if len(ends) != 2:
            self.refuse("a range that ends in a class", "write \\- for the character, or put it last", at)
        if ends[0] > ends[1]:
            self.refuse("a range that is the wrong way round", "its first character must be the lower one", at)
        return Class.of(union([(ends[0], ends[1])]))

    # ---------------------------------------------------------------------------------------------------------- anchors

    def without_anchors(self, node: Node, first: bool, last: bool) -> Node:
        """`node` with its anchors dropped. first, last: nothing but anchors stands before it, behind it, in the whole text."""
        if isinstance(node, _Anchor):
            if not (first if node.sign == "^" else last):
                self.refuse(f"{node.sign!r} in the middle", f"escape it as \\{node.sign}, or move it to the end", node.at)
            return Cat(())
        if isinstance(node, Alt):
            return Alt(tuple(self.without_anchors(option, first, last) for option in node.options))
        if isinstance(node, Repeat):
            once = node.high is not None and node.high <= 1
            return Repeat(self.without_anchors(node.part, first and once, last and once), node.low, node.high)
        if isinstance(node, Cat):
            empty = [_is_empty(p) for p in node.parts]
            parts = (
                self.without_anchors(part, first and all(empty[:i]), last and all(empty[i + 1 :]))
                for i, part in enumerate(node.parts)
            )
            return Cat(tuple(parts))
        return node


def _children(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Cat):
        return node.parts
    if isinstance(node, Alt):
        return node.options
    return (node.part,) if isinstance(node, Repeat) else ()


def _is_empty(node: Node) -> bool:
    """Whether it takes no room: an anchor, an empty group."""
    return isinstance(node, _Anchor) or (isinstance(node, Cat) and all(_is_empty(part) for part in node.parts))


def _repeats(node: Node) -> int:
    inner = max((_repeats(child) for child in _children(node)), default=1)
    return inner * max(1, node.low if node.high is None else node.high) if isinstance(node, Repeat) else inner


# ----------------------------------------------------------------------------------------------------------- writing it


def portable_pattern(node: Node) -> str:
    """The tree as a regex without anchors, shorthands or anything that Rust's `regex` syntax reads in its own way."""
    return "".join(_written(node))


def _written(node: Node) -> Iterator[str]:
    if isinstance(node, Chars):
        if node.ranges == ANY:
            yield r"[\x{0}-\x{10FFFF}]"
        elif not node.ranges:
            yield r"[^\x{0}-\x{10FFFF}]"
        elif len(node.ranges) == 1 and node.ranges[0][0] == node.ranges[0][1]:
            yield _char(node.ranges[0][0])
        else:
            yield "[" + "".join(_char(a) if a == b else f"{_char(a)}-{_char(b)}" for a, b in node.ranges) + "]"
    elif isinstance(node, Alt):
        yield "(?:" + "|".join(portable_pattern(option) for option in node.options) + ")"
    elif isinstance(node, Repeat):
        yield f"(?:{portable_pattern(node.part)}){{{node.low},{'' if node.high is None else node.high}}}"
    elif isinstance(node, Cat):
        for part in node.parts:
            yield from _written(part)


def _char(point: int) -> str:
    return chr(point) if point < 128 and chr(point).isalnum() else f"\\x{{{point:X}}}"
