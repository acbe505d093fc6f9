// Panels of q8_0, q4_0 and q4_1 against rows quantised to int8. Block sums are exact integers, so every variant and tile agrees
// on them; the floats around them keep one order.
//
//   VNNI       weights unsigned (q8 + 128, nibbles), x signed: dpbusd over 4 k; 128 or 8 times x's block sum is taken off first
//   AVX2/512   q8: weights widened to int16, madd over pairs of k with int16 x (as fast as the sign trick, and -128 is nothing special)
//              q4: maddubs over 4 k; eight of them fit int16 (8 * 2 * 15 * 127 = 30480), so one madd per block
//   baseline   int16 madd for both
#include "linear_quant.h"

#include "half.h"
#include "linear.h"

namespace phloem::PHLOEM_NS {
namespace {

constexpr int NV = 3, NR = NV * W;
constexpr int MR = 4;
constexpr int kAhead = 4096;

PHLOEM_INLINE vf load_half(const uint16_t* p) {
#if defined(PHLOEM_AVX512)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(PHLOEM_AVX2)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  vf v;
  for (int i = 0; i < W; i++) v[i] = half_to_f(p[i]);
  return v;
#endif
}

PHLOEM_INLINE vi load_quants(const char* p) { return load_i(reinterpret_cast<const int32_t*>(p)); }
PHLOEM_INLINE int32_t four_bytes(const void* p) {
  int32_t v;
  std::memcpy(&v, p, 4);
  return v;
}

// W pairs of int8, widened to int16 pairs.
PHLOEM_INLINE vi widen_pairs(const char* p) {
#if defined(PHLOEM_AVX512)
  return (vi)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p));
#elif defined(PHLOEM_AVX2)
  return (vi)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p));
#else
  vi v;
  for (int i = 0; i < W; i++) v[i] = (int32_t)(((uint32_t)(int32_t)(int8_t)p[2 * i] & 0xffffu) | (uint32_t)(int32_t)(int8_t)p[2 * i + 1] << 16);
  return v;
#endif
}

#if !defined(PHLOEM_VNNI) && !defined(PHLOEM_GENERIC)
PHLOEM_INLINE vi maddubs(vi unsigned_bytes, vi signed_bytes) {
#if defined(PHLOEM_AVX512)
  return (vi)_mm512_maddubs_epi16((__m512i)unsigned_bytes, (__m512i)signed_bytes);
#else
  return (vi)_mm256_maddubs_epi16((__m256i)unsigned_bytes, (__m256i)signed_bytes);
#endif
}
PHLOEM_INLINE vi add16(vi a, vi b) {
#if defined(PHLOEM_AVX512)
  return (vi)_mm512_add_epi16((__m512i)a, (__m512i)b);
#else
  return (vi)_mm256_add_epi16((__m256i)a, (__m256i)b);
#endif
}
#endif

