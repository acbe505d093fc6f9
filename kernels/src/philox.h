// Philox4x32-10: randomness as a function of (seed, sample, position). The twin of python/runtime/executor/philox.py, which
// says how key and counter are laid out.
#pragma once

#include <cstdint>

namespace phloem {

static inline void philox4x32(uint32_t c[4], uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; round++) {
    const uint64_t p0 = (uint64_t)c[0] * 0xD2511F53u, p1 = (uint64_t)c[2] * 0xCD9E8D57u;
    const uint32_t c1 = c[1], c3 = c[3];
    c[0] = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
    c[1] = (uint32_t)p1;
    c[2] = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
    c[3] = (uint32_t)p0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

// [0, 1), 53 bits.
static inline double philox_uniform(uint64_t seed, uint64_t sample, uint64_t position) {
  uint32_t c[4] = {(uint32_t)position, (uint32_t)(position >> 32), (uint32_t)sample, (uint32_t)(sample >> 32)};
  philox4x32(c, (uint32_t)seed, (uint32_t)(seed >> 32));
  return (double)(((uint64_t)c[1] << 32 | c[0]) >> 11) * (1.0 / 9007199254740992.0);
}

}  // namespace phloem
