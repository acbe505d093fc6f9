// The arithmetic of attention: what happens to a row is the same whatever rows are beside it (attention.h, B1).
// For attention.cpp alone, so in an unnamed namespace; a strip of registers is [MR rows][NV vectors].
#pragma once

#include "simd.h"

namespace phloem::PHLOEM_NS {
namespace {

// Rows a pass. Registers: 32 of 16 floats, 16 of 8, 16 of 4.
#if defined(PHLOEM_AVX512)
constexpr int kScoreRows = 12;
constexpr int kOutputRows = 6, kOutputVectors = 4;
constexpr int kFewRows = 6;
#elif defined(PHLOEM_AVX2)
constexpr int kScoreRows = 6;
constexpr int kOutputRows = 6, kOutputVectors = 2;
constexpr int kFewRows = 3;  // up to these, strips of 4 vectors
#else
constexpr int kScoreRows = 3;
constexpr int kOutputRows = 3, kOutputVectors = 4;
constexpr int kFewRows = 3;
#endif
constexpr int kScoreVectors = 16 / W;

// set1() adds to zero, one instruction too many for the inner loop.
PHLOEM_INLINE vf broadcast(float x) {
#if defined(PHLOEM_AVX512)
  return (vf)_mm512_set1_ps(x);
#elif defined(PHLOEM_AVX2)
  return (vf)_mm256_set1_ps(x);
#elif defined(__SSE__)
  return (vf)_mm_set1_ps(x);
#else
  return vf{x, x, x, x};
#endif
}
PHLOEM_INLINE float to_float(float x) { return x; }
PHLOEM_INLINE float to_float(uint16_t x) { return bf16_to_f(x); }
PHLOEM_INLINE vf load_kv(const float* p) { return load(p); }
PHLOEM_INLINE vf load_kv(const uint16_t* p) { return load_bf16(p); }
PHLOEM_INLINE vf load_kv_part(const float* p, int n) { return load_part(p, n); }
PHLOEM_INLINE vf load_kv_part(const uint16_t* p, int n) {
  alignas(64) uint16_t t[W] = {};
  for (int i = 0; i < n; i++) t[i] = p[i];
  return load_bf16(t);
}

void scale_row(const float* x, float scale, int n, float* y) {
  int i = 0;
  for (; i + W <= n; i += W) store(y + i, load(x + i) * broadcast(scale));
  if (i < n) store_part(y + i, load_part(x + i, n - i) * broadcast(scale), n - i);
}
void clear(float* x, int n) { __builtin_memset(x, 0, sizeof(float) * (size_t)n); }
void copy(const float* x, int n, float* y) { __builtin_memcpy(y, x, sizeof(float) * (size_t)n); }

// ---- scores of one piece: s[m][0..16) = q[m] . k[.][0..16), ascending d. The line that a later piece has at this place in its
// own panel is fetched meanwhile; after the loop over pages instead, memory would idle while the units work and the reverse.
template <int MR, class T, bool kFetch>
void score_strip(int dim, const float* q, const T* k, int ldk, float* s, int lds, const char* next, int next_stride) {
  vf acc[MR][kScoreVectors];
  PHLOEM_UNROLL
  for (int m = 0; m < MR; m++) {
    PHLOEM_UNROLL
    for (int v = 0; v < kScoreVectors; v++) acc[m][v] = zero();
  }
  for (int d = 0; d < dim; d += 4) {
    PHLOEM_UNROLL
    for (int e = 0; e < 4; e++) {
      vf b[kScoreVectors];
      PHLOEM_UNROLL
      for (int v = 0; v < kScoreVectors; v++) b[v] = load_kv(k + (int64_t)(d + e) * ldk + v * W);
      PHLOEM_UNROLL
      for (int m = 0; m < MR; m++) {
        const vf a = broadcast(q[m * dim + d + e]);
        PHLOEM_UNROLL
        for (int v = 0; v < kScoreVectors; v++) acc[m][v] = fma(a, b[v], acc[m][v]);
      }
      if constexpr (kFetch) {
        prefetch(next);
        next += next_stride;
      }
    }
  }
  PHLOEM_UNROLL
  for (int m = 0; m < MR; m++) {
    PHLOEM_UNROLL
    for (int v = 0; v < kScoreVectors; v++) store(s + (int64_t)m * lds + v * W, acc[m][v]);
  }
}
template <int MR, class T, bool kFetch>
void score_few(int rows, int dim, const float* q, const T* k, int ldk, float* s, int lds, const char* next, int next_stride) {
  if (rows == MR) score_strip<MR, T, kFetch>(dim, q, k, ldk, s, lds, next, next_stride);
  else if constexpr (MR > 1) score_few<MR - 1, T, kFetch>(rows, dim, q, k, ldk, s, lds, next, next_stride);
}
template <class T>
void scores(int rows, int dim, const float* q, const T* k, int ldk, float* s, int lds, const void* next, int next_stride) {
  for (int m = 0; m < rows; m += kScoreRows) {
    const int n = rows - m < kScoreRows ? rows - m : kScoreRows;
    const float* qm = q + (int64_t)m * dim;
    float* sm = s + (int64_t)m * lds;
    if (m == 0 && next != nullptr) score_few<kScoreRows, T, true>(n, dim, qm, k, ldk, sm, lds, (const char*)next, next_stride);
    else score_few<kScoreRows, T, false>(n, dim, qm, k, ldk, sm, lds, nullptr, 0);
  }
}

// ---- outputs of one piece: o[m][.] += s[m][j] * v[j][.] for j in [begin, end), ascending.
template <int MR, int NV, class T, bool kFetch>
void output_strip(int dim, int begin, int end, const float* s, int lds, const T* v, float* o, const T* next) {
  vf acc[MR][NV];
  PHLOEM_UNROLL
  for (int m = 0; m < MR; m++) {
    PHLOEM_UNROLL
    for (int c = 0; c < NV; c++) acc[m][c] = load(o + (int64_t)m * dim + c * W);
  }
  for (int j = begin; j < end; j++) {
    vf b[NV];
    PHLOEM_UNROLL
    for (int c = 0; c < NV; c++) b[c] = load_kv(v + (int64_t)j * dim + c * W);
    PHLOEM_UNROLL
    for (int m = 0; m < MR; m++) {
      const vf a = broadcast(s[(int64_t)m * lds + j]);
      PHLOEM_UNROLL
      for (int c = 0; c < NV; c++) acc[m][c] = fma(a, b[c], acc[m][c]);
    }
    if constexpr (kFetch) {
      constexpr int kLine = 64 / (int)sizeof(T);
      PHLOEM_UNROLL
      for (int c = 0; c < NV * W; c += kLine) prefetch(next + (int64_t)j * dim + c);
    }
  }
  PHLOEM_UNROLL
  for (int m = 0; m < MR; m++) {
    PHLOEM_UNROLL
    for (int c = 0; c < NV; c++) store(o + (int64_t)m * dim + c * W, acc[m][c]);
  }
}
// The last dim % W columns.
template <class T>
void output_tail(int rows, int n, int dim, int begin, int end, const float* s, int lds, const T* v, float* o) {
  for (int m = 0; m < rows; m++) {
    vf acc = load_part(o + (int64_t)m * dim, n);
    for (int j = begin; j < end; j++) acc = fma(broadcast(s[(int64_t)m * lds + j]), load_kv_part(v + (int64_t)j * dim, n), acc);
    store_part(o + (int64_t)m * dim, acc, n);
  }
}
template <int MR, int NV, class T, bool kFetch>
void output_few(int rows, int dim, int begin, int end, const float* s, int lds, const T* v, float* o, const T* next) {
  if (rows == MR) output_strip<MR, NV, T, kFetch>(dim, begin, end, s, lds, v, o, next);
  else if constexpr (MR > 1) output_few<MR - 1, NV, T, kFetch>(rows, dim, begin, end, s, lds, v, o, next);
}
template <int MR, int NV, class T>
int output_columns(int rows, int dim, int c, int begin, int end, const float* s, int lds, const T* v, float* o, const T* next) {
  for (; c + NV * W <= dim; c += NV * W) {
    if (next != nullptr) output_few<MR, NV, T, true>(rows, dim, begin, end, s, lds, v + c, o + c, next + c);
    else output_few<MR, NV, T, false>(rows, dim, begin, end, s, lds, v + c, o + c, nullptr);
  }
  return c;
}
template <class T>
void outputs(int rows, int dim, int begin, int end, const float* s, int lds, const T* v, float* o, const void* next_piece) {
  const T* next = static_cast<const T*>(next_piece);
  for (int m = 0; m < rows; m += kOutputRows) {
    const int n = rows - m < kOutputRows ? rows - m : kOutputRows;
    const float* sm = s + (int64_t)m * lds;
    float* om = o + (int64_t)m * dim;
    int c = 0;
    if (n <= kFewRows) c = output_columns<kFewRows, 4, T>(n, dim, c, begin, end, sm, lds, v, om, next);
    if constexpr (kOutputVectors != 4) c = output_columns<kOutputRows, kOutputVectors, T>(n, dim, c, begin, end, sm, lds, v, om, next);
    c = output_columns<kOutputRows, 1, T>(n, dim, c, begin, end, sm, lds, v, om, next);
    if (c < dim) output_tail(n, dim - c, dim, begin, end, sm, lds, v + c, om + c);
    next = nullptr;
  }
}

// ---- bf16 panels as float, once for several passes
void expand_k(const uint16_t* k, int ldk, int dim, float* to) {
  for (int d = 0; d < dim; d++)
    for (int v = 0; v < 16; v += W) store(to + d * 16 + v, load_bf16(k + (int64_t)d * ldk + v));
}
void expand_v(const uint16_t* v, int n, float* to) {
  for (int i = 0; i < n; i += W) store(to + i, load_bf16(v + i));
}

// ---- softmax of one row over positions [begin, end) of its split
// Cephes' tanhf: the polynomial where 1 - 2 / (exp(2x) + 1) would cancel.
PHLOEM_INLINE vf tanh(vf x) {
  const vf a = abs(x), z = x * x;
  vf p = broadcast(-5.70498872745e-3f);
  p = fma(p, z, broadcast(2.06390887954e-2f));
  p = fma(p, z, broadcast(-5.37397155531e-2f));
  p = fma(p, z, broadcast(1.33314422036e-1f));
  p = fma(p, z, broadcast(-3.33332819422e-1f));
  p = fma(p * z, x, x);
  const vf big = broadcast(1.0f) - broadcast(2.0f) / (exp(a + a) + broadcast(1.0f));
  const vf signed_big = as_f(as_i(big) | (as_i(x) & (int32_t)0x80000000u));
  return select(a < broadcast(0.625f), p, signed_big);
}

// Sixteen sums by position % 16, whatever W is: so AVX2 and AVX-512 agree, and zeros beyond the ends change nothing.
void softmax_row(float* s, int begin, int end, float softcap, float* max_out, float* sum_out) {
  const int first = begin & ~15, last = (end + 15) & ~15;
  if (softcap > 0.0f)
    for (int j = first; j < last; j += W) store(s + j, broadcast(softcap) * tanh(load(s + j) / broadcast(softcap)));
  for (int j = first; j < begin; j++) s[j] = -__builtin_inff();
  for (int j = end; j < last; j++) s[j] = -__builtin_inff();
  vf top = load(s + first);
  for (int j = first + W; j < last; j += W) top = max(top, load(s + j));
  const float m = hmax(top);
  vf sums[kScoreVectors];
  PHLOEM_UNROLL
  for (int v = 0; v < kScoreVectors; v++) sums[v] = zero();
  for (int j = first; j < last; j += 16) {
    PHLOEM_UNROLL
    for (int v = 0; v < kScoreVectors; v++) {
      const vf e = exp(load(s + j + v * W) - broadcast(m));
      store(s + j + v * W, e);
      sums[v] = sums[v] + e;
    }
  }
  for (int h = kScoreVectors / 2; h > 0; h /= 2)
    for (int v = 0; v < h; v++) sums[v] = sums[v] + sums[v + h];
  *max_out = m;
  *sum_out = hsum(sums[0]);
}

// ---- one row's next split into those before it
void merge(bool begins, int dim, float* all_o, float* all_m, float* all_l, const float* o, float m, float l) {
  if (begins) {
    copy(o, dim, all_o);
    *all_m = m;
    *all_l = l;
    return;
  }
  const float top = *all_m > m ? *all_m : m;
  const vf before = exp(broadcast(*all_m - top)), now = exp(broadcast(m - top));
  *all_l = fma1(*all_l, before[0], l * now[0]);
  *all_m = top;
  int d = 0;
  for (; d + W <= dim; d += W) store(all_o + d, fma(load(all_o + d), before, load(o + d) * now));
  if (d < dim) store_part(all_o + d, fma(load_part(all_o + d, dim - d), before, load_part(o + d, dim - d) * now), dim - d);
}
void divide(int dim, const float* o, float l, float* to) {
  int d = 0;
  for (; d + W <= dim; d += W) store(to + d, load(o + d) / broadcast(l));
  if (d < dim) store_part(to + d, load_part(o + d, dim - d) / broadcast(l), dim - d);
}

}  // namespace
}  // namespace phloem::PHLOEM_NS
