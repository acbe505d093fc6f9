// Attention over paged keys and values: what one layer's call needs. The page contract is the docstring of backends/base.py.
//
//   qkv row of a token   [ q heads | k heads | v heads ], each head_dim floats
//   K of a layer         [num_pages + 1][kv_head][head_dim][page_size]      transposed: both are B panels
//   V of a layer         [num_pages + 1][kv_head][page_size][head_dim]      of one fixed-order matrix kernel
//
//   rope_append (all threads) ── barrier ── attention (all threads) ── barrier ── ...     the caller places the barriers
//
// What B1 rests on, all of it per query token and head, nothing of it per tile, page or thread:
//   * score(j) is one FMA chain over head_dim, ascending;
//   * keys are cut into splits of 256 at absolute positions; a split's maximum is exact, its sum runs in 16 lanes by
//     position, its output in one FMA chain over its own positions, ascending. Other positions are not multiplied by zero:
//     they are not touched, so a NaN in them is harmless;
//   * splits are merged in ascending order, by whichever thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention_plan.h"
#include "pool.h"
#include "variants.h"

namespace phloem {

enum class KvType : int32_t { kF32 = 0, kBf16 = 1 };

struct AttentionArgs {
  // Activations. `qkv` is changed: q (and nothing else) in place by norm and rope.
  float* qkv;
  int64_t qkv_ld;  // floats between rows
  float* out;      // [T, heads * head_dim]
  int64_t out_ld;

  // This layer's pages.
  void* k_cache;
  void* v_cache;
  KvType kv_type;

  AttentionShape shape;  // heads, kv_heads, head_dim, page_size, num_pages
  float scale;           // of the scores, before soft cap and softmax
  int32_t window;        // a token sees itself and window - 1 tokens before it; 0: all
  float softcap;         // cap * tanh(score / cap); 0: off

  const float* rope_cos;  // [max_position, rotary_dim / 2]
  const float* rope_sin;
  int32_t rotary_dim;     // even, <= head_dim; 0: no rope

  const float* q_norm;  // [head_dim] or null, RMS norm of each head before rope
  const float* k_norm;
  float norm_eps;

  PageBatch batch;
  AttentionPlan* plan;  // built from `batch` and `shape`; attention() only
};

// attention_scratch_bytes: of Spmd::scratch, that attention() needs in every thread. rope_append needs none.
// rope_append: norms, rope, q in place, K and V of all T tokens into their pages. Slots on the scratch page are not written.
// attention: out. No thread may enter it before all have left rope_append; all threads call it, once a layer.
PHLOEM_DECLARE(size_t, attention_scratch_bytes, (const AttentionShape& shape))
PHLOEM_DECLARE(void, rope_append, (const AttentionArgs& args, Spmd& spmd))
PHLOEM_DECLARE(void, attention, (const AttentionArgs& args, Spmd& spmd))

}  // namespace phloem
