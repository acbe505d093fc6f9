// For tests: simd.h's own functions in each variant.
#pragma once

#include "variants.h"

namespace phloem {
PHLOEM_DECLARE(void, simd_probe_exp, (const float* x, float* y, int n))
PHLOEM_DECLARE(int, simd_width, ())
}  // namespace phloem
