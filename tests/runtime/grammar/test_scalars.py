"""Numbers within bounds, dates, constants: the automaton's language is what a validator accepts."""

from __future__ import annotations

import datetime
import itertools
import json
import random
from decimal import Decimal
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phloem.runtime.errors import GrammarError
from phloem.runtime.grammar.base import NotMine
from phloem.runtime.grammar.byte_dfa import DEAD, START, ByteDfa
from phloem.runtime.grammar.dates import DATE, DATE_TIME, TIME
from phloem.runtime.grammar.numbers import NumberRange, dfa_of_number
from phloem.runtime.grammar.regex_dfa import dfa_of_regex
from phloem.runtime.grammar.regex_syntax import parse_regex
from phloem.runtime.grammar.scalars import scalar_of_schema


def matches(dfa: ByteDfa, text: str) -> bool:
    state = DEAD if dfa.is_empty else dfa.walk(START, text.encode())
    return bool(state) and bool(dfa.accept[state])


def automaton(schema: dict[str, Any]) -> ByteDfa:
    made = scalar_of_schema(json.dumps(schema))
    assert isinstance(made, ByteDfa)
    return made


BOUNDS = [-1000, -101, -100, -17, -10, -9, -1, 0, 1, 7, 9, 10, 12, 99, 100, 123, 1000]


@pytest.mark.case("C-STRUCT-04")
def test_integer_ranges_are_exact() -> None:
    for low, high in itertools.combinations_with_replacement(BOUNDS, 2):
        dfa = dfa_of_number(NumberRange(integer=True, low=Decimal(low), high=Decimal(high)))
        assert {i for i in range(-1300, 1301) if matches(dfa, str(i))} == set(range(low, high + 1))
        assert not any(matches(dfa, odd) for odd in ("-0", "00", "01", "-", "", "+1", "1.", "1.0", "1e0", " 1"))


