// A whole program, small: its memory under the sanitizers, its bits against themselves. Numbers are compared in Python
// (tests/runtime/backends/test_cpu.py).
#include <cmath>
#include <string>
#include <vector>

#include "phloem_program.h"
#include "test.h"

using phloem_test::Random;

namespace {

constexpr int kHidden = 64, kHeads = 4, kKvHeads = 2, kDim = 16, kInner = 96, kVocabulary = 70, kPages = 12, kPageSize = 4;
constexpr int kTokens = 24, kLogits = 3;

std::vector<float> numbers(size_t n, uint64_t seed) {
  Random random(seed);
  std::vector<float> v(n);
  for (auto& f : v) f = 0.3f * random.uniform();
  return v;
}

// Embedding, one layer of everything, gather, head. Buffers are as long as the limits say, so a sanitizer sees a row too many.
struct Model {
  phloem_context* context = nullptr;
  std::vector<phloem_matrix*> matrices;
  std::vector<std::vector<float>> buffers;
  std::vector<float> norm = numbers(kHidden, 1), cosine = numbers(32 * kDim / 2, 2), sine = numbers(32 * kDim / 2, 3);
  std::vector<float> kv;
  void* planes[2];
  phloem_attention_args attention{};
  std::vector<phloem_op> ops;
  phloem_program* program = nullptr;

  float* buffer(int rows, int width) {
    buffers.emplace_back(static_cast<size_t>(rows * width));
    return buffers.back().data();
  }
  phloem_matrix* matrix(int kind, int n, int k) {
    phloem_matrix* m = nullptr;
    std::vector<char> rows;
    if (kind == PHLOEM_F32) {
      const auto v = numbers(static_cast<size_t>(n * k), static_cast<uint64_t>(n + k));
      rows.assign(reinterpret_cast<const char*>(v.data()), reinterpret_cast<const char*>(v.data() + v.size()));
    } else {  // q8_0: scale 2^-10
      Random random(static_cast<uint64_t>(n + k));
      for (int b = 0; b < n * k / 32; b++) {
        rows.push_back(0x00);
        rows.push_back(0x14);
        for (int i = 0; i < 32; i++) rows.push_back(static_cast<char>(random.below(256)));
      }
    }
    CHECK(phloem_matrix_pack(context, kind, n, k, rows.data(), kind == PHLOEM_F32 ? 4 * k : k / 32 * 34, &m) == PHLOEM_OK);
    matrices.push_back(m);
    return m;
  }
  phloem_op op(int kind, float* x, int x_width, float* y, int width, std::vector<phloem_matrix*> m = {}) {
    phloem_op o{};
    o.kind = kind;
    o.x = x;
    o.x_ld = x_width;
    o.y = y;
    o.y_ld = o.width = width;
    o.num_matrices = static_cast<int32_t>(m.size());
    for (size_t i = 0; i < m.size(); i++) o.matrices[i] = m[i];
    return o;
  }

