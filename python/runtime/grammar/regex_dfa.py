"""A regex tree as a byte automaton: positions (Glushkov), then subsets. Characters become UTF-8 here.

    [à-ÿ]x       position 0: C3 -> {1}     1: A0-BF -> {2}     2: x -> end
    a state      the set of positions that may come next, as one integer, and whether the text so far matches

No empty transitions, so none to follow; bounded repeats are copies. Too many positions, states or too much work: NotMine,
never a stall (F3). Characters whose bytes end alike share the positions of their tails.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from phloem.runtime.grammar.base import Limits, NotMine
from phloem.runtime.grammar.byte_dfa import ByteDfa
from phloem.runtime.grammar.regex_classes import Ranges
from phloem.runtime.grammar.regex_syntax import Alt, Cat, Chars, Node, Repeat

__all__ = ["dfa_of_regex"]

MAX_POSITIONS, MAX_WORK = 8_192, 400_000  # work: set operations, about half a microsecond each


def dfa_of_regex(node: Node, limits: Limits | None = None) -> ByteDfa:
    """Raises NotMine beyond limits.fsm_states, or if it gets too large on the way."""
    positions = _Positions()
    nullable, first, last = positions.add(node)
    return _subsets(positions, nullable, first, last, (limits or Limits()).fsm_states)


def bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class _Positions:
    """bytes_of[p]: 256-bit set that position p matches.   follow[p]: the positions that may come behind it."""

    def __init__(self) -> None:
        self.bytes_of: list[int] = []
        self.follow: list[int] = []
        self.work = 0

    def spend(self, n: int) -> None:
        self.work += n
        if self.work > MAX_WORK:
            raise NotMine("the regex takes too long to make deterministic")

    def add(self, node: Node) -> tuple[bool, int, int]:
        """(matches the empty text, positions that begin it, positions that end it)"""
        if isinstance(node, Chars):
            return self._chars(node.ranges)
        if isinstance(node, Cat):
            nullable, first, last = True, 0, 0
            for part in node.parts:
                empty, begins, ends = self.add(part)
                self._link(last, begins)
                first |= begins if nullable else 0
                last = ends | (last if empty else 0)
                nullable &= empty
            return nullable, first, last
        if isinstance(node, Alt):
            options = [self.add(option) for option in node.options]
            first = last = 0
            for _, begins, ends in options:
                first, last = first | begins, last | ends
            return any(empty for empty, _, _ in options), first, last
        assert isinstance(node, Repeat), "anchors were dropped by the parser"
        return self._repeat(node)

    def _link(self, last: int, first: int) -> None:
        if first:
            for p in bits(last):
                self.follow[p] |= first
                self.spend(1)

    def _repeat(self, node: Repeat) -> tuple[bool, int, int]:
        low, high = node.low, node.high
        if high == 0:
            return True, 0, 0
        copies = max(low, 1) if high is None else high
        empty, first, ends = self.add(node.part)
        if empty:
            low = 0  # rounds that match nothing can be moved to the front and left out
            copies = 1 if high is None else copies
        last = ends if low <= 1 else 0
        for i in range(2, copies + 1):
            _, begins, next_ends = self.add(node.part)
            self._link(ends, begins)
            ends = next_ends
            if i >= low:
                last |= ends
            if high is None and i == copies:
                self._link(ends, begins)
        if high is None and copies == 1:
            self._link(ends, first)
        return low == 0, first, last

    def _chars(self, ranges: Ranges) -> tuple[bool, int, int]:
        shape, entries = _utf8(ranges)
        base = len(self.follow)
        if base + len(shape) > MAX_POSITIONS:
            raise NotMine(f"the regex has more than {MAX_POSITIONS} positions")
        last = 0
        for p, (byte_set, targets) in enumerate(shape, base):
            self.bytes_of.append(byte_set)
            self.follow.append(targets << base)
            if not targets:
                last |= 1 << p
        return False, entries << base, last


@lru_cache(maxsize=256)
def _utf8(ranges: Ranges) -> tuple[tuple[tuple[int, int], ...], int]:
    """Positions (byte set, positions that follow; none: the character ends) and those that begin a character."""
    shape: list[tuple[int, int]] = []
    known: dict[tuple[int, int], int] = {}
    tails: dict[tuple[Ranges, int], int] = {}

    def position(byte_set: int, targets: int) -> int:
        p = known.get((byte_set, targets))
        if p is None:
            p = known[byte_set, targets] = len(shape)
            shape.append((byte_set, targets))
        return 1 << p

    def split(part: Ranges, size: int, first_byte: int, num_bytes: int, more: int) -> int:
        """Positions of the first byte, where each of num_bytes covers `size` code points, the rest of them in `more` bytes."""
        groups: dict[Ranges, int] = {}
        for i in range(num_bytes):
            low, high = i * size, (i + 1) * size - 1
            inside = tuple((max(a, low) - low, min(b, high) - low) for a, b in part if a <= high and b >= low)
            if inside:
                groups[inside] = groups.get(inside, 0) | 1 << first_byte + i
        found = 0
        for inside, byte_set in groups.items():
            found |= position(byte_set, tail(inside, more) if more else 0)
        return found

    def tail(part: Ranges, more: int) -> int:
        if (part, more) not in tails:
            tails[part, more] = split(part, 64 ** (more - 1), 0x80, 64, more - 1)
        return tails[part, more]

    entries = 0
    for low, high, size, first_byte, num_bytes, more in (
        (0, 0x7F, 1, 0, 128, 0), (0x80, 0x7FF, 64, 0xC0, 32, 1), (0x800, 0xFFFF, 64**2, 0xE0, 16, 2),
        (0x10000, 0x10FFFF, 64**3, 0xF0, 5, 3),
    ):  # fmt: skip
        part = tuple((max(a, low), min(b, high)) for a, b in ranges if a <= high and b >= low)
        if part:
            entries |= split(part, size, first_byte, num_bytes, more)
    return tuple(shape), entries


def _subsets(positions: _Positions, nullable: bool, first: int, last: int, max_states: int) -> ByteDfa:
    follow = positions.follow
    sharing: dict[int, int] = {}  # byte set -> its positions
    for p, byte_set in enumerate(positions.bytes_of):
        sharing[byte_set] = sharing.get(byte_set, 0) | 1 << p
    told = np.zeros((len(sharing), 256), np.uint8)
    for i, byte_set in enumerate(sharing):
        told[i] = np.unpackbits(np.frombuffer(byte_set.to_bytes(32, "little"), np.uint8), bitorder="little")
    column_of: dict[bytes, int] = {}
    classes = np.array([column_of.setdefault(told[:, b].tobytes(), len(column_of)) for b in range(256)], np.uint8)
    members = [0] * len(column_of)
    for i, with_it in enumerate(sharing.values()):
        for column in set(classes[told[i] == 1].tolist()):
            members[column] |= with_it
    columns = [(c, m) for c, m in enumerate(members) if m]

    start = (first, nullable)
    number, states = {start: 1}, [start]
    behind: dict[int, int] = {}  # matched positions -> state
    rows: list[dict[int, int]] = []
    for state, _ in states:
        row: dict[int, int] = {}
        positions.spend(len(columns) // 8 + 1)
        for column, with_it in columns:
            matched = state & with_it
            if not matched:
                continue
            target = behind.get(matched)
            if target is None:
                following = 0
                for p in bits(matched):
                    following |= follow[p]
                positions.spend(matched.bit_count())
                key = (following, matched & last != 0)
                target = number.get(key)
                if target is None:
                    states.append(key)
                    target = number[key] = len(states)
                    if target > max_states:
                        raise NotMine(f"the regex needs more than {max_states} states")
                behind[matched] = target
            row[column] = target
        rows.append(row)
    return ByteDfa.made(rows, classes, [i for i, (_, accepts) in enumerate(states, 1) if accepts])
