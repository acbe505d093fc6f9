// The arithmetic of attention: what happens to a row is the same whatever rows are beside it (attention.h, B1).
// For attention.cpp alone, so in an unnamed namespace; a strip of registers is [MR rows][NV vectors].
#pragma once

#include "attention_plan.h"
#include "simd.h"

namespace phloem::PHLOEM_NS {
namespace {

// Registers: 32 of 16 floats, 16 of 8, 16 of 4. Many rows take few pieces at a time, few rows many.
#if defined(PHLOEM_AVX512)
constexpr int kScoreRows = 12, kScorePieces = 2;
constexpr int kFewRows = 6, kFewPieces = 4;
constexpr int kOutputRows = 6, kOutputVectors = 4;
#elif defined(PHLOEM_AVX2)
constexpr int kScoreRows = 6, kScorePieces = 1;
constexpr int kFewRows = 3, kFewPieces = 2;  // up to these rows, strips of 4 vectors
constexpr int kOutputRows = 6, kOutputVectors = 2;
#else
constexpr int kScoreRows = 3, kScorePieces = 1;
constexpr int kFewRows = 3, kFewPieces = 1;
constexpr int kOutputRows = 3, kOutputVectors = 4;
#endif
constexpr int kScoreVectors = 16 / W;
constexpr int kBlock = 16;                     // positions a piece
constexpr int kRun = 4;                        // pieces on end that the same rows see, taken together
constexpr int kScoreStride = kSplit + kBlock;  // of a row's scores; not a power of two: rows would share a few L1 sets

// A piece of K or V that will be wanted later: `bytes` from first to last. It is fetched while others are used, evenly over the
// strips of rows that use them: otherwise memory would idle while the units work, and the reverse.
struct Ahead {
  const char* at;  // null: nothing
  int64_t bytes;
};
enum Fetch { kNothing, kPart, kAll };  // by one strip

// Strip i of n fetches its part of the pieces: two lines a step of its loop, `half` a step apart.
struct Part {
  const char* at;
  int64_t half;
  Part(const Ahead* ahead, int pieces, int i, int n, int steps) : at(nullptr), half(0) {
    if (ahead == nullptr) return;
    const int64_t bytes = ahead->bytes * pieces / n;
    const int p = i * pieces / n;
    at = ahead[p].at + (ahead->bytes * (i * pieces - p * n)) / n;
    half = bytes / (2 * steps);
  }
  PHLOEM_INLINE void step() {
    prefetch_l2(at);
    prefetch_l2(at + half);
    at += 2 * half;
  }
};

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
template <int N>
struct Constant {
  static constexpr int value = N;
};
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

// A row of q as a column of [n][ld].
void scale_column(const float* x, float scale, int n, float* y, int ld) {
  alignas(64) float t[W];
  for (int i = 0; i < n; i += W) {
    store(t, (n - i < W ? load_part(x + i, n - i) : load(x + i)) * broadcast(scale));
    for (int j = 0; j < W && i + j < n; j++) y[(int64_t)(i + j) * ld] = t[j];
  }
}
void clear(float* x, int n) { __builtin_memset(x, 0, sizeof(float) * (size_t)n); }
void copy(const float* x, int n, float* y) { __builtin_memcpy(y, x, sizeof(float) * (size_t)n); }

// ---- scores of NP pieces: s[m][16 p + .] = q[m] . k[p][.][0..16), ascending d. q is [dim][ldq], so that a row is a constant
// offset.
template <int MR, int NP, class T, Fetch kFetch>
void score_strip(int dim, const float* q, int ldq, const T* const* k, int ldk, float* s, const Ahead* ahead, int strip, int strips) {
  constexpr int kVectors = NP * kScoreVectors;
  vf acc[MR][kVectors];
  PHLOEM_UNROLL
  for (int m = 0; m < MR; m++) {
    PHLOEM_UNROLL
    for (int v = 0; v < kVectors; v++) acc[m][v] = zero();
  }
  const auto two = [&](int d) __attribute__((always_inline)) {
    PHLOEM_UNROLL
    for (int e = 0; e < 2; e++) {
      vf b[kVectors];
      PHLOEM_UNROLL
      for (int v = 0; v < kVectors; v++) b[v] = load_kv(k[v / kScoreVectors] + (int64_t)(d + e) * ldk + v % kScoreVectors * W);
      PHLOEM_UNROLL
      for (int m = 0; m < MR; m++) {
        const vf a = broadcast(q[(int64_t)(d + e) * ldq + m]);
        PHLOEM_UNROLL
        for (int v = 0; v < kVectors; v++) acc[m][v] = fma(a, b[v], acc[m][v]);
      }
    }
  };
  if constexpr (kFetch == kAll) {
    int d = 0;
    for (int p = 0; p < NP; p++) {  // in an NP-th of the work one of the pieces
      const char* next = ahead[p].at;
      const int64_t stride = ahead[p].bytes / dim;
      for (const int end = dim * (p + 1) / NP; d < end; d += 2) {  // dim is a multiple of 8
        two(d);
        PHLOEM_UNROLL
        for (int i = 0; i < 2 * NP; i++) prefetch(next + i * stride);
        next += 2 * NP * stride;
      }
    }
  } else if constexpr (kFetch == kPart) {
    Part part(ahead, NP, strip, strips, dim / 2);
    for (int d = 0; d < dim; d += 2) {
      two(d);
      part.step();
    }
  } else {
    for (int d = 0; d < dim; d += 2) two(d);
  }
  PHLOEM_UNROLL
  for (int m = 0; m < MR; m++) {
    PHLOEM_UNROLL
    for (int v = 0; v < kVectors; v++) store(s + m * kScoreStride + v * W, acc[m][v]);
  }
}
// As many rows as a strip takes of those left; a few sizes, each code of its own. How many that was.
template <int NP, class T, Fetch kFetch>
int score_rows(int rows, int dim, const float* q, int ldq, const T* const* k, int ldk, float* s, const Ahead* ahead) {
  if constexpr (NP <= kScorePieces && kScoreRows > kFewRows)
    if (rows >= kScoreRows) return score_strip<kScoreRows, NP, T, kFetch>(dim, q, ldq, k, ldk, s, ahead, 0, 1), kScoreRows;
  if constexpr (kFewRows > 3)
    if (rows >= kFewRows) return score_strip<kFewRows, NP, T, kFetch>(dim, q, ldq, k, ldk, s, ahead, 0, 1), kFewRows;
  if (rows >= 3) return score_strip<3, NP, T, kFetch>(dim, q, ldq, k, ldk, s, ahead, 0, 1), 3;
  if (rows == 2) return score_strip<2, NP, T, kFetch>(dim, q, ldq, k, ldk, s, ahead, 0, 1), 2;
  return score_strip<1, NP, T, kFetch>(dim, q, ldq, k, ldk, s, ahead, 0, 1), 1;
}
template <int NP, class T>
void score_pieces(int rows, int dim, const float* q, int ldq, const T* const* k, int ldk, float* s, const Ahead* ahead) {
  bool fetch = ahead != nullptr;
  for (int p = 0; fetch && p < NP; p++) fetch = ahead[p].at != nullptr;
  int m = 0;
  if (fetch && rows < 2 * kScoreRows) {
    m = score_rows<NP, T, kAll>(rows, dim, q, ldq, k, ldk, s, ahead);
  } else if constexpr (NP <= kScorePieces) {
    if (fetch)
      for (const int strips = rows / kScoreRows; m + kScoreRows <= rows; m += kScoreRows)
        score_strip<kScoreRows, NP, T, kPart>(dim, q + m, ldq, k, ldk, s + (int64_t)m * kScoreStride, ahead, m / kScoreRows, strips);
  }
  while (m < rows) m += score_rows<NP, T, kNothing>(rows - m, dim, q + m, ldq, k, ldk, s + (int64_t)m * kScoreStride, nullptr);
}
// `pieces` of them, up to kRun. `ahead`: one for each, or null.
template <class T>
void scores(int rows, int dim, const float* q, int ldq, const T* const* k, int ldk, int pieces, float* s, const Ahead* ahead) {
  int p = 0;
  const auto take = [&](auto n) {
    for (; p + n.value <= pieces; p += n.value)
      score_pieces<n.value>(rows, dim, q, ldq, k + p, ldk, s + p * kBlock, ahead == nullptr ? nullptr : ahead + p);
  };
  if (rows <= kFewRows) take(Constant<kFewPieces>{});
  if constexpr (kFewPieces > 2) take(Constant<2>{});
  take(Constant<1>{});
}

// ---- outputs of up to kRun pieces: o[m][.] += s[m][j] * v[j][.] for j in [begin, end), ascending, counted from the first piece.
struct Values {
  int pieces, begin, end;
};
template <int MR, int NV, class T, Fetch kFetch>
void output_strip(int dim, const Values& values, const float* s, const T* const* v, int column, float* o, const Ahead* ahead, int strip,
                  int strips) {
  vf acc[MR][NV];
  PHLOEM_UNROLL
  for (int m = 0; m < MR; m++) {
    PHLOEM_UNROLL
    for (int c = 0; c < NV; c++) acc[m][c] = load(o + (int64_t)m * dim + c * W);
  }
  Part part{kFetch == kPart ? ahead : nullptr, values.pieces, strip, strips, values.pieces * kBlock};
  for (int p = 0; p < values.pieces; p++) {
    const int first = p * kBlock, j0 = values.begin > first ? values.begin - first : 0;
    const int j1 = values.end - first < kBlock ? values.end - first : kBlock;
    const T* vp = v[p] + column + (int64_t)j0 * dim;
    const T* next = kFetch == kAll ? reinterpret_cast<const T*>(ahead[p].at) + column + (int64_t)j0 * dim : nullptr;
    const float* sp = s + first;
    for (int j = j0; j < j1; j++, vp += dim) {
      vf b[NV];
      PHLOEM_UNROLL
      for (int c = 0; c < NV; c++) b[c] = load_kv(vp + c * W);
      PHLOEM_UNROLL
      for (int m = 0; m < MR; m++) {
        const vf a = broadcast(sp[m * kScoreStride + j]);
        PHLOEM_UNROLL
        for (int c = 0; c < NV; c++) acc[m][c] = fma(a, b[c], acc[m][c]);
      }
      if constexpr (kFetch == kAll) {
        constexpr int kLine = 64 / (int)sizeof(T);
        PHLOEM_UNROLL
        for (int c = 0; c < NV * W; c += kLine) prefetch(next + c);
        next += dim;
      } else if constexpr (kFetch == kPart) {
        part.step();
      }
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
void output_tail(int rows, int n, int dim, const Values& values, const float* s, const T* const* v, int column, float* o) {
  for (int m = 0; m < rows; m++) {
    vf acc = load_part(o + (int64_t)m * dim, n);
    for (int j = values.begin; j < values.end; j++) {
      const T* at = v[j / kBlock] + column + (int64_t)(j % kBlock) * dim;
      acc = fma(broadcast(s[(int64_t)m * kScoreStride + j]), load_kv_part(at, n), acc);
    }
    store_part(o + (int64_t)m * dim, acc, n);
  }
}
template <int MR, int NV, class T, Fetch kFetch>
void output_few(int rows, int dim, const Values& values, const float* s, const T* const* v, int column, float* o, const Ahead* ahead) {
  if (rows == MR) output_strip<MR, NV, T, kFetch>(dim, values, s, v, column, o, ahead, 0, 1);
  else if constexpr (MR > 1) output_few<MR - 1, NV, T, kFetch>(rows, dim, values, s, v, column, o, ahead);
}
template <int MR, int NV, class T>
int output_columns(int rows, int dim, int c, const Values& values, const float* s, const T* const* v, float* o, const Ahead* ahead) {
  for (; c + NV * W <= dim; c += NV * W) {
    if (ahead != nullptr) output_few<MR, NV, T, kAll>(rows, dim, values, s, v, c, o + c, ahead);
    else output_few<MR, NV, T, kNothing>(rows, dim, values, s, v, c, o + c, nullptr);
  }
  return c;
}
// `ahead`: one for each piece, or null.
template <class T>
void outputs(int rows, int dim, const Values& values, const float* s, const T* const* v, float* o, const Ahead* ahead) {
  for (int p = 0; ahead != nullptr && p < values.pieces; p++)
    if (ahead[p].at == nullptr) ahead = nullptr;
  const int strips = rows / kOutputRows;
  for (int m = 0; m < rows; m += kOutputRows) {
    const int n = rows - m < kOutputRows ? rows - m : kOutputRows;
    const float* sm = s + (int64_t)m * kScoreStride;
    float* om = o + (int64_t)m * dim;
    int c = 0;
    if (ahead != nullptr && strips > 1) {
      if (n == kOutputRows)
        for (; c + kOutputVectors * W <= dim; c += kOutputVectors * W) {
          if (c == 0) output_strip<kOutputRows, kOutputVectors, T, kPart>(dim, values, sm, v, c, om + c, ahead, m / kOutputRows, strips);
          else output_strip<kOutputRows, kOutputVectors, T, kNothing>(dim, values, sm, v, c, om + c, nullptr, 0, 1);
        }
      if (n <= kFewRows) c = output_columns<kFewRows, 4, T>(n, dim, c, values, sm, v, om, nullptr);
    } else if (n <= kFewRows) {
      c = output_columns<kFewRows, 4, T>(n, dim, c, values, sm, v, om, ahead);
    }
    const Ahead* rest = strips > 1 ? nullptr : ahead;
    if constexpr (kOutputVectors != 4) c = output_columns<kOutputRows, kOutputVectors, T>(n, dim, c, values, sm, v, om, rest);
    c = output_columns<kOutputRows, 1, T>(n, dim, c, values, sm, v, om, rest);
    if (c < dim) output_tail(n, dim - c, dim, values, sm, v, c, om + c);
    if (strips <= 1) ahead = nullptr;
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
      const vf e = exp_to_1(load(s + j + v * W) - broadcast(m));
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
