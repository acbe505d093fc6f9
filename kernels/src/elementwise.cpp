// See elementwise.h.
#include "elementwise.h"

#include <cmath>

#include "simd.h"

namespace phloem::PHLOEM_NS {

void embed_rows(const Matrix& table, const int32_t* ids, int rows, float* y, int64_t y_ld, Spmd& spmd) {
  int begin, end;
  spmd.share(rows, 1, &begin, &end);
  for (int r = begin; r < end; r++) matrix_row(table, ids[r], y + r * y_ld);
}

void rms_norm_rows(const float* x, int64_t x_ld, const float* weight, float eps, int rows, int n, float* y, int64_t y_ld,
                   Spmd& spmd) {
  int begin, end;
  spmd.share(rows, 1, &begin, &end);
  for (int r = begin; r < end; r++) {
    const float* in = x + r * x_ld;
    float* out = y + r * y_ld;
    vf sums = zero();
    int i = 0;
    for (; i + W <= n; i += W) {
      const vf v = load(in + i);
      sums = fma(v, v, sums);
    }
    if (i < n) {
      const vf v = load_part(in + i, n - i);
      sums = fma(v, v, sums);
    }
    const vf scale = set1(1.0f / std::sqrt(hsum(sums) / (float)n + eps));
    for (i = 0; i + W <= n; i += W) store(out + i, load(in + i) * scale * load(weight + i));
    if (i < n) store_part(out + i, load_part(in + i, n - i) * scale * load_part(weight + i, n - i), n - i);
  }
}

void gather_rows(const float* x, int64_t x_ld, const int32_t* index, int rows, int n, float* y, int64_t y_ld, Spmd& spmd) {
  int begin, end;
  spmd.share(rows, 1, &begin, &end);
  for (int r = begin; r < end; r++) std::memcpy(y + r * y_ld, x + index[r] * x_ld, (size_t)n * 4);
}

}  // namespace phloem::PHLOEM_NS
