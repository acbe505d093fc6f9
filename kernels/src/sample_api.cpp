// C entries of phloem_sample.h: arguments are checked here, so that nothing below indexes out of bounds.
#include <cmath>

#include "context.h"
#include "philox.h"
#include "sample.h"

using phloem::SampleArgs;
using phloem::Spmd;

namespace {

int check(phloem_context* context, const SampleArgs& args, int32_t num_logits, const void* rows) {
  if (context == nullptr) return PHLOEM_BAD_ARGUMENT;
  if (args.logits == nullptr || rows == nullptr || args.results == nullptr)
    return context->fail(PHLOEM_BAD_ARGUMENT, "logits, rows or results are NULL");
  if (args.num_rows < 0 || num_logits < 0) return context->fail(PHLOEM_BAD_ARGUMENT, "%d rows of %d logits", args.num_rows, num_logits);
  if (args.vocab < 1 || args.vocab > args.width || args.stride < args.width)
    return context->fail(PHLOEM_BAD_ARGUMENT, "vocabulary %d, width %d, stride %lld: each must be at most the next", args.vocab,
                         args.width, (long long)args.stride);
  if (!context->pool.reserve_scratch(phloem::SampleScratch::lay_out(args.vocab, nullptr, nullptr)))
    return context->fail(PHLOEM_NO_MEMORY, "no memory for sampling scratch");
  return PHLOEM_OK;
}

int check_row(phloem_context* context, int i, int32_t logits_row, int32_t num_logits, int32_t top) {
  if (logits_row < 0 || logits_row >= num_logits)
    return context->fail(PHLOEM_BAD_ARGUMENT, "row %d draws from logits row %d of %d", i, logits_row, num_logits);
  if (top < 0 || top > PHLOEM_MAX_TOP) return context->fail(PHLOEM_BAD_ARGUMENT, "row %d wants %d alternatives; 0 to %d", i, top, PHLOEM_MAX_TOP);
  return PHLOEM_OK;
}

bool listed(const void* a, const void* b, int32_t n) { return n == 0 || (n > 0 && a != nullptr && b != nullptr); }

}  // namespace

extern "C" {

PHLOEM_API int phloem_sample(phloem_context* context, const float* logits, int64_t stride, int32_t num_logits, int32_t width,
                             int32_t vocab, const phloem_sample_row* rows, int32_t num_rows, phloem_sample_result* results) {
  const SampleArgs args{logits, stride, width, vocab, rows, nullptr, num_rows, results};
  if (const int status = check(context, args, num_logits, rows)) return status;
  for (int i = 0; i < num_rows; i++) {
    const phloem_sample_row& r = rows[i];
    if (const int status = check_row(context, i, r.logits_row, num_logits, r.top)) return status;
    if (!listed(r.penalty_ids, r.penalty_times, r.num_penalty) || !listed(r.bias_ids, r.bias_values, r.num_bias) ||
        !listed(r.block_ids, r.block_ids, r.num_block))
      return context->fail(PHLOEM_BAD_ARGUMENT, "row %d has a list of negative length, or none where its length is not 0", i);
    if (!(r.temperature >= 0) || std::isinf(r.temperature) || !(r.top_p > 0) || !(r.min_p >= 0 && r.min_p <= 1) || r.top_k < 0 ||
        !(r.repetition_penalty >= 0) || !std::isfinite(r.frequency_penalty) || !std::isfinite(r.presence_penalty))
      return context->fail(PHLOEM_BAD_ARGUMENT, "row %d: temperature %g, top_p %g, top_k %d, min_p %g, repetition %g: out of range", i,
                           r.temperature, r.top_p, r.top_k, r.min_p, (double)r.repetition_penalty);
  }
  return context->run([&](Spmd& spmd) { PHLOEM_PICK(sample_run, context->variant)(args, spmd); });
}

PHLOEM_API int phloem_score(phloem_context* context, const float* logits, int64_t stride, int32_t num_logits, int32_t width,
                            int32_t vocab, const phloem_score_row* rows, int32_t num_rows, phloem_sample_result* results) {
  const SampleArgs args{logits, stride, width, vocab, nullptr, rows, num_rows, results};
  if (const int status = check(context, args, num_logits, rows)) return status;
  for (int i = 0; i < num_rows; i++) {
    if (const int status = check_row(context, i, rows[i].logits_row, num_logits, rows[i].top)) return status;
    if (rows[i].target < 0 || rows[i].target >= width)
      return context->fail(PHLOEM_BAD_ARGUMENT, "row %d scores token %d of a vocabulary of %d", i, rows[i].target, width);
    if (!(rows[i].temperature >= 0) || std::isinf(rows[i].temperature))
      return context->fail(PHLOEM_BAD_ARGUMENT, "row %d: temperature %g is out of range", i, rows[i].temperature);
  }
  return context->run([&](Spmd& spmd) { PHLOEM_PICK(score_run, context->variant)(args, spmd); });
}

PHLOEM_API double phloem_uniform(uint64_t seed, uint64_t sample, uint64_t position) {
  return phloem::philox_uniform(seed, sample, position);
}

}  // extern "C"
