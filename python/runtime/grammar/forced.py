"""The canonical run (J9): from forced bytes to the tokens which the tokenizer itself would write for them.

    tail        forced bytes                     what may follow
    [ ":", ]    '"name": "'  ids: " name ": "    a letter: '"' alone may become '"A', so the run ends before it
                             run: " name ":

Knows the vocabulary and three facts about the grammar; asks nothing about how either came to be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from phloem.runtime.grammar.vocabulary import Vocabulary

__all__ = ["canonical_run", "whole_characters"]


def canonical_run(tail: Sequence[int], forced: bytes, follow: Callable[[int], bool], vocabulary: Vocabulary) -> list[int]:
    """The tokens of `forced`, cut where text yet unseen could merge in. Empty: let the model choose.

    tail: the last committed ids since a special token, at most 4.   follow(b): may byte b come after `forced`?
    The caller checks that its grammar accepts every token of the run.
    """
    v = vocabulary
    for k in range(len(tail), -1, -1):  # the longest left context that re-encodes to itself
        left = list(tail[len(tail) - k :])
        ids = v.encode_bytes(v.join(left) + forced)  # None unless whole UTF-8 characters
        if ids and ids[:k] == left and (k or not tail):
            break
    else:
        return []  # the seam itself re-tokenises
    return ids[k : _within(ids, k, _cut(forced, follow, v), v)]


def _cut(forced: bytes, follow: Callable[[int], bool], v: Vocabulary) -> int:
    """The first place where a token that starts there may reach past the end."""
    extends = v.extends
    for at in range(max(0, len(forced) - v.longest), len(forced)):
        onward = extends.get(forced[at:], 0)
        while onward:
            low = onward & -onward
            if follow(low.bit_length() - 1):
                return at
            onward ^= low
    return len(forced)


def _within(ids: Sequence[int], k: int, cut: int, v: Vocabulary) -> int:
    """Where the run that begins at ids[k] ends: the last token border within `cut` bytes that is a character's border too."""
    end, length, partial = k, 0, b""
    for i in range(k, len(ids)):
        token = v.tokens[ids[i]]
        length += len(token)
        if length > cut:
            break
        partial += token
        if whole_characters(partial) == len(partial):
            end, partial = i + 1, b""
    return end


def whole_characters(data: bytes) -> int:
    """How many bytes are left of `data` once a UTF-8 character that is not complete at its end is taken off."""
    for back in range(1, min(4, len(data)) + 1):
        lead = data[-back]
        if lead < 0x80:
            break
        if lead >= 0xC0:
            needed = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            return len(data) - back if back < needed else len(data)
    return len(data)
