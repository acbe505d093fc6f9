"""M2: the words behind a draw are Random123's, and a function of (seed, sample, position) alone."""

from __future__ import annotations

import pytest

from phloem.runtime.executor.philox import philox4x32, uniform

ONES = 0xFFFFFFFF
# Random123's known answers for philox4x32, 10 rounds (its tests/kat_vectors).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter, key, words):
    assert philox4x32(counter, key) == words


def test_uniform_is_the_upper_53_bits_of_two_words():
    words = philox4x32((5, 0, 3, 0), (7, 0))
    assert uniform(7, 3, 5) == ((words[1] << 32 | words[0]) >> 11) / 2**53
    assert uniform(-1, 3, 5) == uniform(2**64 - 1, 3, 5)


def test_draws_of_one_seed_differ_by_sample_and_position_and_stay_below_one():
    numbers = [uniform(42, sample, position) for sample in range(40) for position in range(50)]
    assert len(set(numbers)) == 2000
    assert all(0.0 <= u < 1.0 for u in numbers)
    assert abs(sum(numbers) / 2000 - 0.5) < 4 * (1 / 12 / 2000) ** 0.5
