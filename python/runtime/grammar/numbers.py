"""Numbers within bounds, as JSON writes them, as byte automata: compared with their bounds digit by digit.

    12.5 against the bound 120:   1 =   12 =   "." two digits, the bound has three: less, whatever follows

Without bounds a number is JSON's, exponent included. With bounds it is a plain decimal without exponent and without "-0", and
has at most as many digits behind the point as doubles near the bound still tell apart: so a checker that computes in doubles
agrees. Integers are never written 1.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Literal

import numpy as np

from phloem.runtime.grammar.base import NotMine
from phloem.runtime.grammar.byte_dfa import ByteDfa
from phloem.runtime.grammar.regex_dfa import dfa_of_regex
from phloem.runtime.grammar.regex_syntax import parse_regex

__all__ = ["INTEGER", "NUMBER", "NumberRange", "dfa_of_number"]

INTEGER = "-?(?:0|[1-9][0-9]*)"
NUMBER = INTEGER + r"(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?"
DOUBLE_DIGITS = 15  # any two decimals of so many significant digits are different doubles
MAX_STATES, MAX_DIGITS, MAX_PLACES = 2_000, 60, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberRange:
    """low, high: None for no bound.   above, below: the bound itself is left out.   multiple: of integers only, 1 is any."""

    integer: bool
    low: Decimal | None = None
    high: Decimal | None = None
    above: bool = False
    below: bool = False
    multiple: int = 1


def dfa_of_number(wanted: NumberRange) -> ByteDfa:
    """Empty if there is no such number. Raises NotMine for bounds of more than 60 digits or large multiples."""
    if wanted.low is None and wanted.high is None and wanted.multiple == 1:
        return dfa_of_regex(parse_regex(INTEGER if wanted.integer else NUMBER))
    assert wanted.integer or wanted.multiple == 1
    machine = _Machine(_of_integers(wanted) if wanted.integer else wanted)
    number = {_START: 1}
    states, rows = [_START], []
    for state in states:
        row: dict[int, int] = {}
        for column, target in machine.steps(state):
            if target not in number:
                states.append(target)
                number[target] = len(states)
                if len(states) > MAX_STATES:
                    raise NotMine(f"the range needs more than {MAX_STATES} states")
            row[column] = number[target]
        rows.append(row)
    return ByteDfa.made(rows, _CLASSES, [i for s, i in number.items() if machine.accepts(s)])


def _of_integers(wanted: NumberRange) -> NumberRange:
    """The same integers between integers: fewer digits to compare."""
    low, high, above, below = wanted.low, wanted.high, wanted.above, wanted.below
    if low is not None and low != low.to_integral_value():
        low, above = low.to_integral_value(ROUND_CEILING), False
    if high is not None and high != high.to_integral_value():
        high, below = high.to_integral_value(ROUND_FLOOR), False
    return replace(wanted, low=low, high=high, above=above, below=below)


_CLASSES = np.zeros(256, np.uint8)
_CLASSES[list(b"0123456789-.")] = np.arange(1, 13)
_MINUS, _POINT = 11, 12


@dataclass(frozen=True, slots=True)
class _State:
    """so_far: digits before the point against each bound's first ones, then all digits: -1, 0, 1.   num: how many before the
    point, up to one more than either bound has.   places: behind it.   rest: the value modulo `multiple`."""

    part: Literal["start", "minus", "zero", "whole", "point", "fraction"] = "start"
    negative: bool = False
    nonzero: bool = False
    num: int = 0
    places: int = 0
    low: int = 0
    high: int = 0
    rest: int = 0


_START = _State()


class _Machine:
    def __init__(self, wanted: NumberRange) -> None:
        self.wanted = wanted
        self.low, self.high = _digits(wanted.low), _digits(wanted.high)
        lengths = [len(bound[0]) for bound in (self.low, self.high) if bound is not None]
        places = [len(bound[1]) for bound in (self.low, self.high) if bound is not None]
        if sum(lengths) + sum(places) > MAX_DIGITS:
            raise NotMine(f"bounds of more than {MAX_DIGITS} digits")
        self.longest = max(lengths, default=0)
        near = [DOUBLE_DIGITS - 1 - bound.adjusted() for bound in (wanted.low, wanted.high) if bound]
        self.max_places = 0 if wanted.integer else max(0, min([MAX_PLACES, *near]))

    def steps(self, s: _State) -> Iterator[tuple[int, _State]]:
        if s.part == "start":
            yield _MINUS, replace(s, part="minus", negative=True)
        if s.part in ("zero", "whole") and self.max_places:
            yield _POINT, replace(s, part="point", low=self._whole(s, self.low, s.low), high=self._whole(s, self.high, s.high))
        if s.part == "zero" or (s.places == self.max_places and s.part == "fraction"):
            return
        for digit in range(10):
            rest = (s.rest * 10 + digit) % self.wanted.multiple
            nonzero = s.negative and (s.nonzero or digit > 0)
            if s.part in ("start", "minus", "whole"):
                part: Literal["zero", "whole"] = "zero" if not s.num and not digit else "whole"
                low, high = (
                    self._next(so_far, b and b[0], s.num, digit) for so_far, b in ((s.low, self.low), (s.high, self.high))
                )
                yield 1 + digit, _State(part, s.negative, nonzero, min(s.num + 1, self.longest + 1), 0, low, high, rest)
            else:
                low, high = (
                    self._next(so_far, b and b[1].ljust(s.places + 1, "0"), s.places, digit)
                    for so_far, b in ((s.low, self.low), (s.high, self.high))
                )
                yield 1 + digit, _State("fraction", s.negative, nonzero, s.num, s.places + 1, low, high, rest)

    def accepts(self, s: _State) -> bool:
        if s.part not in ("zero", "whole", "fraction") or (s.negative and not s.nonzero) or s.rest:
            return False
        low, high = self._against(s, self.wanted.low, self.low, s.low), self._against(s, self.wanted.high, self.high, s.high)
        if self.wanted.low is not None and (low < 0 or (low == 0 and self.wanted.above)):
            return False
        return self.wanted.high is None or high < 0 or (high == 0 and not self.wanted.below)

    @staticmethod
    def _next(so_far: int, digits: str | None, at: int, digit: int) -> int:
        if so_far or digits is None or at >= len(digits):
            return so_far
        return (digit > int(digits[at])) - (digit < int(digits[at]))

    @staticmethod
    def _whole(s: _State, bound: tuple[str, str] | None, so_far: int) -> int:
        """What stands before the point against the bound's: the longer is the larger."""
        if bound is None or s.num == len(bound[0]):
            return so_far
        return 1 if s.num > len(bound[0]) else -1

    def _against(self, s: _State, value: Decimal | None, bound: tuple[str, str] | None, so_far: int) -> int:
        """The whole number against a bound."""
        if value is None or bound is None:
            return 0
        if s.negative != (value < 0):
            return -1 if s.negative else 1
        if s.part != "fraction":
            so_far = self._whole(s, bound, so_far)
        if not so_far and s.places < len(bound[1]):
            so_far = -1  # the bound has more digits, and its last is no zero
        return -so_far if s.negative else so_far


def _digits(bound: Decimal | None) -> tuple[str, str] | None:
    """Before the point, and behind it without zeros at the end; of the absolute value."""
    if bound is None:
        return None
    if abs(bound.adjusted()) > MAX_DIGITS:  # before it is written out
        if bound:
            raise NotMine(f"bounds of more than {MAX_DIGITS} digits")
        return "0", ""
    whole, _, places = format(abs(bound), "f").partition(".")
    return whole, places.rstrip("0")
