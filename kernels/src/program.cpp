// A recorded forward: ops made ready once, then run in one SPMD region a step (include/phloem_program.h).
#include <chrono>
#include <cstring>
#include <new>
#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "kv.h"
#include "linear_api.h"
#include "phloem_program.h"

using namespace phloem;

namespace {

struct Op {
  int32_t kind;
  phloem_op spec;
  LinearArgs linear;
  AttentionArgs attention;
  int32_t max_positions;
};

// The functions of the context's variant.
struct Kernels {
  decltype(&base::embed_rows) embed;
  decltype(&base::rms_norm_rows) rms_norm;
  decltype(&base::gather_rows) gather;
  decltype(&base::linear_run) linear;
  decltype(&base::rope_append) rope_append;
  decltype(&base::attention) attention;
};

}  // namespace

struct phloem_program {
  phloem_context* context;
  Kernels kernels;
  phloem_limits limits;
  phloem_pages pages;
  std::vector<void*> planes;
  std::vector<Op> ops;
  size_t num_token_ops;  // those before the gather
  AttentionPlan plan;
  AttentionShape shape;
  bool attends = false;
  int64_t* nanoseconds = nullptr;  // phloem_program_profile
  char* quants = nullptr;  // every linear's quantised x in turn
};

namespace {

int bad(phloem_context* c, size_t i, const char* what) { return c->fail(PHLOEM_BAD_ARGUMENT, "op %zu: %s", i, what); }

// Everything that the kernels take for granted about op i; prepares it.
int prepare(phloem_program& p, size_t i, const phloem_op& spec, bool after_gather) {
  phloem_context* c = p.context;
  Op op{};
  op.kind = spec.kind;
  op.spec = spec;
  if (spec.y == nullptr || spec.width < 1 || spec.y_ld < spec.width) return bad(c, i, "y is NULL, or its rows are shorter than its width");
  if (spec.kind != PHLOEM_OP_EMBED && spec.x == nullptr) return bad(c, i, "x is NULL");
  switch (spec.kind) {
    case PHLOEM_OP_EMBED:
      if (after_gather) return bad(c, i, "an embedding comes before the gather");
      if (spec.num_matrices != 1 || spec.matrices[0] == nullptr || spec.matrices[0]->matrix.k != spec.width)
        return bad(c, i, "an embedding takes one matrix of y's width");
      break;
    case PHLOEM_OP_RMS_NORM:
      if (spec.vector == nullptr || spec.x_ld < spec.width) return bad(c, i, "a norm takes a weight, and x of y's width");
      break;
    case PHLOEM_OP_GATHER:
      if (spec.x_ld < spec.width) return bad(c, i, "a gather takes x of y's width");
      break;
    case PHLOEM_OP_LINEAR:
    case PHLOEM_OP_GATED: {
      const bool gated = spec.kind == PHLOEM_OP_GATED;
      int width;
      if (const int status = check_linear(c, spec.matrices, spec.num_matrices, gated, &width)) return status;
      if (width != spec.width || spec.x_ld < spec.matrices[0]->matrix.k) return bad(c, i, "the matrices' shape is not that of x and y");
      if (gated && (spec.vector != nullptr || spec.residual != nullptr)) return bad(c, i, "a gated linear has no bias and no residual");
      fill_linear(op.linear, spec.matrices, spec.num_matrices, gated);
      op.linear.x = spec.x;
      op.linear.x_ld = spec.x_ld;
      op.linear.y = spec.y;
      op.linear.y_ld = spec.y_ld;
      op.linear.bias = spec.vector;
      op.linear.residual = spec.residual;
      op.linear.residual_ld = spec.residual_ld;
      if (spec.residual != nullptr && spec.residual_ld < spec.width) return bad(c, i, "the residual's rows are shorter than y's width");
      break;
    }
    case PHLOEM_OP_ATTENTION: {
      if (after_gather) return bad(c, i, "attention comes before the gather");
      const phloem_attention_args* a = spec.attention;
      if (a == nullptr) return bad(c, i, "attention has no arguments");
      const AttentionShape shape{a->heads, a->kv_heads, a->head_dim, a->page_size, a->num_pages};
      if (const char* wrong = check_shape(shape)) return bad(c, i, wrong);
      if (p.attends && (shape.heads != p.shape.heads || shape.kv_heads != p.shape.kv_heads || shape.head_dim != p.shape.head_dim))
        return bad(c, i, "all layers of a program have the same heads and head_dim");
      if (shape.num_pages != p.pages.num_pages || shape.page_size != p.pages.page_size) return bad(c, i, "its pages are not the program's");
      if (a->k_cache == nullptr || a->v_cache == nullptr || (a->kv_type != PHLOEM_KV_F32 && a->kv_type != PHLOEM_KV_BF16))
        return bad(c, i, "its pages are NULL, or of no known type");
      if (a->rotary_dim < 0 || a->rotary_dim % 2 != 0 || a->rotary_dim > a->head_dim ||
          (a->rotary_dim > 0 && (a->rope_cos == nullptr || a->rope_sin == nullptr || a->max_positions < 1)))
        return bad(c, i, "its rotary table is missing, odd, or wider than a head");
      if (a->window < 0 || !(a->softcap >= 0.0f)) return bad(c, i, "window and softcap are not below 0, which is off");
      if (spec.width != a->heads * a->head_dim || spec.x_ld < (a->heads + 2 * a->kv_heads) * static_cast<int64_t>(a->head_dim))
        return bad(c, i, "x is [q heads | k heads | v heads] and y [q heads], each head_dim wide");
      p.attends = true;
      p.shape = shape;
      AttentionArgs& t = op.attention;
      t.qkv = spec.x;
      t.qkv_ld = spec.x_ld;
      t.out = spec.y;
      t.out_ld = spec.y_ld;
      t.k_cache = a->k_cache;
      t.v_cache = a->v_cache;
      t.kv_type = static_cast<KvType>(a->kv_type);
      t.shape = shape;
      t.scale = a->scale;
      t.window = a->window;
      t.softcap = a->softcap;
      t.rope_cos = a->rope_cos;
      t.rope_sin = a->rope_sin;
      t.rotary_dim = a->rotary_dim;
      t.q_norm = a->q_norm;
      t.k_norm = a->k_norm;
      t.norm_eps = a->norm_eps;
      op.max_positions = a->rotary_dim > 0 ? a->max_positions : INT32_MAX;
      break;
    }
    default: return c->fail(PHLOEM_BAD_ARGUMENT, "op %zu has kind %d, which there is not", i, spec.kind);
  }
  p.ops.push_back(op);
  return PHLOEM_OK;
}

int create(phloem_program& p, const phloem_op* ops, int32_t num_ops) {
  phloem_context* c = p.context;
  const Variant variant = c->variant;
  p.kernels = {PHLOEM_PICK(embed_rows, variant), PHLOEM_PICK(rms_norm_rows, variant), PHLOEM_PICK(gather_rows, variant),
               PHLOEM_PICK(linear_run, variant), PHLOEM_PICK(rope_append, variant),   PHLOEM_PICK(attention, variant)};
  p.num_token_ops = static_cast<size_t>(num_ops);
  for (size_t i = 0; i < static_cast<size_t>(num_ops); i++) {
    const bool after = i >= p.num_token_ops;
    if (ops[i].kind == PHLOEM_OP_GATHER) {
      if (after) return bad(c, i, "a program gathers its logit rows once");
      p.num_token_ops = i;
    }
    if (const int status = prepare(p, i, ops[i], after)) return status;
  }
  if (p.num_token_ops == static_cast<size_t>(num_ops)) return c->fail(PHLOEM_BAD_ARGUMENT, "the program never gathers its logit rows");
  int64_t bytes = 0;
  for (size_t i = 0; i < p.ops.size(); i++) {
    const Op& op = p.ops[i];
    if (!op.linear.quantise) continue;
    const int64_t need = PHLOEM_PICK(quant_rows_bytes, variant)(i < p.num_token_ops ? p.limits.max_tokens : p.limits.max_logits, op.linear.k);
    bytes = need > bytes ? need : bytes;
  }
  if (bytes > 0) {
    p.quants = static_cast<char*>(c->memory.allocate(static_cast<size_t>(bytes)));
    if (p.quants == nullptr) return c->fail(PHLOEM_NO_MEMORY, "no memory for %lld bytes of quantised rows", static_cast<long long>(bytes));
    for (size_t i = 0; i < p.ops.size(); i++) {
      LinearArgs& a = p.ops[i].linear;
      if (a.quantise)
        PHLOEM_PICK(quant_rows_at, variant)(a.quant, p.quants, i < p.num_token_ops ? p.limits.max_tokens : p.limits.max_logits, a.k, a.parts, a.num_parts);
    }
  }
  if (p.attends) {
    p.plan.reserve(p.shape, p.limits.max_tokens, p.limits.max_rows, p.limits.max_pages, c->pool.threads());
    for (Op& op : p.ops) op.attention.plan = &p.plan;
    if (!c->pool.reserve_scratch(PHLOEM_PICK(attention_scratch_bytes, variant)(p.shape)))
      return c->fail(PHLOEM_NO_MEMORY, "no memory for the threads' scratch");
  }
  return PHLOEM_OK;
}

// Everything that could make a kernel read or write elsewhere.
int check_batch(phloem_program& p, const phloem_batch& b) {
  phloem_context* c = p.context;
  const phloem_limits& l = p.limits;
  if (b.num_tokens < 1 || b.num_rows < 1 || b.num_tokens > l.max_tokens || b.num_rows > l.max_rows || b.num_pages > l.max_pages)
    return c->fail(PHLOEM_BAD_ARGUMENT, "bad batch: %d tokens, %d rows, %d pages; this program takes 1 to %d, 1 to %d, and at most %d",
                   b.num_tokens, b.num_rows, b.num_pages, l.max_tokens, l.max_rows, l.max_pages);
  const int64_t slots = (static_cast<int64_t>(p.pages.num_pages) + 1) * p.pages.page_size;
  int32_t vocabulary = INT32_MAX, positions = INT32_MAX;
  for (const Op& op : p.ops) {
    if (op.kind == PHLOEM_OP_EMBED && op.spec.matrices[0]->matrix.n < vocabulary) vocabulary = op.spec.matrices[0]->matrix.n;
    if (op.kind == PHLOEM_OP_ATTENTION && op.max_positions < positions) positions = op.max_positions;
  }
  for (int32_t t = 0; t < b.num_tokens; t++) {
    if (b.token_ids[t] < 0 || b.token_ids[t] >= vocabulary)
      return c->fail(PHLOEM_BAD_ARGUMENT, "bad batch: token_ids[%d] is %d; the table holds 0 to %d", t, b.token_ids[t], vocabulary - 1);
    if (b.positions[t] < 0 || b.positions[t] >= positions)
      return c->fail(PHLOEM_BAD_ARGUMENT, "bad batch: positions[%d] is %d; the rotary table holds 0 to %d", t, b.positions[t], positions - 1);
    if (b.kv_slots[t] < 0 || b.kv_slots[t] >= slots)
      return c->fail(PHLOEM_BAD_ARGUMENT, "bad batch: kv_slots[%d] is %lld; slots are 0 to %lld, the scratch page's included", t,
                     static_cast<long long>(b.kv_slots[t]), static_cast<long long>(slots - 1));
  }
  if (b.qo_indptr[b.num_rows] != b.num_tokens || b.kv_indptr[b.num_rows] != b.num_pages)
    return c->fail(PHLOEM_BAD_ARGUMENT, "bad batch: qo_indptr ends with %d and kv_indptr with %d; there are %d tokens and %d pages",
                   b.qo_indptr[b.num_rows], b.kv_indptr[b.num_rows], b.num_tokens, b.num_pages);
  for (int32_t i = 0; i < b.num_logits; i++)
    if (b.logit_rows[i] < 0 || b.logit_rows[i] >= b.num_tokens)
      return c->fail(PHLOEM_BAD_ARGUMENT, "bad batch: logit_rows[%d] is %d of %d tokens", i, b.logit_rows[i], b.num_tokens);
  for (int32_t i = 0; i < 2 * b.num_copies; i++)
    if (b.copies[i] < 0 || b.copies[i] >= p.pages.num_pages)
      return c->fail(PHLOEM_BAD_ARGUMENT, "bad batch: copy %d names page %d; pages are 0 to %d", i / 2, b.copies[i], p.pages.num_pages - 1);
  if (b.num_logits > l.max_logits && b.logits == nullptr)
    return c->fail(PHLOEM_BAD_ARGUMENT, "bad batch: %d logit rows and no place for them; at most %d stay in the program", b.num_logits, l.max_logits);
  return PHLOEM_OK;
}

// Rows of an op in this run, set before the region: threads only read.
void set_rows(Op& op, int32_t rows, const PageBatch& batch) {
  op.linear.rows = rows;
  op.attention.batch = batch;
}

void run_op(const Kernels& k, const Op& op, int rows, const phloem_batch& b, const int32_t* logit_rows, Spmd& spmd) {
  const phloem_op& s = op.spec;
  switch (op.kind) {
    case PHLOEM_OP_EMBED: k.embed(s.matrices[0]->matrix, b.token_ids, rows, s.y, s.y_ld, spmd); break;
    case PHLOEM_OP_RMS_NORM: k.rms_norm(s.x, s.x_ld, s.vector, s.eps, rows, s.width, s.y, s.y_ld, spmd); break;
    case PHLOEM_OP_LINEAR:
    case PHLOEM_OP_GATED: k.linear(op.linear, spmd); break;
    case PHLOEM_OP_ATTENTION:
      k.rope_append(op.attention, spmd);
      spmd.barrier();  // every row's K and V of this layer are there before any row reads (R5)
      k.attention(op.attention, spmd);
      break;
    case PHLOEM_OP_GATHER: k.gather(s.x, s.x_ld, logit_rows, rows, s.width, s.y, s.y_ld, spmd); break;
  }
  spmd.barrier();
}

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Ops [begin, end), each timed if somebody asked.
void run_ops(const phloem_program& p, size_t begin, size_t end, int rows, const phloem_batch& b, const int32_t* logit_rows, Spmd& spmd) {
  const bool timed = p.nanoseconds != nullptr && spmd.thread == 0;
  int64_t start = timed ? now() : 0;
  for (size_t i = begin; i < end; i++) {
    run_op(p.kernels, p.ops[i], rows, b, logit_rows, spmd);
    if (timed) {
      const int64_t stop = now();
      p.nanoseconds[i] += stop - start;
      start = stop;
    }
  }
}

int run(phloem_program& p, const phloem_batch& b) {
  phloem_context* c = p.context;
  if (!c->pool.usable())
    return c->fail(PHLOEM_FORKED, "this program belongs to the process that made it; a fork()ed child must make its own");
  const PageBatch batch{b.num_rows, b.num_tokens, b.positions, b.qo_indptr, b.kv_indptr, b.kv_indices, b.kv_last_page_len, b.kv_slots};
  if (p.attends)
    if (const char* wrong = p.plan.build(p.shape, batch, c->pool.threads()))
      return c->fail(PHLOEM_BAD_ARGUMENT, "the batch breaks the page contract: %s", wrong);
  for (size_t i = 0; i < p.num_token_ops; i++) set_rows(p.ops[i], b.num_tokens, batch);
  const PageCopyArgs copies{p.planes.data(), static_cast<int32_t>(p.planes.size()), static_cast<size_t>(p.pages.page_bytes), b.copies, b.num_copies};
  const Op& last = p.ops.back();
  for (int32_t done = 0; done == 0 || done < b.num_logits; done += p.limits.max_logits) {
    const int32_t left = b.num_logits - done, rows = left < p.limits.max_logits ? left : p.limits.max_logits;
    for (size_t i = p.num_token_ops; i < p.ops.size(); i++) set_rows(p.ops[i], rows, batch);
    const int status = c->run([&](Spmd& spmd) {
      if (done == 0) {
        if (b.num_copies > 0) {
          copy_pages(copies, spmd);
          spmd.barrier();
        }
        run_ops(p, 0, p.num_token_ops, b.num_tokens, b, nullptr, spmd);
      }
      if (rows == 0) return;
      run_ops(p, p.num_token_ops, p.ops.size(), rows, b, b.logit_rows + done, spmd);
      if (b.logits != nullptr) {
        int begin, end;
        spmd.share(rows, 1, &begin, &end);
        for (int r = begin; r < end; r++)
          std::memcpy(b.logits + static_cast<int64_t>(done + r) * last.spec.width, last.spec.y + r * last.spec.y_ld,
                      static_cast<size_t>(last.spec.width) * sizeof(float));
      }
    });
    if (status != PHLOEM_OK) return status;
  }
  return PHLOEM_OK;
}

}  // namespace

