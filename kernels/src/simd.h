// A thin float vector: `vf` of W floats (4, 8 or 16), `vi` of W int32. For sources compiled once per variant (variants.h).
//
// Built on GCC/Clang vector extensions, so + - * / and comparisons are the operators; what follows adds what they lack.
// Nothing here contracts or reorders: a * b + c is two roundings, fma(a, b, c) one (two on the baseline, which has no FMA
// unit: its bits differ from the others', never from its own). Denormals are kept. NaN in gives NaN out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "variants.h"

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

#ifndef PHLOEM_NS
#error "compile with -DPHLOEM_NS=<variant namespace>; kernels/CMakeLists.txt does"
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define PHLOEM_AVX512 1
#elif defined(__AVX2__) && defined(__FMA__)
#define PHLOEM_AVX2 1
#else
#define PHLOEM_GENERIC 1
#endif

// Loops over register tiles must be unrolled whole, or GCC 12 keeps the tile in memory (65 -> 150 GFLOP/s).
#define PHLOEM_UNROLL _Pragma("GCC unroll 16")
#define PHLOEM_INLINE inline __attribute__((always_inline))
#define PHLOEM_RESTRICT __restrict__

namespace phloem::PHLOEM_NS {

#if defined(PHLOEM_AVX512)
constexpr int W = 16;
#elif defined(PHLOEM_AVX2)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(4 * W), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * W), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * W), may_alias));
typedef float vf_unaligned __attribute__((vector_size(4 * W), may_alias, aligned(4)));
typedef int32_t vi_unaligned __attribute__((vector_size(4 * W), may_alias, aligned(4)));

// ---- memory. `load`/`store` take any address (on every CPU since 2011 an aligned address costs the same either way).
PHLOEM_INLINE vf load(const float* p) { return *reinterpret_cast<const vf_unaligned*>(p); }
PHLOEM_INLINE void store(float* p, vf v) { *reinterpret_cast<vf_unaligned*>(p) = v; }
PHLOEM_INLINE vi load_i(const int32_t* p) { return *reinterpret_cast<const vi_unaligned*>(p); }
PHLOEM_INLINE void store_i(int32_t* p, vi v) { *reinterpret_cast<vi_unaligned*>(p) = v; }
PHLOEM_INLINE vf zero() { return vf{}; }
PHLOEM_INLINE vf set1(float x) {  // not vf{} + x: that addition turns -0.0f into 0.0f, so it could not be elided
#if defined(PHLOEM_AVX512)
  return (vf)_mm512_set1_ps(x);
#elif defined(PHLOEM_AVX2)
  return (vf)_mm256_set1_ps(x);
#else
  return vf{x, x, x, x};
#endif
}
PHLOEM_INLINE vi set1_i(int32_t x) { return vi{} + x; }
PHLOEM_INLINE vf as_f(vi v) { return reinterpret_cast<vf>(v); }
PHLOEM_INLINE vi as_i(vf v) { return reinterpret_cast<vi>(v); }
PHLOEM_INLINE vf select(vi mask, vf yes, vf no) { return as_f((mask & as_i(yes)) | (~mask & as_i(no))); }  // mask: a < b

// n of W floats, the rest zero; never touches memory past p + n.
PHLOEM_INLINE vf load_part(const float* p, int n) {
#if defined(PHLOEM_AVX512)
  return (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1u), p);
#else
  alignas(64) float t[W] = {};
  for (int i = 0; i < n; i++) t[i] = p[i];
  return load(t);
#endif
}
PHLOEM_INLINE void store_part(float* p, vf v, int n) {
#if defined(PHLOEM_AVX512)
  _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1u), (__m512)v);
#else
  alignas(64) float t[W];
  store(t, v);
  for (int i = 0; i < n; i++) p[i] = t[i];
#endif
}