// The exact sums of one block of 32 for M rows: acc[m][v].
template <int M, Kind kKind>
PHLOEM_INLINE void block_sums(const char* quants, const QuantRows& q, int row, int b, vi acc[M][NV]) {
  const int64_t at = (int64_t)row * q.k + 32 * b;
  PHLOEM_UNROLL for (int m = 0; m < M; m++) {
    const int32_t sum = q.sum[(int64_t)(row + m) * q.blocks + b];
    (void)sum;
#if defined(PHLOEM_VNNI)
    const vi start = kKind == Kind::kQ8_0 ? set1_i(-128 * sum) : kKind == Kind::kQ4_0 ? set1_i(-8 * sum) : vi{};
#elif defined(PHLOEM_GENERIC)
    const vi start = kKind == Kind::kQ4_0 ? set1_i(-8 * sum) : vi{};
#else
    const vi start = vi{};
#endif
    PHLOEM_UNROLL for (int v = 0; v < NV; v++) acc[m][v] = start;
  }
  if constexpr (kKind == Kind::kQ8_0) {
#if defined(PHLOEM_VNNI)
    const int8_t* x = q.q8 + at;
    PHLOEM_UNROLL for (int j = 0; j < 8; j++) {
      vi w[NV];
      PHLOEM_UNROLL for (int v = 0; v < NV; v++) w[v] = load_quants(quants + (j * NR + v * W) * 4);
      PHLOEM_UNROLL for (int m = 0; m < M; m++) {
        const vi a = set1_i(four_bytes(x + (int64_t)m * q.k + 4 * j));
        PHLOEM_UNROLL for (int v = 0; v < NV; v++) {
          acc[m][v] = dot4(acc[m][v], w[v], a);
          PHLOEM_KEEP_V(acc[m][v]);
        }
      }
    }
#else
    const int16_t* x = q.q16 + at;
    PHLOEM_UNROLL for (int j = 0; j < 16; j++) {
      vi w[NV];
      PHLOEM_UNROLL for (int v = 0; v < NV; v++) w[v] = widen_pairs(quants + (j * NR + v * W) * 2);
      PHLOEM_UNROLL for (int m = 0; m < M; m++) {
        const vi a = set1_i(four_bytes(x + (int64_t)m * q.k + 2 * j));
        PHLOEM_UNROLL for (int v = 0; v < NV; v++) {
          acc[m][v] = madd16(acc[m][v], w[v], a);
          PHLOEM_KEEP_V(acc[m][v]);
        }
      }
    }
#endif
    return;
  }
  const vi low = set1_i(0x0f0f0f0f);
#if defined(PHLOEM_GENERIC)
  const int16_t* x = q.q16 + at;
  for (int j = 0; j < 8; j++) {
    for (int v = 0; v < NV; v++) {
      const char* p = quants + (j * NR + v * W) * 2;
      vi low_pair, high_pair;
      for (int i = 0; i < W; i++) {
        const uint32_t a = (uint8_t)p[2 * i], c = (uint8_t)p[2 * i + 1];
        low_pair[i] = (int32_t)((a & 15) | (c & 15) << 16);
        high_pair[i] = (int32_t)(a >> 4 | (c >> 4) << 16);
      }
      for (int m = 0; m < M; m++) {
        acc[m][v] = madd16(acc[m][v], low_pair, set1_i(four_bytes(x + (int64_t)m * q.k + 2 * j)));
        acc[m][v] = madd16(acc[m][v], high_pair, set1_i(four_bytes(x + (int64_t)m * q.k + 2 * j + 16)));
      }
    }
  }
  (void)low;
#else
  const int8_t* x = q.q8 + at;
  PHLOEM_UNROLL for (int j = 0; j < 4; j++) {
    vi w[NV], high[NV];
    PHLOEM_UNROLL for (int v = 0; v < NV; v++) {
      const vi both = load_quants(quants + (j * NR + v * W) * 4);
      w[v] = both & low;
      high[v] = (both >> 4) & low;  // the sign that >> drags in is masked away
    }
    PHLOEM_UNROLL for (int m = 0; m < M; m++) {
      const vi a = set1_i(four_bytes(x + (int64_t)m * q.k + 4 * j));
      PHLOEM_UNROLL for (int v = 0; v < NV; v++) {
#if defined(PHLOEM_VNNI)
        acc[m][v] = dot4(acc[m][v], w[v], a);
#else
        acc[m][v] = add16(acc[m][v], maddubs(w[v], a));
#endif
        PHLOEM_KEEP_V(acc[m][v]);
      }
    }
    PHLOEM_UNROLL for (int m = 0; m < M; m++) {
      const vi a = set1_i(four_bytes(x + (int64_t)m * q.k + 4 * j + 16));
      PHLOEM_UNROLL for (int v = 0; v < NV; v++) {
#if defined(PHLOEM_VNNI)
        acc[m][v] = dot4(acc[m][v], high[v], a);
#else
        acc[m][v] = add16(acc[m][v], maddubs(high[v], a));
#endif
        PHLOEM_KEEP_V(acc[m][v]);
      }
    }
  }
#if !defined(PHLOEM_VNNI)
  PHLOEM_UNROLL for (int m = 0; m < M; m++) {
    const vi start = kKind == Kind::kQ4_0 ? set1_i(-8 * q.sum[(int64_t)(row + m) * q.blocks + b]) : vi{};
    PHLOEM_UNROLL for (int v = 0; v < NV; v++) acc[m][v] = madd16(start, acc[m][v], set1_i(0x00010001));
  }
#endif
#endif
}

