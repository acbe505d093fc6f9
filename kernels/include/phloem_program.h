/* A model's forward, recorded once, run by one call a step.
 *
 *   run(batch):  copies ─ barrier ─ op ─ barrier ─ op ─ ...  over the T tokens  ... ─ op ─ ... over the L logit rows
 *
 * Every pointer of an op is kept; what it points to must outlive the program. Buffers hold max_tokens (ops before the first
 * gather) or max_logits (gather and after) rows. More logit rows than max_logits are computed in parts: the ops from the gather
 * on run once a part, so the gather's input must not share memory with any of their outputs. */
#ifndef PHLOEM_PROGRAM_H
#define PHLOEM_PROGRAM_H

#include "phloem_attention.h"
#include "phloem_linear.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  PHLOEM_OP_EMBED = 0,     /* y = matrices[0] rows of the batch's token ids */
  PHLOEM_OP_RMS_NORM = 1,  /* y = x / rms(x) * vector */
  PHLOEM_OP_LINEAR = 2,    /* y = x W^T (+ vector) (+ residual) */
  PHLOEM_OP_GATED = 3,     /* y = silu(x matrices[0]^T) * (x matrices[1]^T) */
  PHLOEM_OP_ATTENTION = 4, /* x: qkv, changed; y: attended */
  PHLOEM_OP_GATHER = 5     /* y = x at the batch's logit rows; from here on rows are logit rows */
};

enum { PHLOEM_MAX_PARTS = 8 };

typedef struct phloem_op {
  int32_t kind;
  int32_t width; /* columns of y */
  int32_t num_matrices;
  float eps;
  float* x; /* rows of x_ld floats */
  int64_t x_ld;
  float* y;
  int64_t y_ld;
  const float* vector;
  const float* residual; /* rows of residual_ld floats; may be y */
  int64_t residual_ld;
  const phloem_matrix* matrices[PHLOEM_MAX_PARTS];
  /* attention: all but qkv, out and what comes with the batch */
  const phloem_attention_args* attention;
} phloem_op;

typedef struct phloem_limits {
  int32_t max_tokens, max_rows, max_logits, max_pages;
} phloem_limits;

/* K and V of every layer, and what a page is. */
typedef struct phloem_pages {
  void* const* planes; /* [num_planes], each num_pages + 1 pages of page_bytes */
  int32_t num_planes;
  int32_t num_pages; /* without the scratch page */
  int32_t page_size;
  int64_t page_bytes;
} phloem_pages;

/* The page contract's arrays. */
typedef struct phloem_batch {
  const int32_t* token_ids;
  const int32_t* positions;
  const int64_t* kv_slots;
  const int32_t* qo_indptr;
  const int32_t* kv_indptr;
  const int32_t* kv_indices;
  const int32_t* kv_last_page_len;
  const int32_t* logit_rows;
  const int32_t* copies; /* [num_copies][2] */
  int32_t num_tokens, num_rows, num_pages, num_logits, num_copies;
  /* NULL: the last op's y holds the logits (num_logits <= max_logits). Else they are copied here, num_logits rows of its width. */
  float* logits;
} phloem_batch;

typedef struct phloem_program phloem_program;

PHLOEM_API int phloem_program_create(phloem_context*, const phloem_op* ops, int32_t num_ops, const phloem_limits*,
                                     const phloem_pages*, phloem_program**);
PHLOEM_API void phloem_program_destroy(phloem_program*);
/* Checks the batch before it writes anything. */
PHLOEM_API int phloem_program_run(phloem_program*, const phloem_batch*);
/* sizeof of the structs that callers fill in, for bindings to check theirs: 0 phloem_attention_args, 1 phloem_op, 2 phloem_limits,
 * 3 phloem_pages, 4 phloem_batch; else 0. */
PHLOEM_API int64_t phloem_struct_bytes(int which);
/* From now on adds the nanoseconds of each op, as the calling thread sees it (its barrier included), to nanoseconds[num_ops];
 * NULL ends it. The array is borrowed until then. */
PHLOEM_API void phloem_program_profile(phloem_program*, int64_t* nanoseconds);

#ifdef __cplusplus
}
#endif
#endif
