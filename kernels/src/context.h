// What a phloem_context holds, and how a C entry reports: a status, and words for it.
#pragma once

#include <cstdarg>
#include <cstdio>

#include "memory.h"
#include "phloem.h"
#include "pool.h"
#include "variants.h"

struct phloem_context {
  explicit phloem_context(int threads, phloem::Variant v) : pool(threads), variant(v) {}

  phloem::Pool pool;
  phloem::Memory memory;  // weights and buffers; what is left in it goes with the context
  phloem::Variant variant;
  char* quants = nullptr;  // phloem_linear's quantised rows, kept from call to call
  int64_t quants_bytes = 0;
  char error[512] = "";

  // Keeps the message for phloem_error() and returns the status: `return ctx->fail(PHLOEM_BAD_ARGUMENT, "...", ...)`.
  __attribute__((format(printf, 3, 4))) int fail(int status, const char* format, ...) {
    va_list args;
    va_start(args, format);
    std::vsnprintf(error, sizeof error, format, args);
    va_end(args);
    return status;
  }
  // Runs f(Spmd&) in all threads: PHLOEM_OK, or PHLOEM_FORKED in a fork()ed child.
  template <class F>
  int run(F&& f) {
    if (pool.run(f)) return PHLOEM_OK;
    return fail(PHLOEM_FORKED, "this context belongs to the process that made it; a fork()ed child must make its own");
  }
};
