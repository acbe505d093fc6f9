/* Paged keys and values: append, attend, copy. The page contract: python/runtime/backends/base.py; layouts: src/attention.h. */
#ifndef PHLOEM_ATTENTION_H
#define PHLOEM_ATTENTION_H

#include "phloem.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { PHLOEM_KV_F32 = 0, PHLOEM_KV_BF16 = 1 };

/* One layer's call. All pointers are borrowed for the call. */
typedef struct phloem_attention_args {
  float* qkv;            /* [num_tokens] rows of [q heads | k heads | v heads]; append changes q */
  int64_t qkv_ld;        /* floats between rows */
  float* out;            /* [num_tokens] rows of heads * head_dim */
  int64_t out_ld;
  void* k_cache;         /* [num_pages + 1][kv_heads][head_dim][page_size] */
  void* v_cache;         /* [num_pages + 1][kv_heads][page_size][head_dim] */
  const float* rope_cos; /* [max_positions][rotary_dim / 2] */
  const float* rope_sin;
  const float* q_norm;   /* [head_dim], or NULL */
  const float* k_norm;
  const int32_t* positions;
  const int32_t* qo_indptr;
  const int32_t* kv_indptr;
  const int32_t* kv_indices;
  const int32_t* kv_last_page_len;
  const int64_t* kv_slots;
  int32_t num_rows;
  int32_t num_tokens;
  int32_t kv_type;       /* PHLOEM_KV_* */
  int32_t heads;         /* a multiple of kv_heads */
  int32_t kv_heads;
  int32_t head_dim;      /* a multiple of 8, 16 .. 256 */
  int32_t page_size;     /* a power of two, 1 .. 64 */
  int32_t num_pages;     /* without the scratch page */
  int32_t rotary_dim;    /* even, 0 .. head_dim; 0: no rope */
  int32_t max_positions; /* rows of the rope tables */
  int32_t window;        /* 0: all keys */
  float scale;
  float softcap;         /* 0: off */
  float norm_eps;
} phloem_attention_args;

typedef struct phloem_attention_plan phloem_attention_plan;

PHLOEM_API int phloem_attention_plan_create(phloem_context* context, phloem_attention_plan** plan);
PHLOEM_API void phloem_attention_plan_destroy(phloem_attention_plan* plan); /* NULL is fine */
/* From the CSR arrays and the shape alone; serves every layer of the step. */
PHLOEM_API int phloem_attention_plan_build(phloem_context* context, phloem_attention_plan* plan, const phloem_attention_args* args);

/* Norms and rope on q (in place) and k; k and v into their slots. Slots on the scratch page are not written. */
PHLOEM_API int phloem_append_kv(phloem_context* context, const phloem_attention_args* args);
/* `plan` was built from the same CSR arrays, shape and context. */
PHLOEM_API int phloem_attention(phloem_context* context, phloem_attention_plan* plan, const phloem_attention_args* args);

/* planes: num_planes bases of pages of page_bytes; pairs: [num_pairs][2] (source, target), no source a target. */
PHLOEM_API int phloem_copy_pages(phloem_context* context, void* const* planes, int32_t num_planes, size_t page_bytes,
                                 const int32_t* pairs, int32_t num_pairs, int32_t num_pages);

#ifdef __cplusplus
}
#endif
#endif
