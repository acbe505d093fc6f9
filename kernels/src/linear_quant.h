// How a variant multiplies quantised blocks: the orders that packing and kernel must agree on.
#pragma once

#include "simd.h"

#if defined(__AVX512VNNI__)
#define PHLOEM_VNNI 1
#endif

namespace phloem::PHLOEM_NS {

#if defined(PHLOEM_VNNI)
constexpr int kQ8Group = 4;       // consecutive k side by side in a column
constexpr int kQ8Offset = 0x80;   // quants are stored as q + 128, unsigned
#else
constexpr int kQ8Group = 2;
constexpr int kQ8Offset = 0;
#endif
#if defined(PHLOEM_GENERIC)
constexpr int kQ4Group = 2;       // no unsigned x signed byte product: nibbles are widened to int16
#else
constexpr int kQ4Group = 4;
#endif

// acc + pairs of int16 products.
PHLOEM_INLINE vi madd16(vi acc, vi a, vi b) {
#if defined(PHLOEM_AVX512)
  return acc + (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(PHLOEM_AVX2)
  return acc + (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__x86_64__)
  return acc + (vi)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  for (int i = 0; i < W; i++) acc[i] += (int16_t)(a[i] & 0xffff) * (int16_t)(b[i] & 0xffff) + (a[i] >> 16) * (b[i] >> 16);
  return acc;
#endif
}
#if defined(PHLOEM_VNNI)
PHLOEM_INLINE vi dot4(vi acc, vi unsigned_bytes, vi signed_bytes) {
  return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)unsigned_bytes, (__m512i)signed_bytes);
}
#endif
// What q8 kernels are made of: kQ8Group products a lane, added to acc.
PHLOEM_INLINE vi block_dot(vi acc, vi weights, vi x) {
#if defined(PHLOEM_VNNI)
  return dot4(acc, weights, x);
#else
  return madd16(acc, weights, x);
#endif
}

}  // namespace phloem::PHLOEM_NS
