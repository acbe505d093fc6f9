"""Ids to text, as they come: only whole characters leave, and what left never changes.

    push([6004])  "<space><F0>" -> " "        pending F0
    push([216])   "<9F>"        -> ""         pending F0 9F
    push([218])   "<98 80>"     -> "\U0001f600"
    flush()                     -> ""         or U+FFFD for bytes that never became a character

Each token costs its own bytes, whatever came before it. Knows bytes and UTF-8; whose text it is, and where it stops, is
the collector's.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Iterable, Sequence

__all__ = ["Detokenizer"]


class Detokenizer:
    """Made by `Tokenizer.detokenizer`.

    pieces: bytes by id (empty for hidden tokens); ids at or past its end have no text (a padded output layer).
    strip_blanks: blanks that vanish at the start of the text.
    first_piece: bytes of a token that opens the text, where they differ; returns None for a hidden one.
    """

    __slots__ = ("_first_piece", "_pending", "_pieces", "_strip")

    def __init__(
        self, pieces: Sequence[bytes], strip_blanks: int = 0, first_piece: Callable[[int], bytes | None] | None = None
    ) -> None:
        self._pieces = pieces
        self._pending = b""
        self._strip = strip_blanks
        self._first_piece = first_piece

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these ids complete. Concatenated pushes plus `flush` equal decoding everything at once."""
        if self._first_piece is not None or self._strip:
            data = self._opening(token_ids)
        else:
            try:
                pieces = self._pieces
                data = b"".join([pieces[i] for i in token_ids])
            except IndexError:
                data = b"".join([self._piece(i) for i in token_ids])
        if self._pending:
            data = self._pending + data
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    @property
    def is_open(self) -> bool:
        """Bytes of an unfinished character are held back."""
        return bool(self._pending)

    def flush(self) -> str:
        """What is left, an unfinished character as U+FFFD. The detokenizer then starts behind it."""
        pending, self._pending = self._pending, b""
        return pending.decode("utf-8", "replace")

    def _piece(self, token_id: int) -> bytes:
        return self._pieces[token_id] if token_id < len(self._pieces) else b""

    def _opening(self, token_ids: Iterable[int]) -> bytes:
        """As long as nothing of the text has been seen: the rules for its start."""
        data = bytearray()
        for token_id in token_ids:
            if self._first_piece is not None:
                opened = self._first_piece(token_id)
                if opened is not None:
                    data += opened
                    self._first_piece = None
            else:
                data += self._piece(token_id)
            while self._strip and data[:1] == b" ":
                del data[:1]
                self._strip -= 1
            if data:
                self._strip = 0
        return bytes(data)