// `lines` cache lines of `next` are fetched with every block: into L2, since in L1 they would push out the panel itself (q8_0,
// M = 8, one thread: 187 -> 317 GOP/s), and at once, which is faster than a line beside each load (q4_1, M = 4: 73 -> 55 us).
template <int M, Kind kKind>
void tile(const char* panel, int64_t quants_at, const QuantRows& q, int row, float* out, const char*& next, int lines) {
  constexpr bool kInRegisters = W == 16 || M == 1;  // AVX2 has no room for the float sums: they wait in L1
  constexpr int kScales = kKind == Kind::kQ4_1 ? 2 * NR : NR, kQuants = (kKind == Kind::kQ8_0 ? 32 : 16) * NR;
  vf sums[M][NV];
  PHLOEM_UNROLL for (int m = 0; m < M; m++)
    PHLOEM_UNROLL for (int v = 0; v < NV; v++) {
      sums[m][v] = zero();
      if (!kInRegisters) store(out + m * NR + v * W, zero());
    }
  const uint16_t* scales = reinterpret_cast<const uint16_t*>(panel);
  const char* quants = panel + quants_at;
  for (int b = 0; b < q.blocks; b++, scales += kScales, quants += kQuants) {
    vi acc[M][NV];
    block_sums<M, kKind>(quants, q, row, b, acc);
    for (int i = 0; i < lines; i++) prefetch_l2(next + 64 * i);
    next += 64 * lines;
    PHLOEM_UNROLL for (int v = 0; v < NV; v++) {
      const vf scale = load_half(scales + v * W);
      vf minimum = zero();
      if (kKind == Kind::kQ4_1) minimum = load_half(scales + NR + v * W);
      PHLOEM_UNROLL for (int m = 0; m < M; m++) {
        const int64_t i = (int64_t)(row + m) * q.blocks + b;
        vf s = kInRegisters ? sums[m][v] : load(out + m * NR + v * W);
        s = fma(to_f(acc[m][v]), scale * set1(q.scale[i]), s);
        if (kKind == Kind::kQ4_1) s = fma(minimum, set1(q.scaled[i]), s);
        if (kInRegisters) sums[m][v] = s;
        else store(out + m * NR + v * W, s);
      }
    }
  }
  if (kInRegisters)
    PHLOEM_UNROLL for (int m = 0; m < M; m++)
      PHLOEM_UNROLL for (int v = 0; v < NV; v++) store(out + m * NR + v * W, sums[m][v]);
}

template <Kind kKind>
void panel_of(const Matrix& m, int panel, const QuantRows& q, int row, int rows, float* out) {
  const char* data = m.data + panel * m.panel_bytes;
  const int tiles = (rows + MR - 1) / MR;
  // A single tile fetches itself ahead, and so runs on into the next panel; several fetch the next panel among them.
  const int lines = (int)((m.panel_bytes / 64 + (int64_t)tiles * q.blocks - 1) / ((int64_t)tiles * q.blocks));
  const char* next = tiles == 1 ? data + m.quants + kAhead : data + m.panel_bytes;
  for (int r = 0; r < rows; r += MR, row += MR, out += MR * NR) switch (rows - r) {
      case 1: tile<1, kKind>(data, m.quants, q, row, out, next, lines); break;
      case 2: tile<2, kKind>(data, m.quants, q, row, out, next, lines); break;
      case 3: tile<3, kKind>(data, m.quants, q, row, out, next, lines); break;
      default: tile<MR, kKind>(data, m.quants, q, row, out, next, lines); break;
    }
}

// 32 integers that fit, as int8 or int16, in order.
PHLOEM_INLINE void store_bytes(int8_t* p, const vi quants[32 / W]) {
#if defined(PHLOEM_AVX512)
  for (int j = 0; j < 2; j++) _mm_storeu_si128((__m128i*)(p + 16 * j), _mm512_cvtepi32_epi8((__m512i)quants[j]));
#elif defined(PHLOEM_AVX2)
  const __m256i low = _mm256_packs_epi32((__m256i)quants[0], (__m256i)quants[1]), high = _mm256_packs_epi32((__m256i)quants[2], (__m256i)quants[3]);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packing works within halves
  _mm256_storeu_si256((__m256i*)p, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order));
#else
  for (int i = 0; i < 32; i++) p[i] = (int8_t)quants[i / W][i % W];