  Model(int threads, int variant, int kind) {
    CHECK(phloem_create(threads, variant, &context) == PHLOEM_OK);
    const size_t plane = static_cast<size_t>(kPages + 1) * kKvHeads * kDim * kPageSize;
    kv.assign(2 * plane, std::nanf(""));
    planes[0] = kv.data();
    planes[1] = kv.data() + plane;
    const int qkv_width = (kHeads + 2 * kKvHeads) * kDim;
    float *x = buffer(kTokens, kHidden), *h = buffer(kTokens, kHidden), *qkv = buffer(kTokens, qkv_width);
    float *attended = buffer(kTokens, kHeads * kDim), *inner = buffer(kTokens, kInner), *last = buffer(kLogits, kHidden), *logits = buffer(kLogits, kVocabulary);
    phloem_matrix* table = matrix(kind, kVocabulary, kHidden);
    ops.push_back(op(PHLOEM_OP_EMBED, nullptr, 0, x, kHidden, {table}));
    ops.push_back(op(PHLOEM_OP_RMS_NORM, x, kHidden, h, kHidden));
    ops.back().vector = norm.data();
    ops.back().eps = 1e-5f;
    ops.push_back(op(PHLOEM_OP_LINEAR, h, kHidden, qkv, qkv_width, {matrix(kind, kHeads * kDim, kHidden), matrix(PHLOEM_F32, 2 * kKvHeads * kDim, kHidden)}));
    attention.k_cache = planes[0];
    attention.v_cache = planes[1];
    attention.rope_cos = cosine.data();
    attention.rope_sin = sine.data();
    attention.kv_type = PHLOEM_KV_F32;
    attention.heads = kHeads;
    attention.kv_heads = kKvHeads;
    attention.head_dim = kDim;
    attention.page_size = kPageSize;
    attention.num_pages = kPages;
    attention.rotary_dim = kDim;
    attention.max_positions = 32;
    attention.scale = 0.25f;
    ops.push_back(op(PHLOEM_OP_ATTENTION, qkv, qkv_width, attended, kHeads * kDim));
    ops.back().attention = &attention;
    ops.push_back(op(PHLOEM_OP_LINEAR, attended, kHeads * kDim, x, kHidden, {matrix(kind, kHidden, kHeads * kDim)}));
    ops.back().residual = x;
    ops.back().residual_ld = kHidden;
    ops.push_back(op(PHLOEM_OP_GATED, x, kHidden, inner, kInner, {matrix(kind, kInner, kHidden), matrix(PHLOEM_F32, kInner, kHidden)}));
    ops.push_back(op(PHLOEM_OP_LINEAR, inner, kInner, x, kHidden, {matrix(kind, kHidden, kInner)}));
    ops.back().residual = x;
    ops.back().residual_ld = kHidden;
    ops.push_back(op(PHLOEM_OP_GATHER, x, kHidden, last, kHidden));
    ops.push_back(op(PHLOEM_OP_LINEAR, last, kHidden, logits, kVocabulary, {table}));
    CHECK(make() == PHLOEM_OK);
  }
  int make() {
    const phloem_limits limits{kTokens, 4, kLogits, 16};
    const phloem_pages pages{planes, 2, kPages, kPageSize, static_cast<int64_t>(kKvHeads) * kDim * kPageSize * 4};
    return phloem_program_create(context, ops.data(), static_cast<int32_t>(ops.size()), &limits, &pages, &program);
  }
  ~Model() {
    phloem_program_destroy(program);
    for (auto* m : matrices) phloem_matrix_destroy(context, m);
    phloem_destroy(context);
  }
};

// One row of tokens start .. end - 1 on pages 11, 10, 9, ...; logits of all of them.
struct Batch {
  std::vector<int32_t> ids, positions, qo, kvp, indices, last, rows;
  std::vector<int64_t> slots;
  std::vector<float> logits;
  phloem_batch batch{};
  Batch(int start, int end) {
    for (int t = start; t < end; t++) {
      ids.push_back(t * 7 % kVocabulary);
      positions.push_back(t);
      slots.push_back(static_cast<int64_t>(kPages - 1 - t / kPageSize) * kPageSize + t % kPageSize);
      rows.push_back(t - start);
    }
    for (int p = 0; p <= (end - 1) / kPageSize; p++) indices.push_back(kPages - 1 - p);
    qo = {0, end - start};
    kvp = {0, static_cast<int32_t>(indices.size())};
    last = {(end - 1) % kPageSize + 1};
    logits.assign(rows.size() * kVocabulary, std::nanf(""));
    batch = {ids.data(), positions.data(), slots.data(), qo.data(), kvp.data(), indices.data(), last.data(), rows.data(), nullptr,
             end - start, 1, kvp[1], end - start, 0, logits.data()};
  }
};

}  // namespace

TEST(program_bits_do_not_depend_on_chunks_or_threads) {
  for (int variant : phloem_test::variants())
    for (int kind : {PHLOEM_F32, PHLOEM_Q8_0}) {
      Batch whole(0, kTokens);
      {
        Model model(2, variant, kind);
        CHECK(phloem_program_run(model.program, &whole.batch) == PHLOEM_OK);  // 24 logit rows, three at a time
      }
      for (float f : whole.logits) CHECK(std::isfinite(f));
      for (int threads : {1, 3})
        for (int chunk : {1, 5}) {
          Model model(threads, variant, kind);
          for (int start = 0; start < kTokens; start += chunk) {
            Batch part(start, start + chunk < kTokens ? start + chunk : kTokens);
            CHECK(phloem_program_run(model.program, &part.batch) == PHLOEM_OK);
            CHECK(std::memcmp(part.logits.data(), whole.logits.data() + start * kVocabulary, part.logits.size() * 4) == 0);
          }
        }
    }
}

