// IEEE half to float, one number. Exact; subnormals, infinities and NaN included.
#pragma once

#include <cstdint>
#include <cstring>

namespace phloem {

// `static`, not `inline`: each variant's object keeps its own (variants.h).
static __attribute__((unused)) float half_to_f(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
  const uint32_t magnitude = h & 0x7fffu;
  uint32_t u;
  if (magnitude >= 0x7c00u) {
    u = sign | 0x7f800000u | (magnitude & 0x3ffu) << 13;
  } else if (magnitude >= 0x400u) {
    u = sign | ((magnitude << 13) + (112u << 23));
  } else {  // subnormal: magnitude * 2^-24
    const float f = (float)magnitude * 5.9604644775390625e-8f;
    std::memcpy(&u, &f, 4);
    u |= sign;
  }
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

}  // namespace phloem