#endif
}
PHLOEM_INLINE void store_words(int16_t* p, const vi quants[32 / W]) {
#if defined(PHLOEM_AVX512)
  for (int j = 0; j < 2; j++) _mm256_storeu_si256((__m256i*)(p + 16 * j), _mm512_cvtepi32_epi16((__m512i)quants[j]));
#elif defined(PHLOEM_AVX2)
  for (int j = 0; j < 2; j++)
    _mm256_storeu_si256((__m256i*)(p + 16 * j),
                        _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)quants[2 * j], (__m256i)quants[2 * j + 1]), 0xd8));
#else
  for (int i = 0; i < 32; i++) p[i] = (int16_t)quants[i / W][i % W];
#endif
}

int64_t align64(int64_t bytes) { return (bytes + 63) & ~int64_t{63}; }

}  // namespace

void panel_quant(const Matrix& m, int panel, const QuantRows& q, int row, int rows, float* out) {
  if (m.kind == Kind::kQ8_0) panel_of<Kind::kQ8_0>(m, panel, q, row, rows, out);
  else if (m.kind == Kind::kQ4_0) panel_of<Kind::kQ4_0>(m, panel, q, row, rows, out);
  else panel_of<Kind::kQ4_1>(m, panel, q, row, rows, out);
}

int64_t quant_rows_bytes(int rows, int k) {
  const int64_t elements = (int64_t)rows * k;
  return align64(elements) + align64(2 * elements) + 3 * align64(elements / 32 * 4);
}

void quant_rows_at(QuantRows& q, char* memory, int rows, int k, const LinearPart* parts, int num_parts) {
  const int64_t elements = (int64_t)rows * k, numbers = align64(elements / 32 * 4);
  bool bytes = false, words = false;
  for (int i = 0; i < num_parts; i++) {
    const Kind kind = parts[i].matrix.kind;
    if (!quantised(kind)) continue;
    const bool wide = kind == Kind::kQ8_0 ? kQ8Group == 2 : kQ4Group == 2;
    (wide ? words : bytes) = true;
  }
  q.k = k;
  q.blocks = k / 32;
  q.q8 = bytes ? reinterpret_cast<int8_t*>(memory) : nullptr;
  memory += align64(elements);
  q.q16 = words ? reinterpret_cast<int16_t*>(memory) : nullptr;
  memory += align64(2 * elements);
  q.scale = reinterpret_cast<float*>(memory);
  q.sum = reinterpret_cast<int32_t*>(memory + numbers);
  q.scaled = reinterpret_cast<float*>(memory + 2 * numbers);
}

void quantise_blocks(const QuantRows& q, const float* x, int64_t x_ld, int begin, int end) {
  constexpr int N = 32 / W;
  int r = begin / q.blocks, b = begin % q.blocks;
  for (int i = begin; i < end; i++, b++) {
    if (b == q.blocks) {
      b = 0;
      r++;
    }
    const float* p = x + r * x_ld + 32 * b;
    vf value[N];
    vi largest = vi{};
    PHLOEM_UNROLL for (int j = 0; j < N; j++) {
      value[j] = load(p + j * W);
      largest = max_i(largest, as_i(abs(value[j])));  // as integers NaN > infinity > numbers: a bad x makes a bad scale, seen later
    }
    const int32_t bits = hmax_i(largest);
    float most;
    std::memcpy(&most, &bits, 4);
    const float scale = most / 127.0f, inverse = most > 0.0f ? 127.0f / most : 0.0f;
    // Adding 1.5 * 2^23 rounds to the nearest integer, ties to even, in every variant.
    const vf magic = set1(12582912.0f), by = set1(inverse);
    vi quants[N];
    vi total = vi{};
    PHLOEM_UNROLL for (int j = 0; j < N; j++) {
      vi n = as_i(value[j] * by + magic) - as_i(magic);
      n = max_i(n, set1_i(-127));
      quants[j] = set1_i(0) - max_i(set1_i(0) - n, set1_i(-127));  // a subnormal scale's inverse can overshoot
      total = total + quants[j];
    }
    const int32_t sum = hsum_i(total);
    const int64_t at = (int64_t)r * q.blocks + b;
    q.scale[at] = scale;
    q.sum[at] = sum;
    q.scaled[at] = scale * (float)sum;
    if (q.q8 != nullptr) store_bytes(q.q8 + (int64_t)r * q.k + 32 * b, quants);
    if (q.q16 != nullptr) store_words(q.q16 + (int64_t)r * q.k + 32 * b, quants);
  }
}

}  // namespace phloem::PHLOEM_NS