@settings(max_examples=120, deadline=None)
@given(
    low=st.none() | st.integers(-(10**12), 10**12),
    high=st.none() | st.integers(-(10**12), 10**12),
    above=st.booleans(),
    below=st.booleans(),
    value=st.integers(-(10**13), 10**13),
    multiple=st.integers(1, 30),
)
def test_integers_against_arithmetic(
    low: int | None, high: int | None, above: bool, below: bool, value: int, multiple: int
) -> None:
    wanted = NumberRange(integer=True, low=dec(low), high=dec(high), above=above, below=below, multiple=multiple)
    try:
        dfa = dfa_of_number(wanted)
    except NotMine:  # a remainder beside two comparisons makes many states
        assert multiple > 5
        return
    near = [value, *(b + d for b in (low, high) if b is not None for d in (-multiple, -1, 0, 1, multiple))]
    for v in [*near, *((v // multiple) * multiple for v in near)]:
        inside = (low is None or v > low or (v == low and not above)) and (
            high is None or v < high or (v == high and not below)
        )
        assert matches(dfa, str(v)) == (inside and v % multiple == 0), v


def dec(value: int | str | None) -> Decimal | None:
    return None if value is None else Decimal(value)


DECIMALS = ["0", "-0.5", "0.25", "0.05", "1.5", "-1.75", "9.99", "10", "10.01", "0.125", "100"]


@pytest.mark.case("C-STRUCT-04")
@pytest.mark.parametrize("low", [None, *DECIMALS])
def test_decimal_ranges_are_exact(low: str | None) -> None:
    texts = [f"{sign}{whole}{places}" for sign in ("", "-") for whole in (0, 1, 9, 10, 11, 99, 100, 101)
             for places in ("", ".0", ".00", ".01", ".05", ".1", ".12", ".125", ".1250", ".2", ".25", ".5", ".50", ".51", ".75", ".9", ".99", ".999")]  # fmt: skip
    for high, above in itertools.product([None, *DECIMALS], (False, True)):
        if low is None and high is None:
            continue
        below = not above or high == low
        dfa = dfa_of_number(NumberRange(integer=False, low=dec(low), high=dec(high), above=above, below=below))
        for text in texts:
            value = Decimal(text)
            expected = not (text.startswith("-") and value == 0)
            if low is not None:
                expected &= value > Decimal(low) or (value == Decimal(low) and not above)
            if high is not None:
                expected &= value < Decimal(high) or (value == Decimal(high) and not below)
            assert matches(dfa, text) == expected, (low, high, above, below, text)


@pytest.mark.case("C-STRUCT-04")
@settings(max_examples=150, deadline=None)
@given(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number"])},
        optional={
            key: st.integers(-50, 50)
            | st.sampled_from([0.1, -0.3, 2.5, 1e-7, 0.30000000000000004, -99.125, 1e15, 123456789012345.5, 1e23, 0.1 + 1e-17])
            | st.floats(-100, 100)
            | st.floats(-1e18, 1e18)
            for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        },
    ),
    st.integers(0, 2**32),
)
def test_random_numbers_pass_the_validator(schema: dict[str, Any], seed: int) -> None:
    """What the automaton lets through, read as a double, is what jsonschema accepts: near the bounds too."""
    try:
        dfa, validator = automaton(schema), jsonschema.Draft202012Validator(schema)
    except NotMine:  # more digits than are compared here
        assert any(0 < abs(v) < 1e-10 for v in schema.values() if isinstance(v, float))
        return
    if dfa.is_empty:
        return
    rng = random.Random(seed)
    for _ in range(20):
        state, text = START, ""
        while len(text) < 60:
            following = dfa.following(state)
            options = [b for b in range(256) if following >> b & 1]
            if not options or (dfa.accept[state] and rng.random() < 0.1):
                break
            byte = rng.choice(options) if rng.random() < 0.5 else rng.choice([options[0], options[-1]])
            state, text = dfa.walk(state, bytes((byte,))), text + chr(byte)
        if dfa.accept[state]:
            assert validator.is_valid(json.loads(text)), text


def test_plain_numbers_are_jsons() -> None:
    number, integer = automaton({"type": "number"}), automaton({"type": "integer", "title": "n"})
    for text in ("0", "-1", "0.5", "12.50", "1e5", "1E-7", "-0.0", "1.5e+10"):
        assert matches(number, text) and json.loads(text) is not None
    for text in ("01", "1.", ".5", "+1", "1e", "NaN", "Infinity", "", "-", "1 "):
        assert not matches(number, text)
    assert [t for t in ("0", "-1", "120", "1.0", "1e2", "01") if matches(integer, t)] == ["0", "-1", "120"]


@pytest.mark.parametrize(
    "wanted",
    [
        NumberRange(integer=True, low=Decimal(5), high=Decimal(3)),
        NumberRange(integer=True, low=Decimal("0.2"), high=Decimal("0.8")),
        NumberRange(integer=False, low=Decimal(1), high=Decimal(1), above=True),
    ],
)
def test_an_empty_range(wanted: NumberRange) -> None:
    assert dfa_of_number(wanted).is_empty


def test_bounds_of_any_size_end_quickly() -> None:
    for bound in ("1e1000000000", "-1e-1000000000", "9" * 70):
        with pytest.raises(NotMine):
            dfa_of_number(NumberRange(integer=False, low=Decimal(bound)))
    with pytest.raises(NotMine):
        dfa_of_number(NumberRange(integer=True, multiple=9_999))
    dfa = dfa_of_number(NumberRange(integer=True, low=Decimal(-(2**63)), high=Decimal(2**63 - 1)))
    assert matches(dfa, str(2**63 - 1)) and not matches(dfa, str(2**63)) and matches(dfa, str(-(2**63)))


def test_dates_are_the_calendars() -> None:
    dfa = dfa_of_regex(parse_regex(DATE))
    for year in (1, 4, 99, 100, 400, 999, 1000, 1900, 1999, 2000, 2004, 2023, 2024, 2100, 2400, 9999):
        for month, day in itertools.product(range(14), range(33)):
            text = f"{year:04}-{month:02}-{day:02}"
            try:
                datetime.date.fromisoformat(text)
                expected = True
            except ValueError:
                expected = False
            assert matches(dfa, text) == expected, text
    assert not any(matches(dfa, t) for t in ("0000-01-01", "2024-2-01", "24-02-01", "2024-02-01T", "20240201"))
    leap = [y for y in range(1, 10_000) if matches(dfa, f"{y:04}-02-29")]
    assert leap == [y for y in range(1, 10_000) if y % 4 == 0 and (y % 100 or y % 400 == 0)]


def test_times() -> None:
    time, moment = dfa_of_regex(parse_regex(TIME)), dfa_of_regex(parse_regex(DATE_TIME))
    for text in ("00:00:00Z", "23:59:59.123+23:59", "12:30:00-05:00"):
        assert matches(time, text) and matches(moment, f"2024-02-29T{text}")
    for text in ("24:00:00Z", "12:60:00Z", "22:59:60Z", "12:00:00", "12:00Z", "12:00:00+24:00", "12:00:00.Z", "12:00:00z"):
        assert not matches(time, text) and not matches(moment, f"2024-02-29T{text}")


@pytest.mark.case("C-STRUCT-09")
def test_constants_and_enums_are_their_json() -> None:
    values = ['a"b', "c\\d", "e/f", "é", "\n", 1, 1.5, True, None]
    assert [json.loads(t) for t in texts_of({"enum": values})] == values
    for value in values:
        assert [json.loads(t) for t in texts_of({"const": value})] == [value]
    assert texts_of({"type": "integer", "enum": [1, True, "1", 2, 1.5]}) == ["1", "2"]
    assert texts_of({"type": "boolean"}) == ["true", "false"] and texts_of({"type": "null"}) == ["null"]


def texts_of(schema: dict[str, Any]) -> list[str]:
    made = scalar_of_schema(json.dumps(schema))
    assert isinstance(made, list)
    return made


@pytest.mark.parametrize(
    "schema",
    [
        {}, {"type": "object"}, {"type": "string"}, {"type": "string", "format": "date", "minLength": 3}, {"type": ["integer", "null"]},
        {"type": "integer", "not": {}}, {"type": "number", "multipleOf": 0.01}, {"type": "number", "multipleOf": 2},
        {"type": "integer", "minimum": "3"}, {"type": "integer", "exclusiveMinimum": True, "minimum": 3}, {"enum": [[1]]}, {"enum": []},
        {"const": {}}, {"enum": [1], "const": 1}, {"type": "string", "enum": [1]}, {"type": "boolean", "minimum": 1}, {"$ref": "#"},
        {"enum": [1], "minimum": 0}, {"type": "string", "pattern": "a"}, {"type": "integer", "allOf": []},
    ],
)  # fmt: skip
def test_whatever_is_not_exactly_understood_is_left_alone(schema: dict[str, Any]) -> None:
    with pytest.raises(NotMine):
        scalar_of_schema(json.dumps(schema))


@pytest.mark.parametrize("source", ["", "{", '{"enum": [NaN]}', '{"minimum": Infinity}', "[" * 100_000])
def test_sources_that_are_no_json(source: str) -> None:
    with pytest.raises(GrammarError, match="no JSON") as caught:
        scalar_of_schema(source)
    assert caught.value.code == "invalid_json_schema"