TEST(program_refuses_a_batch_that_would_read_or_write_elsewhere) {
  Model model(2, PHLOEM_AUTO, PHLOEM_F32);
  const auto refused = [&](auto change) {
    Batch b(0, 6);
    change(b);
    CHECK(phloem_program_run(model.program, &b.batch) == PHLOEM_BAD_ARGUMENT);
    CHECK(std::string(phloem_error(model.context)).size() > 10);
  };
  refused([](Batch& b) { b.ids[5] = kVocabulary; });
  refused([](Batch& b) { b.ids[0] = -1; });
  refused([](Batch& b) { b.positions[2] = 32; });
  refused([](Batch& b) { b.slots[1] = (kPages + 1) * kPageSize; });
  refused([](Batch& b) { b.slots[1] = -1; });
  refused([](Batch& b) { b.qo[1] = 5; });
  refused([](Batch& b) { b.kvp[1] = 1; });
  refused([](Batch& b) { b.indices[0] = kPages; });
  refused([](Batch& b) { b.last[0] = 5; });
  refused([](Batch& b) { b.rows[0] = 6; });
  refused([](Batch& b) { b.batch.num_tokens = kTokens + 1; });
  refused([](Batch& b) { b.batch.num_tokens = 0; });
  refused([](Batch& b) { b.batch.logits = nullptr; });
  const int32_t copies[] = {0, kPages};
  refused([&](Batch& b) {
    b.batch.copies = copies;
    b.batch.num_copies = 1;
  });
  for (float f : model.kv) CHECK(f != f);  // nothing was written
  Batch good(0, 6);
  CHECK(phloem_program_run(model.program, &good.batch) == PHLOEM_OK);
}

TEST(program_copies_pages_before_the_forward) {
  Model model(2, PHLOEM_AUTO, PHLOEM_F32);
  Batch first(0, 8), second(8, 9);
  CHECK(phloem_program_run(model.program, &first.batch) == PHLOEM_OK);
  const int32_t copies[] = {11, 0, 10, 1};
  second.batch.copies = copies;
  second.batch.num_copies = 2;
  CHECK(phloem_program_run(model.program, &second.batch) == PHLOEM_OK);
  const size_t page = kKvHeads * kDim * kPageSize;
  for (void* plane : model.planes) {
    const float* p = static_cast<const float*>(plane);
    CHECK(std::memcmp(p + 11 * page, p, page * 4) == 0 && std::memcmp(p + 10 * page, p + page, page * 4) == 0);
  }
}

TEST(program_refuses_ops_that_do_not_fit) {
  Model model(1, PHLOEM_AUTO, PHLOEM_F32);
  const auto refused = [&](auto change) {
    Model other(1, PHLOEM_AUTO, PHLOEM_F32);
    phloem_program_destroy(other.program);
    change(other);
    CHECK(other.make() == PHLOEM_BAD_ARGUMENT && other.program == nullptr);
  };
  refused([](Model& m) { m.ops[1].vector = nullptr; });
  refused([](Model& m) { m.ops[2].width--; });
  refused([](Model& m) { m.ops[2].x_ld = 3; });
  refused([](Model& m) { m.ops[4].residual_ld = 3; });
  refused([](Model& m) { m.ops[5].num_matrices = 1; });
  refused([](Model& m) { m.ops[6].y = nullptr; });
  refused([](Model& m) { m.ops[3].attention = nullptr; });
  refused([](Model& m) { m.attention.head_dim = 8; });
  refused([](Model& m) { m.attention.page_size = 8; });
  refused([](Model& m) { m.ops.erase(m.ops.begin() + 7, m.ops.end()); });
  refused([](Model& m) { m.ops.push_back(m.ops[7]); });
  refused([](Model& m) { m.ops.push_back(m.ops[3]); });
  refused([](Model& m) { m.ops[0].kind = 17; });
}
