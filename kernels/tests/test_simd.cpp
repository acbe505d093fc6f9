#include <cmath>
#include <limits>
#include <vector>

#include "simd_probe.h"
#include "test.h"

TEST(simd_exp_is_close_and_right_at_the_edges) {
  std::vector<float> x;
  for (float v = -87.3f; v < 88.7f; v += 0.01f) x.push_back(v);
  const size_t finite = x.size();
  const float inf = std::numeric_limits<float>::infinity();
  for (float v : {-inf, -1000.0f, -88.0f, inf, 89.0f, std::nanf(""), 0.0f, 88.7228f}) x.push_back(v);
  for (int variant : phloem_test::variants()) {
    std::vector<float> y(x.size());
    PHLOEM_PICK(simd_probe_exp, variant)(x.data(), y.data(), static_cast<int>(x.size()));
    for (size_t i = 0; i < finite; i++) {
      const double want = std::exp(static_cast<double>(x[i]));
      CHECK(std::fabs(y[i] - want) <= 4e-7 * want);
    }
    const float* e = y.data() + finite;
    CHECK(e[0] == 0 && e[1] == 0 && e[2] == 0 && e[3] == inf && e[4] == inf && e[5] != e[5] && e[6] == 1);
    CHECK(std::isfinite(e[7]) && e[7] > 3.4e38f);
  }
}
