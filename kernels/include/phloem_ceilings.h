/* What this machine can do at most, by this context's threads and variant: what benchmarks compare with. */
#ifndef PHLOEM_CEILINGS_H
#define PHLOEM_CEILINGS_H

#include "phloem.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Reads `bytes` bytes (each thread its share) and adds them up. Time the call. */
PHLOEM_API int phloem_ceiling_read(phloem_context*, const void* memory, int64_t bytes);
/* Multiply-adds in registers, `rounds` times; *operations: floating-point operations done (a multiply-add is two). */
PHLOEM_API int phloem_ceiling_fma(phloem_context*, int64_t rounds, double* operations);
/* The same for the int8 dot product that this variant's q8 kernels are made of (int16 pairs without VNNI). */
PHLOEM_API int phloem_ceiling_dot(phloem_context*, int64_t rounds, double* operations);

#ifdef __cplusplus
}
#endif
#endif
