"""Where randomness comes from: Philox4x32-10, a function of (seed, sample, position) and of nothing else (engine.md M2).

    key      = (seed low, seed high)                                   32 bits each, two's complement
    counter  = (position low, position high, sample low, sample high)
    words    = ten rounds of multiply-and-xor (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC'11)
    uniform  = the upper 53 of the 64 bits (words[1] << 32 | words[0]), times 2^-53: a double in [0, 1)

There is no state, so nothing to save, restore or advance: a draw that was preempted, cached or batched otherwise reads the same
number. Distinct (sample, position) of a seed never share a block, since they are the counter. kernels/src/philox.h is the same
function in C++.
"""

from __future__ import annotations

__all__ = ["philox4x32", "uniform"]

MASK32, MASK64 = 2**32 - 1, 2**64 - 1
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four 32-bit words for a 128-bit counter under a 64-bit key, as Random123's philox4x32_R(10)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & MASK32, (p0 >> 32) ^ c3 ^ k1, p0 & MASK32
        k0, k1 = (k0 + WEYL[0]) & MASK32, (k1 + WEYL[1]) & MASK32
    return c0, c1, c2, c3


def uniform(seed: int, sample: int, position: int) -> float:
    """The number in [0, 1), 53 bits, behind the draw at `position` of sample `sample` under `seed`. Integers of 64 bits."""
    seed, sample, position = seed & MASK64, sample & MASK64, position & MASK64
    counter = position & MASK32, position >> 32, sample & MASK32, sample >> 32
    words = philox4x32(counter, (seed & MASK32, seed >> 32))
    return float((words[1] << 32 | words[0]) >> 11) * 2.0**-53
