// Drawing tokens: see include/phloem_sample.h.
#pragma once

#include <cstddef>

#include "phloem_sample.h"
#include "pool.h"
#include "variants.h"

namespace phloem {

constexpr int kSampleBlock = 64;       // ids whose maximum and sum are kept, so that a pass can leave them out
constexpr int kSampleBuckets = 87 * 64 + 64;  // of z = (x - max) / T in 0 .. -87, 64 a unit

struct SampleItem {  // key: value and id in one order (sample_select.h)
  uint64_t key;
  float weight;
};

struct SampleArgs {
  const float* logits;
  int64_t stride;
  int width, vocab;
  const phloem_sample_row* rows;  // of sample_run
  const phloem_score_row* scores;  // of score_run
  int num_rows;
  phloem_sample_result* results;
};

// A thread's memory: edited logits and weights of a row, block maxima and sums, selection items, a histogram.
struct SampleScratch {
  float *x, *e, *block_max;
  double *block_sum, *buckets;
  SampleItem* items;

  static size_t lay_out(int vocab, char* base, SampleScratch* out) {
    const size_t blocks = ((size_t)vocab + kSampleBlock - 1) / kSampleBlock, ids = blocks * kSampleBlock;
    size_t at = 0;
    auto take = [&](size_t bytes) {
      const size_t begin = at;
      at += (bytes + 63) / 64 * 64;
      return base == nullptr ? nullptr : base + begin;
    };
    char* p[6] = {take(ids * 4), take(ids * 4), take(blocks * 4), take(blocks * 8), take(2 * kSampleBuckets * 8),
                  take(ids * sizeof(SampleItem))};
    if (out != nullptr) *out = {(float*)p[0], (float*)p[1], (float*)p[2], (double*)p[3], (double*)p[4], (SampleItem*)p[5]};
    return at;
  }
};

PHLOEM_DECLARE(void, sample_run, (const SampleArgs& args, Spmd& spmd))
PHLOEM_DECLARE(void, score_run, (const SampleArgs& args, Spmd& spmd))

}  // namespace phloem
