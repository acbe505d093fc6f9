/* Matrices (weights, packed once or shared) and the operations over rows, one call each: for tests and for small jobs. A model
 * runs through phloem_program.h. */
#ifndef PHLOEM_LINEAR_H
#define PHLOEM_LINEAR_H

#include "phloem.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { PHLOEM_F32 = 0, PHLOEM_BF16 = 1, PHLOEM_Q8_0 = 2, PHLOEM_Q4_0 = 3, PHLOEM_Q4_1 = 4, PHLOEM_F16 = 5 };

typedef struct phloem_matrix phloem_matrix;

/* A copy of rows [n][k], packed for this context's variant. q8_0, q4_0, q4_1: GGUF blocks of 32 along k. f16 is kept as f32.
 * row_bytes: between rows of the source. */
PHLOEM_API int phloem_matrix_pack(phloem_context*, int kind, int n, int k, const void* rows, int64_t row_bytes, phloem_matrix**);
/* No copy: f32 or bf16 rows that stay where they are (a trainer's weights) and may change between calls. The same bits. */
PHLOEM_API int phloem_matrix_share(phloem_context*, int kind, int n, int k, const void* rows, int64_t row_bytes, phloem_matrix**);
PHLOEM_API void phloem_matrix_destroy(phloem_context*, phloem_matrix*);
/* Bytes of memory that it takes (0 if shared). */
PHLOEM_API int64_t phloem_matrix_bytes(const phloem_matrix*);
/* An empty (zero) matrix of the form that phloem_matrix_pack would give, to be written by phloem_matrix_store. */
PHLOEM_API int phloem_matrix_empty(phloem_context*, int kind, int n, int k, phloem_matrix**);
/* Writes rows [n][k] over a packed matrix, in place: f32, f16 and bf16 rows into f32 or bf16, blocks into the same blocks. */
PHLOEM_API int phloem_matrix_store(phloem_context*, phloem_matrix*, int kind, const void* rows, int64_t row_bytes);
/* Writes one packed matrix over another of the same kind and shape. */
PHLOEM_API int phloem_matrix_copy(phloem_context*, phloem_matrix* target, const phloem_matrix* source);
/* phloem_memory_discard of its memory: all zero until it is stored again. Returns the bytes given back. */
PHLOEM_API int64_t phloem_matrix_discard(phloem_context*, phloem_matrix*);
/* out[i] = the `bytes` (2 or 4) bytes at addresses[i]: elements sampled from many tensors in one call. */
PHLOEM_API int phloem_gather(phloem_context*, const int64_t* addresses, int64_t count, int bytes, void* out);

/* y[rows][n] = x[rows][k] W^T (+ bias[n]) (+ residual); the matrices' outputs lie side by side. residual may be y.
 * gated: two matrices of one shape, y = silu(x G^T) * (x U^T). Strides in elements. */
PHLOEM_API int phloem_linear(phloem_context*, const phloem_matrix* const* matrices, int num_matrices, int gated, const float* x,
                             int64_t x_ld, int rows, const float* bias, const float* residual, int64_t residual_ld, float* y,
                             int64_t y_ld);
PHLOEM_API int phloem_embed(phloem_context*, const phloem_matrix* table, const int32_t* ids, int rows, float* y, int64_t y_ld);
PHLOEM_API int phloem_rms_norm(phloem_context*, const float* x, int64_t x_ld, const float* weight, float eps, int rows, int n,
                               float* y, int64_t y_ld);

#ifdef __cplusplus
}
#endif
#endif
