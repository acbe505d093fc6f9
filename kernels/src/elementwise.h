// What goes over rows one element at a time. All threads call; rows are shared out; the caller places the barriers.
#pragma once

#include <cstdint>

#include "matrix.h"
#include "pool.h"
#include "variants.h"

namespace phloem {

// y[r] = table[ids[r]]; ids are within the table (the caller has checked).
PHLOEM_DECLARE(void, embed_rows, (const Matrix& table, const int32_t* ids, int rows, float* y, int64_t y_ld, Spmd& spmd))
// y[r] = x[r] * weight / sqrt(mean(x[r]^2) + eps). The sum runs in lanes over ascending elements, then up a fixed tree.
PHLOEM_DECLARE(void, rms_norm_rows,
               (const float* x, int64_t x_ld, const float* weight, float eps, int rows, int n, float* y, int64_t y_ld, Spmd& spmd))
// y[i] = x[index[i]]
PHLOEM_DECLARE(void, gather_rows, (const float* x, int64_t x_ld, const int32_t* index, int rows, int n, float* y, int64_t y_ld, Spmd& spmd))

}  // namespace phloem
