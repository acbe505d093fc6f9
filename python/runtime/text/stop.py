"""Finds stop strings in text as it comes, and holds back no more of it than could still become one.

    stops "END", "E\\n"     push("the E")  -> "the "      held "E": a proper prefix of both
                            push("N.")     -> "EN."       it was neither
                            push("x END!") -> "x "        matched "END"; what follows it is dropped

One Knuth-Morris-Pratt matcher a stop: each character costs at most two comparisons for each stop that it continues, and
nothing for the others. Failure tables grow only as far as text has matched, so a long stop costs its length only when
met. Knows text and counts of tokens; where text comes from and what ending means is the collector's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["StopMatcher"]


class _Progress:
    """One stop and how many of its characters the text ends with."""

    __slots__ = ("fail", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self.fail = [0]  # fail[k - 1]: the longest proper prefix of text[:k] that is also its suffix

    def step(self, char: str) -> bool:
        """Take one character; True if it completes the stop (then `matched` is its longest border)."""
        k, text = self.matched, self.text
        while k and text[k] != char:
            k = self.fail[k - 1]
        if text[k] == char:
            k += 1
            if k > len(self.fail):
                self._extend()
        self.matched = k
        if k == len(text):
            self.matched = self.fail[k - 1]
            return True
        return False

    def _extend(self) -> None:
        text, fail, n = self.text, self.fail, len(self.fail)
        k = fail[n - 1]
        while k and text[k] != text[n]:
            k = fail[k - 1]
        fail.append(k + 1 if text[k] == text[n] else 0)


class StopMatcher:
    """The first stop to complete ends the text; of several that complete on one character, the one that starts earliest.

    matched: the stop that ended the text, None so far.   matched_tokens: how many tokens it took to complete it.
    """

    __slots__ = ("_active", "_by_first", "_find_first", "_held", "_keep", "_min_tokens", "matched", "matched_tokens")

    def __init__(self, stops: Sequence[str], *, min_tokens: int = 0, keep_stop: bool = False) -> None:
        """min_tokens: a stop that completes before that many tokens stays text.   keep_stop: it stays in the text anyway."""
        self._by_first: dict[str, list[_Progress]] = {}
        for stop in dict.fromkeys(stops):
            assert stop, "an empty stop matches everywhere; SamplingParams refuses it"
            self._by_first.setdefault(stop[0], []).append(_Progress(stop))
        self._find_first = re.compile(f"[{''.join(map(re.escape, self._by_first))}]").search if stops else None
        self._active: list[_Progress] = []
        self._held = ""
        self._min_tokens = min_tokens
        self._keep = keep_stop
        self.matched: str | None = None
        self.matched_tokens: int | None = None

    @property
    def held(self) -> str:
        return self._held

    def push(self, text: str, num_tokens: int) -> str:
        """Take the text of token number `num_tokens` (from 1); give what is certain not to belong to a stop.

        After a match: the text before the stop (with it under keep_stop), and nothing more from then on.
        """
        if self.matched is not None:
            return ""
        whole, offset, at = self._held + text, len(self._held), 0
        while at < len(text):
            if not self._active:
                # Most text holds no first character of any stop: one scan in C passes it.
                if self._find_first is None or (first := self._find_first(text, at)) is None:
                    break
                at = first.start()
            completed = self._step(text[at])
            at += 1
            if completed is not None and num_tokens >= self._min_tokens:
                self.matched, self.matched_tokens = completed, num_tokens
                self._held = ""
                return whole[: offset + at - (0 if self._keep else len(completed))]
        if not self._active:
            self._held = ""
            return whole
        cut = len(whole) - max([p.matched for p in self._active])
        self._held = whole[cut:]
        return whole[:cut]

    def flush(self) -> str:
        """The held text, for the end of the output: it became no stop."""
        held, self._held = self._held, ""
        self._active = []
        return held

    def _step(self, char: str) -> str | None:
        """Advance every stop by one character. Returns the longest stop that it completes."""
        starting = self._by_first.get(char, ())
        candidates = self._active + [p for p in starting if not p.matched] if self._active else list(starting)
        completed: str | None = None
        for progress in candidates:
            if progress.step(char) and (completed is None or len(progress.text) > len(completed)):
                completed = progress.text
        self._active = [p for p in candidates if p.matched]
        return completed
