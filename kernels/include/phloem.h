/* The kernels' C ABI. Plain C; every function that can fail returns a phloem_status and keeps words for it in the context.
 *
 * Units: counts of elements unless a name says bytes. Row-major. Pointers are borrowed for the call, but those given to
 * phloem_program_* builders, which the program keeps. One thread at a time uses a context.
 *
 * Here the context alone; each family of kernels has its header beside this one (phloem_linear.h, ...). */
#ifndef PHLOEM_H
#define PHLOEM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(PHLOEM_BUILD)
#define PHLOEM_API __attribute__((visibility("default")))
#else
#define PHLOEM_API
#endif

typedef enum phloem_status {
  PHLOEM_OK = 0,
  PHLOEM_BAD_ARGUMENT = 1, /* a shape, dtype, index or option is not what the function takes */
  PHLOEM_NO_MEMORY = 2,
  PHLOEM_UNSUPPORTED = 3,  /* this CPU lacks the variant asked for */
  PHLOEM_FORKED = 4        /* a fork()ed child uses its parent's context */
} phloem_status;

/* Code variants. PHLOEM_AUTO picks the best that this CPU runs. */
enum { PHLOEM_AUTO = -1, PHLOEM_BASE = 0, PHLOEM_X86_V3 = 1, PHLOEM_X86_V4 = 2, PHLOEM_X86_V4_VNNI = 3 };

/* Raised when a function or struct of these headers changes; native.py refuses a library of another number. */
enum { PHLOEM_ABI = 2 };
PHLOEM_API int phloem_abi(void);

typedef struct phloem_context phloem_context;

/* threads >= 1, the calling thread included. *context is NULL on failure; then phloem_create_error() says why. */
PHLOEM_API int phloem_create(int threads, int variant, phloem_context** context);
PHLOEM_API const char* phloem_create_error(void);
PHLOEM_API void phloem_destroy(phloem_context* context); /* NULL is fine; in a fork()ed child nothing is joined */
PHLOEM_API const char* phloem_error(const phloem_context* context); /* of the last failed call */
PHLOEM_API int phloem_variant(const phloem_context* context);
PHLOEM_API const char* phloem_variant_name(int variant); /* "base", "x86-64-v3", "x86-64-v4", "x86-64-v4-vnni" */
PHLOEM_API int phloem_supported(int variant);            /* 1 if this library and this CPU have it */

/* Zeroed memory, 64-byte aligned, in huge pages where the system has them; what is not released goes with the context. */
PHLOEM_API int phloem_memory_allocate(phloem_context* context, int64_t bytes, void** memory);
PHLOEM_API void phloem_memory_release(phloem_context* context, void* memory);
/* Gives the memory behind [memory, memory + bytes) back to the system and keeps the addresses: it reads as zero, and is taken
 * again as it is written. What whole system pages do not cover stays, zeroed. Returns the bytes given back. */
PHLOEM_API int64_t phloem_memory_discard(phloem_context* context, void* memory, int64_t bytes);

#ifdef __cplusplus
}
#endif
#endif
