"""Logprobs on the wire: chat's entries by token, completions' columns by released text. Every number is finite JSON (C-API-13).

ids      [" caf", "\\xc3", "\\xa9", "!"]         the é comes out with its second byte
tokens   [" caf", "",     "é",    "!"]         tokens[i] is the text released at token i, so offsets slice the text (C-API-06)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from phloem.runtime.request import TokenLogprob
from phloem.runtime.serve.wire import ChatLogprobs, CompletionLogprobs, ContentLogprob, TopLogprob
from phloem.runtime.text.tokenizer import Tokenizer

__all__ = ["LEAST", "Spelling", "TextColumns", "top_of"]

LEAST = -9999.0
"""Stands for -inf where a chosen token has no other value."""


def top_of(entry: TokenLogprob, num: int) -> list[tuple[int, float]]:
    """The `num` likeliest and the chosen token, by value, ties by id; the chosen one's value is the very same float."""
    top = [(token, value) for token, value in entry.top[:num] if value != -math.inf and token != entry.token_id]
    top.append((entry.token_id, finite(entry.logprob)))
    return sorted(top, key=lambda t: (-t[1], t[0]))


def finite(value: float) -> float:
    return value if math.isfinite(value) else LEAST


class Spelling:
    """How tokens are written.   as_ids: `token_id:123`."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool) -> None:
        self.tokenizer, self.as_ids = tokenizer, as_ids

    def text(self, token: int) -> str:
        return f"token_id:{token}" if self.as_ids else self.tokenizer.token_bytes(token).decode("utf-8", "replace")

    def chat(self, entries: Sequence[TokenLogprob], num_top: int) -> ChatLogprobs:
        content = []
        for entry in entries:
            top = [self._top(t, v) for t, v in top_of(entry, num_top)] if num_top else []
            mine = self._top(entry.token_id, finite(entry.logprob))
            content.append(ContentLogprob(mine.token, mine.logprob, mine.bytes, top))
        return ChatLogprobs(content)

    def _top(self, token: int, value: float) -> TopLogprob:
        return TopLogprob(self.text(token), value, list(self.tokenizer.token_bytes(token)))

    def by_text(self, entry: TokenLogprob, num_top: int) -> dict[str, float]:
        """Two ids with one text keep the larger value."""
        found: dict[str, float] = {}
        for token, value in top_of(entry, num_top):
            text = self.text(token)
            found[text] = max(value, found.get(text, -math.inf))
        return found


class TextColumns:
    """Logprobs of a text completion, as they become certain. Give it tokens and how much of the text has left; it gives columns.

    A token's entry leaves once all of the text that it released has left: what a stop string may still cut stays here, so that a
    stream's entries joined are those of the whole reply (W5).

    start: characters before the output (an echoed prompt).   hidden: tokens without text (skip_special_tokens).
    """

    def __init__(self, spelling: Spelling, num_top: int, *, start: int, skip_special: bool, continuation: bool) -> None:
        self._spelling, self._num_top, self._start = spelling, num_top, start
        self._detokenizer = spelling.tokenizer.detokenizer(skip_special, continuation=continuation)
        self._held: deque[tuple[str, TokenLogprob | None, int]] = deque()  # (text, entry, where its text ends)
        self._released = 0

    def push(self, ids: Sequence[int], entries: Sequence[TokenLogprob | None]) -> None:
        for token, entry in zip(ids, entries):
            text = self._detokenizer.push((token,))
            self._released += len(text)
            self._held.append((text, entry, self._released))

    def take(self, certain: int, last: bool) -> CompletionLogprobs | None:
        """certain: characters of the output that have left.   last: no more come; what a stop cut off has no text."""
        columns = CompletionLogprobs([], [], [], [])
        while self._held and (last or self._held[0][2] <= certain):
            text, entry, end = self._held.popleft()
            begin = end - len(text)
            if end > certain:
                text, begin = text[: max(0, certain - begin)], min(begin, certain)
            self._append(columns, text, entry, self._start + begin)
        return columns if columns.tokens else None

    def _append(self, columns: CompletionLogprobs, text: str, entry: TokenLogprob | None, at: int) -> None:
        as_ids = self._spelling.as_ids and entry is not None
        columns.tokens.append(self._spelling.text(entry.token_id) if as_ids and entry is not None else text)
        columns.token_logprobs.append(None if entry is None else finite(entry.logprob))
        columns.top_logprobs.append(None if entry is None else self._spelling.by_text(entry, self._num_top))
        columns.text_offset.append(at)
