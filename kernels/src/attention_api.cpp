// The C entries of include/phloem_attention.h: arguments checked, then the kernels of the context's variant.
#include <new>

#include "attention.h"
#include "context.h"
#include "kv.h"
#include "phloem_attention.h"

struct phloem_attention_plan {
  phloem::AttentionPlan plan;
  phloem_context* context;
  bool built = false;
};

namespace {

using phloem::AttentionArgs;

phloem::AttentionShape shape_of(const phloem_attention_args& a) {
  return {a.heads, a.kv_heads, a.head_dim, a.page_size, a.num_pages};
}
phloem::PageBatch batch_of(const phloem_attention_args& a) {
  return {a.num_rows, a.num_tokens, a.positions, a.qo_indptr, a.kv_indptr, a.kv_indices, a.kv_last_page_len, a.kv_slots};
}
AttentionArgs internal(const phloem_attention_args& a, phloem::AttentionPlan* plan) {
  AttentionArgs args{};
  args.qkv = a.qkv;
  args.qkv_ld = a.qkv_ld;
  args.out = a.out;
  args.out_ld = a.out_ld;
  args.k_cache = a.k_cache;
  args.v_cache = a.v_cache;
  args.kv_type = static_cast<phloem::KvType>(a.kv_type);
  args.shape = shape_of(a);
  args.scale = a.scale;
  args.window = a.window;
  args.softcap = a.softcap;
  args.rope_cos = a.rope_cos;
  args.rope_sin = a.rope_sin;
  args.rotary_dim = a.rotary_dim;
  args.q_norm = a.q_norm;
  args.k_norm = a.k_norm;
  args.norm_eps = a.norm_eps;
  args.batch = batch_of(a);
  args.plan = plan;
  return args;
}

int check(phloem_context* context, const phloem_attention_args* a) {
  if (a == nullptr) return context->fail(PHLOEM_BAD_ARGUMENT, "args is NULL");
  if (const char* wrong = phloem::check_shape(shape_of(*a)))
    return context->fail(PHLOEM_BAD_ARGUMENT, "%s; got heads %d, kv_heads %d, head_dim %d, page_size %d, num_pages %d", wrong, a->heads,
                         a->kv_heads, a->head_dim, a->page_size, a->num_pages);
  if (a->kv_type != PHLOEM_KV_F32 && a->kv_type != PHLOEM_KV_BF16)
    return context->fail(PHLOEM_BAD_ARGUMENT, "kv_type is %d; give 0 (f32) or 1 (bf16)", a->kv_type);
  if (a->window < 0 || !(a->softcap >= 0.0f))
    return context->fail(PHLOEM_BAD_ARGUMENT, "window is %d and softcap %g; neither is below 0, which is off", a->window,
                         static_cast<double>(a->softcap));
  return PHLOEM_OK;
}

}  // namespace

extern "C" {

PHLOEM_API int phloem_attention_plan_create(phloem_context* context, phloem_attention_plan** plan) {
  *plan = nullptr;
  try {
    *plan = new phloem_attention_plan{};
    (*plan)->context = context;
  } catch (const std::bad_alloc&) {
    return context->fail(PHLOEM_NO_MEMORY, "no memory for an attention plan");
  }
  return PHLOEM_OK;
}

PHLOEM_API void phloem_attention_plan_destroy(phloem_attention_plan* plan) { delete plan; }

PHLOEM_API int phloem_attention_plan_build(phloem_context* context, phloem_attention_plan* plan, const phloem_attention_args* args) {
  if (const int status = check(context, args)) return status;
  if (plan == nullptr || plan->context != context) return context->fail(PHLOEM_BAD_ARGUMENT, "the plan is not one of this context");
  plan->built = false;
  const phloem::AttentionShape shape = shape_of(*args);
  try {
    if (const char* wrong = plan->plan.build(shape, batch_of(*args), context->pool.threads()))
      return context->fail(PHLOEM_BAD_ARGUMENT, "the batch breaks the page contract: %s", wrong);
  } catch (const std::bad_alloc&) {
    return context->fail(PHLOEM_NO_MEMORY, "no memory for a plan of %d rows", args->num_rows);
  }
  if (!context->pool.reserve_scratch(PHLOEM_PICK(attention_scratch_bytes, context->variant)(shape)))
    return context->fail(PHLOEM_NO_MEMORY, "no memory for the threads' scratch");
  plan->built = true;
  return PHLOEM_OK;
}

PHLOEM_API int phloem_append_kv(phloem_context* context, const phloem_attention_args* args) {
  if (const int status = check(context, args)) return status;
  if (args->rotary_dim < 0 || args->rotary_dim % 2 != 0 || args->rotary_dim > args->head_dim)
    return context->fail(PHLOEM_BAD_ARGUMENT, "rotary_dim is %d; it is even and between 0 and head_dim (%d)", args->rotary_dim, args->head_dim);
  const int64_t slots = (static_cast<int64_t>(args->num_pages) + 1) * args->page_size;
  for (int32_t t = 0; t < args->num_tokens; t++) {
    if (args->kv_slots[t] < 0 || args->kv_slots[t] >= slots)
      return context->fail(PHLOEM_BAD_ARGUMENT, "kv_slots[%d] is %lld; slots are 0 to %lld, the scratch page's included", t,
                           static_cast<long long>(args->kv_slots[t]), static_cast<long long>(slots - 1));
    if (args->rotary_dim > 0 && (args->positions[t] < 0 || args->positions[t] >= args->max_positions))
      return context->fail(PHLOEM_BAD_ARGUMENT, "positions[%d] is %d; the rope tables hold 0 to %d", t, args->positions[t], args->max_positions - 1);
  }
  const AttentionArgs a = internal(*args, nullptr);
  return context->run([&](phloem::Spmd& spmd) { PHLOEM_PICK(rope_append, context->variant)(a, spmd); });
}

PHLOEM_API int phloem_attention(phloem_context* context, phloem_attention_plan* plan, const phloem_attention_args* args) {
  if (const int status = check(context, args)) return status;
  if (plan == nullptr || plan->context != context || !plan->built)
    return context->fail(PHLOEM_BAD_ARGUMENT, "the plan is not built, or not by this context; call phloem_attention_plan_build first");
  const AttentionArgs a = internal(*args, &plan->plan);
  return context->run([&](phloem::Spmd& spmd) { PHLOEM_PICK(attention, context->variant)(a, spmd); });
}

PHLOEM_API int phloem_copy_pages(phloem_context* context, void* const* planes, int32_t num_planes, size_t page_bytes,
                                 const int32_t* pairs, int32_t num_pairs, int32_t num_pages) {
  for (int32_t i = 0; i < 2 * num_pairs; i++)
    if (pairs[i] < 0 || pairs[i] >= num_pages)
      return context->fail(PHLOEM_BAD_ARGUMENT, "copy %d names page %d; pages are 0 to %d", i / 2, pairs[i], num_pages - 1);
  const phloem::PageCopyArgs args{planes, num_planes, page_bytes, pairs, num_pairs};
  return context->run([&](phloem::Spmd& spmd) { phloem::copy_pages(args, spmd); });
}

}  // extern "C"