extern "C" {

PHLOEM_API int phloem_program_create(phloem_context* context, const phloem_op* ops, int32_t num_ops, const phloem_limits* limits,
                                     const phloem_pages* pages, phloem_program** program) {
  if (context == nullptr) return PHLOEM_BAD_ARGUMENT;
  if (ops == nullptr || num_ops < 1 || limits == nullptr || pages == nullptr || program == nullptr)
    return context->fail(PHLOEM_BAD_ARGUMENT, "a program needs ops, limits, pages and a place for the result");
  *program = nullptr;
  if (limits->max_tokens < 1 || limits->max_rows < 1 || limits->max_logits < 1 || limits->max_pages < 1)
    return context->fail(PHLOEM_BAD_ARGUMENT, "limits are at least 1: tokens %d, rows %d, logits %d, pages %d", limits->max_tokens,
                         limits->max_rows, limits->max_logits, limits->max_pages);
  phloem_program* p = nullptr;
  try {
    p = new phloem_program{};
    p->context = context;
    p->limits = *limits;
    p->pages = *pages;
    p->planes.assign(pages->planes, pages->planes + pages->num_planes);
    if (const int status = create(*p, ops, num_ops)) {
      phloem_program_destroy(p);
      return status;
    }
  } catch (const std::bad_alloc&) {
    phloem_program_destroy(p);
    return context->fail(PHLOEM_NO_MEMORY, "no memory for a program of %d ops", num_ops);
  }
  *program = p;
  return PHLOEM_OK;
}

PHLOEM_API void phloem_program_destroy(phloem_program* program) {
  if (program == nullptr) return;
  program->context->memory.release(program->quants);
  delete program;
}

PHLOEM_API int64_t phloem_struct_bytes(int which) {
  constexpr size_t sizes[] = {sizeof(phloem_attention_args), sizeof(phloem_op), sizeof(phloem_limits), sizeof(phloem_pages), sizeof(phloem_batch)};
  return which >= 0 && which < 5 ? static_cast<int64_t>(sizes[which]) : 0;
}

PHLOEM_API void phloem_program_profile(phloem_program* program, int64_t* nanoseconds) {
  if (program != nullptr) program->nanoseconds = nanoseconds;
}

PHLOEM_API int phloem_program_run(phloem_program* program, const phloem_batch* batch) {
  if (program == nullptr || batch == nullptr) return PHLOEM_BAD_ARGUMENT;
  try {
    if (const int status = check_batch(*program, *batch)) return status;
    return run(*program, *batch);
  } catch (const std::bad_alloc&) {  // a plan beyond what was reserved
    return program->context->fail(PHLOEM_NO_MEMORY, "no memory for the attention plan of %d rows", batch->num_rows);
  }
}

}  // extern "C"
