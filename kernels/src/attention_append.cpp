// What comes before attention: norms and rope on q and k, and the new keys and values into their pages.
#include "attention.h"
#include "simd.h"

namespace phloem::PHLOEM_NS {
namespace {

constexpr int kMaxDim = 256;

// y = norm(x) * weight over one head. The sum runs in 16 lanes and one tree, whatever W is.
void rms_norm_head(const float* x, const float* weight, float eps, int dim, float* y) {
  alignas(64) float sums[16] = {};
  for (int d = 0; d < dim; d += 8)
    for (int i = 0; i < 8; i++) sums[(d & 8) + i] = fma1(x[d + i], x[d + i], sums[(d & 8) + i]);
  for (int h = 8; h > 0; h /= 2)
    for (int i = 0; i < h; i++) sums[i] = sums[i] + sums[i + h];
  const float scale = 1.0f / __builtin_sqrtf(sums[0] / (float)dim + eps);
  for (int d = 0; d < dim; d++) y[d] = x[d] * scale * weight[d];
}

// Pairs (i, i + half). y may be x.
void rope_head(const float* x, const float* cos, const float* sin, int half, float* y) {
  for (int i = 0; i < half; i += W) {
    const int n = half - i < W ? half - i : W;
    const vf a = load_part(x + i, n), b = load_part(x + half + i, n), c = load_part(cos + i, n), s = load_part(sin + i, n);
    store_part(y + i, fma(a, c, -(b * s)), n);
    store_part(y + half + i, fma(b, c, a * s), n);
  }
}

inline void put(float* p, float x) { *p = x; }
inline void put(uint16_t* p, float x) { *p = f_to_bf16(x); }

template <class T>
void append(const AttentionArgs& args, Spmd& spmd) {
  const AttentionShape& shape = args.shape;
  const int dim = shape.head_dim, half = args.rotary_dim / 2, page_size = shape.page_size;
  const int heads = shape.heads + 2 * shape.kv_heads;
  // Head by head, so that one token keeps all threads busy.
  const int64_t n = (int64_t)args.batch.tokens * heads;
  const int64_t begin = n * spmd.thread / spmd.threads, end = n * (spmd.thread + 1) / spmd.threads;
  alignas(64) float local[kMaxDim];
  for (int64_t i = begin; i < end; i++) {
    const int token = (int)(i / heads), head = (int)(i % heads);
    float* x = args.qkv + token * args.qkv_ld + (int64_t)head * dim;
    const bool is_q = head < shape.heads, is_k = !is_q && head < shape.heads + shape.kv_heads;
    const int64_t slot = args.batch.kv_slots[token], page = slot / page_size, offset = slot % page_size;
    if (!is_q && page == shape.num_pages) continue;
    const float* from = x;
    if (is_q || is_k) {
      float* to = is_q ? x : local;
      const float* norm = is_q ? args.q_norm : args.k_norm;
      if (norm != nullptr) {
        rms_norm_head(from, norm, args.norm_eps, dim, to);
        from = to;
      }
      if (half > 0) {
        const int64_t position = args.batch.positions[token];
        if (from != to)
          for (int d = 2 * half; d < dim; d++) to[d] = from[d];
        rope_head(from, args.rope_cos + position * half, args.rope_sin + position * half, half, to);
        from = to;
      }
    }
    if (is_k) {
      T* k = static_cast<T*>(args.k_cache) + (page * shape.kv_heads + head - shape.heads) * dim * page_size + offset;
      for (int d = 0; d < dim; d++) put(k + (int64_t)d * page_size, from[d]);
    } else if (!is_q) {
      T* v = static_cast<T*>(args.v_cache) + ((page * shape.kv_heads + head - shape.heads - shape.kv_heads) * page_size + offset) * dim;
      for (int d = 0; d < dim; d++) put(v + d, from[d]);
    }
  }
}

}  // namespace

void rope_append(const AttentionArgs& args, Spmd& spmd) {
  if (args.kv_type == KvType::kBf16) append<uint16_t>(args, spmd);
  else append<float>(args, spmd);
}

}  // namespace phloem::PHLOEM_NS
