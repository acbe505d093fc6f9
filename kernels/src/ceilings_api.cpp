// C entries of phloem_ceilings.h.
#include "phloem_ceilings.h"

#include <atomic>

#include "ceilings.h"
#include "context.h"

using phloem::Spmd;

namespace {
volatile float sink;  // the compiler must believe that the results matter
}

extern "C" {

PHLOEM_API int phloem_ceiling_read(phloem_context* context, const void* memory, int64_t bytes) {
  if (context == nullptr) return PHLOEM_BAD_ARGUMENT;
  if (memory == nullptr || bytes < 0) return context->fail(PHLOEM_BAD_ARGUMENT, "memory is NULL, or %lld bytes", static_cast<long long>(bytes));
  const auto read = PHLOEM_PICK(ceiling_read, context->variant);
  return context->run([&](Spmd& spmd) { sink = read(static_cast<const char*>(memory), bytes, spmd); });
}

PHLOEM_API int phloem_ceiling_fma(phloem_context* context, int64_t rounds, double* operations) {
  if (context == nullptr || operations == nullptr) return PHLOEM_BAD_ARGUMENT;
  const auto loop = PHLOEM_PICK(ceiling_fma, context->variant);
  const int status = context->run([&](Spmd& spmd) {
    double mine;
    sink = loop(rounds, &mine);
    if (spmd.thread == 0) *operations = mine * spmd.threads;
  });
  return status;
}

PHLOEM_API int phloem_ceiling_dot(phloem_context* context, int64_t rounds, double* operations) {
  if (context == nullptr || operations == nullptr) return PHLOEM_BAD_ARGUMENT;
  const auto loop = PHLOEM_PICK(ceiling_dot, context->variant);
  const int status = context->run([&](Spmd& spmd) {
    double mine;
    sink = loop(rounds, &mine);
    if (spmd.thread == 0) *operations = mine * spmd.threads;
  });
  return status;
}

}  // extern "C"
