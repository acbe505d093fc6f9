// Contexts: which variant this CPU gets, and how many threads.
#include <cstring>
#include <new>
#include <system_error>

#include "context.h"
#include "linear.h"

#if defined(PHLOEM_X86_VARIANTS)
#include <cpuid.h>
#endif

namespace {

thread_local char create_error[256] = "";

__attribute__((format(printf, 2, 3))) int create_fail(int status, const char* format, ...) {
  va_list args;
  va_start(args, format);
  std::vsnprintf(create_error, sizeof create_error, format, args);
  va_end(args);
  return status;
}

#if defined(PHLOEM_X86_VARIANTS)
// The OS must save the registers too (XCR0), which CPUID's feature bits do not say; __builtin_cpu_supports checks both.
bool has_v3() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt") && [] {
           unsigned a, b, c, d;  // F16C, MOVBE, LZCNT: not among the names that every compiler's builtin knows
           if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & (1u << 29)) || !(c & (1u << 22))) return false;
           return __get_cpuid(0x80000001u, &a, &b, &c, &d) && (c & (1u << 5)) != 0;
         }();
}
bool has_v4() {
  return has_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_v4_vnni() { return has_v4() && __builtin_cpu_supports("avx512vnni"); }
#endif

}  // namespace

extern "C" {

PHLOEM_API int phloem_supported(int variant) {
  switch (variant) {
    case PHLOEM_BASE: return 1;
#if defined(PHLOEM_X86_VARIANTS)
    case PHLOEM_X86_V3: return has_v3();
    case PHLOEM_X86_V4: return has_v4();
    case PHLOEM_X86_V4_VNNI: return has_v4_vnni();
#endif
    default: return 0;
  }
}

PHLOEM_API const char* phloem_variant_name(int variant) {
  switch (variant) {
    case PHLOEM_BASE: return "base";
    case PHLOEM_X86_V3: return "x86-64-v3";
    case PHLOEM_X86_V4: return "x86-64-v4";
    case PHLOEM_X86_V4_VNNI: return "x86-64-v4-vnni";
    default: return "unknown";
  }
}

PHLOEM_API int phloem_create(int threads, int variant, phloem_context** context) {
  if (context == nullptr) return create_fail(PHLOEM_BAD_ARGUMENT, "context is NULL");
  *context = nullptr;
  if (threads < 1 || threads > 1024) return create_fail(PHLOEM_BAD_ARGUMENT, "threads is %d; give 1 to 1024", threads);
  if (variant == PHLOEM_AUTO) {
    variant = PHLOEM_X86_V4_VNNI;
    while (!phloem_supported(variant)) variant--;
  }
  if (variant < PHLOEM_BASE || variant > PHLOEM_X86_V4_VNNI)
    return create_fail(PHLOEM_BAD_ARGUMENT, "variant is %d; give -1 (the best) or 0 to 3", variant);
  if (!phloem_supported(variant))
    return create_fail(PHLOEM_UNSUPPORTED, "this CPU or this build has no code variant %d (%s); give -1 for the best that it has",
                       variant, phloem_variant_name(variant));
  try {
    *context = new phloem_context(threads, static_cast<phloem::Variant>(variant));
    if (!(*context)->pool.reserve_scratch(phloem::kLinearScratch)) throw std::bad_alloc();
  } catch (const std::bad_alloc&) {
    delete *context;
    *context = nullptr;
    return create_fail(PHLOEM_NO_MEMORY, "no memory for a context of %d threads", threads);
  } catch (const std::system_error&) {
    return create_fail(PHLOEM_NO_MEMORY, "the system starts no %d threads", threads);
  }
  return PHLOEM_OK;
}

PHLOEM_API int phloem_memory_allocate(phloem_context* context, int64_t bytes, void** memory) {
  if (context == nullptr) return PHLOEM_BAD_ARGUMENT;
  if (memory == nullptr || bytes < 0) return context->fail(PHLOEM_BAD_ARGUMENT, "the result is NULL, or %lld bytes", static_cast<long long>(bytes));
  *memory = context->memory.allocate(static_cast<size_t>(bytes));
  return *memory != nullptr ? PHLOEM_OK : context->fail(PHLOEM_NO_MEMORY, "the system gives no %lld bytes", static_cast<long long>(bytes));
}
PHLOEM_API void phloem_memory_release(phloem_context* context, void* memory) {
  if (context != nullptr) context->memory.release(memory);
}

PHLOEM_API int64_t phloem_memory_discard(phloem_context* context, void* memory, int64_t bytes) {
  if (context == nullptr || memory == nullptr || bytes <= 0) return 0;
  return static_cast<int64_t>(phloem::Memory::discard(memory, static_cast<size_t>(bytes)));
}

PHLOEM_API int phloem_abi(void) { return PHLOEM_ABI; }
PHLOEM_API const char* phloem_create_error(void) { return create_error; }
PHLOEM_API void phloem_destroy(phloem_context* context) { delete context; }
PHLOEM_API const char* phloem_error(const phloem_context* context) { return context == nullptr ? "context is NULL" : context->error; }
PHLOEM_API int phloem_variant(const phloem_context* context) { return context == nullptr ? static_cast<int>(PHLOEM_AUTO) : static_cast<int>(context->variant); }

}  // extern "C"
