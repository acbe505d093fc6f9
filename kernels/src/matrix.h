// A weight matrix [n, k] in memory: y = x W^T reads it. Panels of `width` output columns, so that one vector load holds `W`
// columns and each output element is one lane's chain over k, whatever the number of rows of x.
//
//   f32     panel p: [k][width] float                     bf16: [ceil(k/2)][width] pairs, even k in the low half
//   q8_0    panel p: [k/32][width] scales | [k/32][32 x width] int8     (order of the 32 by variant, pack.cpp)
//   q4_*    panel p: [k/32][width] scales (q4_1: and minima) | [k/32][16 x width] nibbles
//   rows    f32 or bf16 as [n][k], someone else's memory (a trainer's): no panels, the same bits
//
// Columns past n, up to the next multiple of width, are zero. Each region of a panel starts on 64 bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "variants.h"

namespace phloem {

enum class Kind : int32_t { kF32 = 0, kBf16 = 1, kQ8_0 = 2, kQ4_0 = 3, kQ4_1 = 4, kF16 = 5 };  // f16: as a source only

inline bool quantised(Kind kind) { return kind == Kind::kQ8_0 || kind == Kind::kQ4_0 || kind == Kind::kQ4_1; }

struct Matrix {
  Kind kind;
  int32_t n, k;
  const char* data;
  int64_t row_bytes;     // > 0: plain rows of that stride; 0: panels
  // Panels only:
  int32_t width;         // columns a panel
  int64_t panel_bytes;
  int64_t quants;        // offset of the quants in a panel
};

inline int panels(const Matrix& m, int width) { return (m.n + width - 1) / width; }

// Bytes of a row of n = 1 in a source of this kind: plain numbers, or GGUF blocks.
inline int64_t source_row_bytes(Kind kind, int64_t k) {
  switch (kind) {
    case Kind::kF32: return 4 * k;
    case Kind::kBf16:
    case Kind::kF16: return 2 * k;
    case Kind::kQ8_0: return k / 32 * 34;
    case Kind::kQ4_0: return k / 32 * 18;
    case Kind::kQ4_1: return k / 32 * 20;
  }
  return 0;
}

// Fills in width, panel_bytes, quants; returns the bytes of the whole.
PHLOEM_DECLARE(int64_t, matrix_layout, (Matrix& m))
// Packs panels [begin, end) of m (its `data` is writable memory of matrix_layout's size) from rows of `source` kind.
PHLOEM_DECLARE(void, matrix_pack, (const Matrix& m, Kind source, const char* rows, int64_t row_bytes, int begin, int end))
// Row n of the matrix as floats: what the arithmetic takes it for.
PHLOEM_DECLARE(void, matrix_row, (const Matrix& m, int n, float* out))
PHLOEM_DECLARE(int, panel_width, ())

}  // namespace phloem
