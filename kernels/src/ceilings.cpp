// See ceilings.h.
#include "ceilings.h"

#include "linear_quant.h"
#include "simd.h"

namespace phloem::PHLOEM_NS {
namespace {
constexpr int kChains = 12;  // enough to hide the latency (4 x 2 units); no more than PHLOEM_UNROLL unrolls, or they wait in memory
}

float ceiling_read(const char* memory, int64_t bytes, Spmd& spmd) {
  const int64_t lines = bytes / 1024;
  const int64_t begin = lines * spmd.thread / spmd.threads, end = lines * (spmd.thread + 1) / spmd.threads;
  vi sums[4] = {};
  for (int64_t i = begin; i < end; i++) {
    const char* p = memory + i * 1024;
    for (int j = 0; j < 1024 / (int)sizeof(vi); j += 4)
      PHLOEM_UNROLL for (int c = 0; c < 4; c++) sums[c] ^= load_i(reinterpret_cast<const int32_t*>(p + (j + c) * (int)sizeof(vi)));
  }
  return (float)((sums[0] ^ sums[1]) ^ (sums[2] ^ sums[3]))[0];
}

float ceiling_fma(int64_t rounds, double* operations) {
  vf acc[kChains];
  PHLOEM_UNROLL for (int i = 0; i < kChains; i++) acc[i] = set1((float)i);
  const vf a = set1(0.999f), b = set1(0.001f);
  for (int64_t r = 0; r < rounds; r++) PHLOEM_UNROLL for (int i = 0; i < kChains; i++) {
      acc[i] = fma(acc[i], a, b);
      PHLOEM_KEEP_V(acc[i]);
    }
  *operations = (double)rounds * kChains * W * 2;
  vf sum = acc[0];
  PHLOEM_UNROLL for (int i = 1; i < kChains; i++) sum = sum + acc[i];
  return hsum(sum);
}

float ceiling_dot(int64_t rounds, double* operations) {
  vi acc[kChains] = {};
  const vi a = set1_i(0x01020304), b = set1_i(0x01010101);
  for (int64_t r = 0; r < rounds; r++) PHLOEM_UNROLL for (int i = 0; i < kChains; i++) {
      acc[i] = block_dot(acc[i], a, b);
      PHLOEM_KEEP_V(acc[i]);
    }
  *operations = (double)rounds * kChains * W * kQ8Group * 2;
  vi sum = acc[0];
  PHLOEM_UNROLL for (int i = 1; i < kChains; i++) sum = sum + acc[i];
  return (float)sum[0];
}

}  // namespace phloem::PHLOEM_NS