// ---- arithmetic
PHLOEM_INLINE vf fma(vf a, vf b, vf c) {
#if defined(PHLOEM_AVX512)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(PHLOEM_AVX2)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}
// The scalar twin of fma(vf...): the same bits a lane would get.
PHLOEM_INLINE float fma1(float a, float b, float c) {
#if defined(PHLOEM_AVX512) || defined(PHLOEM_AVX2)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}
// max, min: b when either is NaN (as x86 does): put the value that may be NaN second.
PHLOEM_INLINE vf max(vf a, vf b) {
#if defined(PHLOEM_AVX512)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(PHLOEM_AVX2)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return select(a > b, a, b);
#endif
}
PHLOEM_INLINE vf min(vf a, vf b) {
#if defined(PHLOEM_AVX512)
  return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(PHLOEM_AVX2)
  return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return select(a < b, a, b);
#endif
}
PHLOEM_INLINE vi max_i(vi a, vi b) {
#if defined(PHLOEM_AVX512)
  return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif defined(PHLOEM_AVX2)
  return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
  const vi greater = a > b;
  return (greater & a) | (~greater & b);
#endif
}
PHLOEM_INLINE vf abs(vf a) { return as_f(as_i(a) & 0x7fffffff); }
PHLOEM_INLINE vf to_f(vi a) { return __builtin_convertvector(a, vf); }

// ---- across lanes: always the same tree, halves folded onto each other.
#if defined(__SSE__)
#if defined(PHLOEM_AVX512)
PHLOEM_INLINE __m256 low_half(vf v) { return _mm512_castps512_ps256((__m512)v); }
PHLOEM_INLINE __m256 high_half(vf v) { return _mm512_extractf32x8_ps((__m512)v, 1); }
#endif
PHLOEM_INLINE float hsum(vf v) {
#if defined(PHLOEM_AVX512)
  const __m256 a = _mm256_add_ps(low_half(v), high_half(v));
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
#elif defined(PHLOEM_AVX2)
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
#else
  const __m128 b = (__m128)v;
#endif
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
}
PHLOEM_INLINE float hmax(vf v) {
#if defined(PHLOEM_AVX512)
  const __m256 a = _mm256_max_ps(low_half(v), high_half(v));
  const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
#elif defined(PHLOEM_AVX2)
  const __m128 b = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
#else
  const __m128 b = (__m128)v;
#endif
  const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
}
#else
PHLOEM_INLINE float hsum(vf v) {
  alignas(64) float t[W];
  store(t, v);
  for (int h = W / 2; h > 0; h /= 2)
    for (int i = 0; i < h; i++) t[i] = t[i] + t[i + h];
  return t[0];
}
PHLOEM_INLINE float hmax(vf v) {
  alignas(64) float t[W];
  store(t, v);
  for (int h = W / 2; h > 0; h /= 2)
    for (int i = 0; i < h; i++) t[i] = t[i] > t[i + h] ? t[i] : t[i + h];
  return t[0];
}
#endif

PHLOEM_INLINE int32_t hsum_i(vi v) {
#if defined(PHLOEM_AVX512)
  return _mm512_reduce_add_epi32((__m512i)v);
#else
  int32_t sum = 0;
  for (int i = 0; i < W; i++) sum += v[i];
  return sum;
#endif
}
PHLOEM_INLINE int32_t hmax_i(vi v) {
#if defined(PHLOEM_AVX512)
  return _mm512_reduce_max_epi32((__m512i)v);
#else
  int32_t most = v[0];
  for (int i = 1; i < W; i++) most = v[i] > most ? v[i] : most;
  return most;
#endif
}

// t[i][j] <-> t[j][i]: within groups of four lanes, then the groups. In intrinsics: of shuffles by constant vectors GCC 12 builds the
// constants anew for each square, lane by lane (250 cycles a square of 16 instead of 80).
PHLOEM_INLINE void transpose_square(vf t[W]) {
#if defined(PHLOEM_AVX512)
  __m512 a[16], b[16];
  PHLOEM_UNROLL for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_ps((__m512)t[i], (__m512)t[i + 1]);
    a[i + 1] = _mm512_unpackhi_ps((__m512)t[i], (__m512)t[i + 1]);
  }
  PHLOEM_UNROLL for (int i = 0; i < 16; i += 4)  // b[i + j]: columns j, 4 + j, 8 + j, 12 + j of rows i to i + 3
    PHLOEM_UNROLL for (int j = 0; j < 2; j++) {
      const __m512d low = _mm512_castps_pd(a[i + j]), high = _mm512_castps_pd(a[i + j + 2]);
      b[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
      b[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
    }
  PHLOEM_UNROLL for (int j = 0; j < 4; j++) {
    const __m512 even = _mm512_shuffle_f32x4(b[j], b[4 + j], 0x88), odd = _mm512_shuffle_f32x4(b[j], b[4 + j], 0xdd);
    const __m512 even2 = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0x88), odd2 = _mm512_shuffle_f32x4(b[8 + j], b[12 + j], 0xdd);
    t[j] = (vf)_mm512_shuffle_f32x4(even, even2, 0x88);
    t[4 + j] = (vf)_mm512_shuffle_f32x4(odd, odd2, 0x88);
    t[8 + j] = (vf)_mm512_shuffle_f32x4(even, even2, 0xdd);
    t[12 + j] = (vf)_mm512_shuffle_f32x4(odd, odd2, 0xdd);
  }
#elif defined(PHLOEM_AVX2)
  __m256 a[8], b[8];
  PHLOEM_UNROLL for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps((__m256)t[i], (__m256)t[i + 1]);
    a[i + 1] = _mm256_unpackhi_ps((__m256)t[i], (__m256)t[i + 1]);
  }
  PHLOEM_UNROLL for (int i = 0; i < 8; i += 4)
    PHLOEM_UNROLL for (int j = 0; j < 2; j++) {
      const __m256d low = _mm256_castps_pd(a[i + j]), high = _mm256_castps_pd(a[i + j + 2]);
      b[i + 2 * j] = _mm256_castpd_ps(_mm256_unpacklo_pd(low, high));
      b[i + 2 * j + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(low, high));
    }
  PHLOEM_UNROLL for (int j = 0; j < 4; j++) {
    t[j] = (vf)_mm256_permute2f128_ps(b[j], b[4 + j], 0x20);
    t[4 + j] = (vf)_mm256_permute2f128_ps(b[j], b[4 + j], 0x31);
  }
#else
  PHLOEM_UNROLL for (int h = W / 2; h > 0; h /= 2) {
    vi low, high;  // row i keeps its low blocks and takes row i + h's; the other way round
    for (int j = 0; j < W; j++) {
      const bool upper = (j & h) != 0;
      low[j] = upper ? W + j - h : j;
      high[j] = upper ? W + j : j + h;
    }
    PHLOEM_UNROLL for (int i = 0; i < W; i++) {
      if (i & h) continue;
      const vf a = t[i], b = t[i + h];
      t[i] = __builtin_shuffle(a, b, low);
      t[i + h] = __builtin_shuffle(a, b, high);
    }
  }
#endif
}

// ---- bf16: W of them <-> vf. Rounds to nearest even; a NaN stays a NaN.
PHLOEM_INLINE float bf16_to_f(uint16_t h) {
  uint32_t u = (uint32_t)h << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
PHLOEM_INLINE uint16_t f_to_bf16(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40u);
  u += 0x7fffu + ((u >> 16) & 1u);
  return (uint16_t)(u >> 16);
}
PHLOEM_INLINE vf load_bf16(const uint16_t* p) {
#if defined(PHLOEM_AVX512)
  return as_f((vi)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
#elif defined(PHLOEM_AVX2)
  return as_f((vi)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
#else
  vi v;
  for (int i = 0; i < W; i++) v[i] = (int32_t)((uint32_t)p[i] << 16);
  return as_f(v);
#endif
}
PHLOEM_INLINE void store_bf16(uint16_t* p, vf v) {
  alignas(64) float t[W];
  store(t, v);
  for (int i = 0; i < W; i++) p[i] = f_to_bf16(t[i]);
}
// bf16 pairs lie [even, odd] in one 32-bit lane: the two floats of W lanes.
PHLOEM_INLINE vf pair_even(vi w) { return as_f(w << 16); }
PHLOEM_INLINE vf pair_odd(vi w) { return as_f(w & (int32_t)0xffff0000u); }

// ---- exp, Cephes' polynomial: within 2 ulp; exactly 0 below -87.3 (so exp(-inf) is 0), inf above 88.7; NaN stays.
PHLOEM_INLINE vf exp(vf x) {
  const vf magic = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer, kept in the low bits
  const vf y = min(set1(88.72284f), max(set1(-87.33654f), x));
  const vf shifted = fma(y, set1(1.44269504f), magic);
  const vf n = shifted - magic;
  const vi ni = as_i(shifted) - as_i(magic);
  vf r = fma(n, set1(-0.693359375f), y);
  r = fma(n, set1(2.12194440e-4f), r);
  vf p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r + set1(1.0f));
  // 2^n in two factors: n reaches 128, whose single factor would be infinite.
  const vi half = ni >> 1;
  const vf result = p * as_f((half + 127) << 23) * as_f((ni - half + 127) << 23);
  const vf capped = select(x > set1(88.72284f), as_f(set1_i(0x7f800000)), result);
  return select(x < set1(-87.33654f), zero(), capped);
}

// The same bits for x <= 0 (or NaN), where nothing can overflow: what softmax wants.
PHLOEM_INLINE vf exp_to_1(vf x) {
#if defined(PHLOEM_AVX512)
  const vf magic = set1(12582912.0f);
  const vf y = max(set1(-87.33654f), x);
  const vf n = fma(y, set1(1.44269504f), magic) - magic;
  vf r = fma(n, set1(-0.693359375f), y);
  r = fma(n, set1(2.12194440e-4f), r);
  vf p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r + set1(1.0f));
  const __mmask16 keep = _mm512_cmp_ps_mask((__m512)x, (__m512)set1(-87.33654f), _CMP_NLT_UQ);
  return (vf)_mm512_maskz_scalef_ps(keep, (__m512)p, (__m512)n);  // p * 2^n, rounded once, as two exact factors are
#else
  return exp(x);
#endif
}

PHLOEM_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
PHLOEM_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

// Ends a chain that GCC would otherwise re-associate into long-lived temporaries and spill (integer kernels: 95 -> 207 GOP/s).
#if defined(__x86_64__)
#define PHLOEM_KEEP(x) asm volatile("" : "+x"(x))
#define PHLOEM_KEEP_V(x) asm volatile("" : "+v"(x))
#else
#define PHLOEM_KEEP(x) (void)0
#define PHLOEM_KEEP_V(x) (void)0
#endif

}  // namespace phloem::PHLOEM_NS
