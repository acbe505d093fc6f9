// What simd.h promises, made visible to tests: one function a variant.
#include "simd_probe.h"

#include "simd.h"

namespace phloem::PHLOEM_NS {

void simd_probe_exp(const float* x, float* y, int n) {
  for (int i = 0; i < n; i += W) store_part(y + i, exp(load_part(x + i, n - i < W ? n - i : W)), n - i < W ? n - i : W);
}
int simd_width() { return W; }

}  // namespace phloem::PHLOEM_NS
