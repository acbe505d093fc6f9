// Rows into panels. Quantised blocks keep their numbers: packing is a shuffle of bytes, and scales stay as stored.
//
// Order of a block's 32 k values within a panel, c the column:
//   pairs   [16][width][2] int8     q8_0 without VNNI: widened to int16, multiplied and added in pairs
//   quads   [8][width][4] uint8     q8_0 with VNNI: offset by 128, so that -128 is nothing special
//   q4      [4][width][4]           low nibble k = 4 j + i, high nibble 16 later; the baseline: [8][width][2], likewise
#include "half.h"
#include "linear_quant.h"
#include "matrix.h"
#include "simd.h"

namespace phloem::PHLOEM_NS {
namespace {

constexpr int kWidth = 3 * W;

int64_t align64(int64_t bytes) { return (bytes + 63) & ~int64_t{63}; }

float number(Kind source, const char* row, int k) {
  if (source == Kind::kF32) {
    float f;
    std::memcpy(&f, row + 4 * (int64_t)k, 4);
    return f;
  }
  uint16_t h;
  std::memcpy(&h, row + 2 * (int64_t)k, 2);
  return source == Kind::kBf16 ? bf16_to_f(h) : half_to_f(h);
}

// Where the byte (q8) or nibble (q4) of element i of a block goes, from the block's first quant; *high: the upper nibble.
int place_q8(int i, int c) { return kQ8Group * c + i % kQ8Group + i / kQ8Group * kQ8Group * kWidth; }
int place_q4(int i, int c, bool* high) {
  *high = i >= 16;
  i &= 15;
  return kQ4Group * c + i % kQ4Group + i / kQ4Group * kQ4Group * kWidth;
}

int nibble(const uint8_t* qs, int i) { return i < 16 ? qs[i] & 15 : qs[i - 16] >> 4; }

}  // namespace

int panel_width() { return kWidth; }

int64_t matrix_layout(Matrix& m) {
  const int64_t blocks = m.k / 32;
  m.width = kWidth;
  m.quants = 0;
  switch (m.kind) {
    case Kind::kF32: m.panel_bytes = (int64_t)m.k * kWidth * 4; break;
    case Kind::kBf16: m.panel_bytes = ((int64_t)m.k + 1) / 2 * kWidth * 4; break;
    case Kind::kQ8_0:
      m.quants = align64(blocks * kWidth * 2);
      m.panel_bytes = m.quants + blocks * kWidth * 32;
      break;
    case Kind::kQ4_0:
      m.quants = align64(blocks * kWidth * 2);
      m.panel_bytes = m.quants + blocks * kWidth * 16;
      break;
    case Kind::kQ4_1:
      m.quants = align64(blocks * kWidth * 4);
      m.panel_bytes = m.quants + blocks * kWidth * 16;
      break;
    case Kind::kF16: m.panel_bytes = 0; break;
  }
  m.panel_bytes = align64(m.panel_bytes);
  return m.panel_bytes * ((m.n + kWidth - 1) / kWidth);
}

namespace {

// Past the caches: a line that is written whole need not be read first, which would be a third of the traffic.
PHLOEM_INLINE void stream(float* p, vf v) {
#if defined(PHLOEM_AVX512)
  _mm512_stream_ps(p, (__m512)v);  // p is on 64 bytes: panels and their rows are
#else
  store(p, v);
#endif
}
void settle() {
#if defined(PHLOEM_AVX512)
  _mm_sfence();
#endif
}

// A full panel of f32 from f32, squares of W x W at a time: as fast as memory, where the element by element way below takes 7
// times as long. A trainer's update packs all weights every step.
constexpr int kPackAhead = 128;  // floats further along each of the rows: more of them than the hardware follows by itself
void pack_floats(const char* rows, int64_t row_bytes, int k, float* out) {
  const auto row = [&](int c) { return reinterpret_cast<const float*>(rows + c * row_bytes); };
  int at = 0;
  for (; at + W <= k; at += W)
    for (int c = 0; c < kWidth; c += W) {
      vf t[W];
      PHLOEM_UNROLL for (int i = 0; i < W; i++) {
        t[i] = load(row(c + i) + at);
        prefetch(row(c + i) + at + kPackAhead);
      }
      transpose_square(t);
      PHLOEM_UNROLL for (int i = 0; i < W; i++) stream(out + (int64_t)(at + i) * kWidth + c, t[i]);
    }
  for (; at < k; at++)
    for (int c = 0; c < kWidth; c++) out[(int64_t)at * kWidth + c] = row(c)[at];
  settle();
}

}  // namespace

void matrix_pack(const Matrix& m, Kind source, const char* rows, int64_t row_bytes, int begin, int end) {
  for (int p = begin; p < end; p++) {
    char* panel = const_cast<char*>(m.data) + p * m.panel_bytes;
    if (m.kind == Kind::kF32 && source == Kind::kF32 && (p + 1) * kWidth <= m.n) {
      pack_floats(rows + (int64_t)p * kWidth * row_bytes, row_bytes, m.k, reinterpret_cast<float*>(panel));
      continue;
    }
    std::memset(panel, 0, (size_t)m.panel_bytes);
    const int columns = m.n - p * kWidth < kWidth ? m.n - p * kWidth : kWidth;
    for (int c = 0; c < kWidth; c++) {
      const char* row = rows + ((int64_t)p * kWidth + c) * row_bytes;
      if (c >= columns) {  // offset quants: a zero weight is not a zero byte
        if (m.kind == Kind::kQ8_0 && kQ8Offset != 0)
          for (int b = 0; b < m.k / 32; b++)
            for (int i = 0; i < 32; i++) panel[m.quants + (int64_t)b * 32 * kWidth + place_q8(i, c)] = (char)kQ8Offset;
        continue;
      }
      if (m.kind == Kind::kF32) {
        float* out = reinterpret_cast<float*>(panel) + c;
        for (int k = 0; k < m.k; k++) out[(int64_t)k * kWidth] = number(source, row, k);
      } else if (m.kind == Kind::kBf16) {
        uint16_t* out = reinterpret_cast<uint16_t*>(panel) + 2 * c;
        for (int k = 0; k < m.k; k++) {
          uint16_t h;
          if (source == Kind::kBf16) std::memcpy(&h, row + 2 * (int64_t)k, 2);
          else h = f_to_bf16(number(source, row, k));
          out[(int64_t)(k & ~1) * kWidth + (k & 1)] = h;
        }
      } else {
        const int head = m.kind == Kind::kQ4_1 ? 4 : 2;  // scale, or scale and minimum
        const int64_t block_bytes = source_row_bytes(m.kind, 32);
        for (int b = 0; b < m.k / 32; b++) {
          const uint8_t* block = reinterpret_cast<const uint8_t*>(row) + b * block_bytes;
          // q4_1: [block][scales of all columns | minima of all columns]
          std::memcpy(panel + ((int64_t)b * kWidth * (head / 2) + c) * 2, block, 2);
          if (head == 4) std::memcpy(panel + ((int64_t)b * kWidth * 2 + kWidth + c) * 2, block + 2, 2);
          const uint8_t* qs = block + head;
          char* quants = panel + m.quants + (int64_t)b * kWidth * (m.kind == Kind::kQ8_0 ? 32 : 16);
          for (int i = 0; i < 32; i++) {
            if (m.kind == Kind::kQ8_0) {
              quants[place_q8(i, c)] = (char)(qs[i] ^ kQ8Offset);
            } else {
              bool high;
              char& byte = quants[place_q4(i, c, &high)];
              byte = (char)(byte | nibble(qs, i) << (high ? 4 : 0));
            }
          }
        }
      }
    }
  }
}

void matrix_row(const Matrix& m, int n, float* out) {
  if (m.row_bytes > 0) {
    const char* row = m.data + n * m.row_bytes;
    for (int k = 0; k < m.k; k++) out[k] = number(m.kind, row, k);
    return;
  }
  const char* panel = m.data + n / kWidth * m.panel_bytes;
  const int c = n % kWidth;
  if (m.kind == Kind::kF32) {
    const float* in = reinterpret_cast<const float*>(panel) + c;
    for (int k = 0; k < m.k; k++) out[k] = in[(int64_t)k * kWidth];
    return;
  }
  if (m.kind == Kind::kBf16) {
    const uint16_t* in = reinterpret_cast<const uint16_t*>(panel) + 2 * c;
    for (int k = 0; k < m.k; k++) out[k] = bf16_to_f(in[(int64_t)(k & ~1) * kWidth + (k & 1)]);
    return;
  }
  const uint16_t* scales = reinterpret_cast<const uint16_t*>(panel);
  for (int b = 0; b < m.k / 32; b++) {
    const bool q4_1 = m.kind == Kind::kQ4_1;
    const float d = half_to_f(scales[(int64_t)b * kWidth * (q4_1 ? 2 : 1) + c]);
    const float low = q4_1 ? half_to_f(scales[(int64_t)b * kWidth * 2 + kWidth + c]) : 0.0f;
    const char* quants = panel + m.quants + (int64_t)b * kWidth * (m.kind == Kind::kQ8_0 ? 32 : 16);
    for (int i = 0; i < 32; i++) {
      if (m.kind == Kind::kQ8_0) {
        out[32 * b + i] = d * (float)(int8_t)((uint8_t)quants[place_q8(i, c)] ^ kQ8Offset);
      } else {
        bool high;
        const int byte = (uint8_t)quants[place_q4(i, c, &high)];
        const int q = high ? byte >> 4 : byte & 15;
        out[32 * b + i] = q4_1 ? (float)q * d + low : d * (float)(q - 8);
      }
    }
  }
}

}  // namespace phloem::PHLOEM_NS
