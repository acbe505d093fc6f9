// Attention, append and page copies under the sanitizers: buffers of exactly their size, every variant, page size and tail.
// The arithmetic has its reference and its B1 tests in tests/kernels/; here a naive double loop and memcmp suffice.
#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "phloem_attention.h"
#include "test.h"

namespace {

using phloem_test::Random;

struct Row {
  int length, tokens, prefix, common;  // its first `common` keys are those of row `prefix` (an earlier one)
};

uint16_t bf16(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
float from_bf16(uint16_t h) {
  const uint32_t u = static_cast<uint32_t>(h) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

// A batch whose keys came into the pages through phloem_append_kv, without norm or rope.
struct Case {
  int heads, kv_heads, dim, page_size, kv_type, window;
  std::vector<Row> rows;
  std::vector<std::vector<float>> k, v, q;  // a row's [length][kv_heads][dim], [tokens][heads][dim]
  std::vector<std::vector<int32_t>> tables;
  int num_pages = 0;
  std::vector<char> k_cache, v_cache;
  std::vector<int32_t> positions, qo_indptr, kv_indptr, kv_indices, last;
  std::vector<int64_t> slots;
  std::vector<float> qkv, out;
  phloem_attention_args args{};

  Case(int heads, int kv_heads, int dim, int page_size, int kv_type, int window, std::vector<Row> rows, uint64_t seed = 1)
      : heads(heads), kv_heads(kv_heads), dim(dim), page_size(page_size), kv_type(kv_type), window(window), rows(std::move(rows)) {
    Random random(seed);
    for (const Row& row : this->rows) num_pages += (row.length + page_size - 1) / page_size;
    int next_page = num_pages;
    for (const Row& row : this->rows) {
      std::vector<float> rk(static_cast<size_t>(row.length * kv_heads * dim)), rv(rk.size()), rq(static_cast<size_t>(row.tokens * heads * dim));
      for (float& x : rk) x = value(random);
      for (float& x : rv) x = value(random);
      for (float& x : rq) x = random.uniform();
      const auto n = static_cast<size_t>(row.common * kv_heads * dim);
      if (n > 0) {
        std::copy_n(k[static_cast<size_t>(row.prefix)].begin(), n, rk.begin());
        std::copy_n(v[static_cast<size_t>(row.prefix)].begin(), n, rv.begin());
      }
      k.push_back(rk);
      v.push_back(rv);
      q.push_back(rq);
      std::vector<int32_t> table;
      for (int p = 0; p < row.length; p += page_size)
        table.push_back(p + page_size <= row.common ? tables[static_cast<size_t>(row.prefix)][table.size()] : --next_page);
      tables.push_back(table);
    }
  }
  float value(Random& random) const {
    const float x = random.uniform();
    return kv_type == PHLOEM_KV_BF16 ? from_bf16(bf16(x)) : x;
  }

  // One forward of rows `which`, of which every token of the first `appended` is new to the pages.
  void lay_out(const std::vector<int>& which, bool append_all) {
    positions.clear(), kv_indices.clear(), last.clear(), slots.clear(), qkv.clear();
    qo_indptr.assign(1, 0), kv_indptr.assign(1, 0);
    for (const int r : which) {
      const Row& row = rows[static_cast<size_t>(r)];
      const auto& table = tables[static_cast<size_t>(r)];
      const int tokens = append_all ? row.length : row.tokens;
      for (int i = 0; i < tokens; i++) {
        const int p = row.length - tokens + i;
        positions.push_back(p);
        slots.push_back(static_cast<int64_t>(table[static_cast<size_t>(p / page_size)]) * page_size + p % page_size);
        const float nan = std::numeric_limits<float>::quiet_NaN();
        for (int x = 0; x < heads * dim; x++) qkv.push_back(append_all ? nan : q[static_cast<size_t>(r)][static_cast<size_t>(i * heads * dim + x)]);
        for (const auto* from : {&k, &v})
          for (int x = 0; x < kv_heads * dim; x++) qkv.push_back((*from)[static_cast<size_t>(r)][static_cast<size_t>(p * kv_heads * dim + x)]);
      }
      qo_indptr.push_back(qo_indptr.back() + tokens);
      kv_indices.insert(kv_indices.end(), table.begin(), table.end());
      kv_indptr.push_back(kv_indptr.back() + static_cast<int32_t>(table.size()));
      last.push_back(row.length - (static_cast<int>(table.size()) - 1) * page_size);
    }
    // Fresh copies of exactly their size, so that AddressSanitizer sees one element too many.
    for (auto* array : {&positions, &qo_indptr, &kv_indptr, &kv_indices, &last}) array->shrink_to_fit();
    slots.shrink_to_fit();
    qkv.shrink_to_fit();
    out = std::vector<float>(static_cast<size_t>(qo_indptr.back() * heads * dim), std::numeric_limits<float>::quiet_NaN());
    args = {};
    args.qkv = qkv.data();
    args.qkv_ld = (heads + 2 * kv_heads) * dim;
    args.out = out.data();
    args.out_ld = heads * dim;
    args.k_cache = k_cache.data();
    args.v_cache = v_cache.data();
    args.positions = positions.data();
    args.qo_indptr = qo_indptr.data();
    args.kv_indptr = kv_indptr.data();
    args.kv_indices = kv_indices.data();
    args.kv_last_page_len = last.data();
    args.kv_slots = slots.data();
    args.num_rows = static_cast<int32_t>(which.size());
    args.num_tokens = qo_indptr.back();
    args.kv_type = kv_type;
    args.heads = heads;
    args.kv_heads = kv_heads;
    args.head_dim = dim;
    args.page_size = page_size;
    args.num_pages = num_pages;
    args.window = window;
    args.scale = 1.0f / std::sqrt(static_cast<float>(dim));
  }

  void fill(phloem_context* context) {
    const size_t bytes = static_cast<size_t>((num_pages + 1) * page_size * kv_heads * dim) * (kv_type == PHLOEM_KV_BF16 ? 2 : 4);
    k_cache = std::vector<char>(bytes, static_cast<char>(0xff));  // NaN
    v_cache = std::vector<char>(bytes, static_cast<char>(0xff));
    std::vector<int> all;
    for (int r = 0; r < static_cast<int>(rows.size()); r++) all.push_back(r);
    lay_out(all, true);
    CHECK(phloem_append_kv(context, &args) == PHLOEM_OK);
  }

  std::vector<float> attend(phloem_context* context, const std::vector<int>& which) {
    lay_out(which, false);
    phloem_attention_plan* plan;
    CHECK(phloem_attention_plan_create(context, &plan) == PHLOEM_OK);
    CHECK(phloem_attention_plan_build(context, plan, &args) == PHLOEM_OK);
    for (int layer = 0; layer < 3; layer++) CHECK(phloem_attention(context, plan, &args) == PHLOEM_OK);
    phloem_attention_plan_destroy(plan);
    return out;
  }

  double error(const std::vector<float>& got, const std::vector<int>& which) const {
    double worst = 0;
    size_t at = 0;
    std::vector<double> weights;
    for (const int r : which) {
      const Row& row = rows[static_cast<size_t>(r)];
      const auto &rk = k[static_cast<size_t>(r)], &rv = v[static_cast<size_t>(r)], &rq = q[static_cast<size_t>(r)];
      for (int i = 0; i < row.tokens; i++)
        for (int h = 0; h < heads; h++) {
          const int end = row.length - row.tokens + i + 1, begin = window > 0 && end > window ? end - window : 0, g = h / (heads / kv_heads);
          weights.assign(static_cast<size_t>(end), 0.0);
          double sum = 0;
          for (int p = begin; p < end; p++) {
            double s = 0;
            for (int d = 0; d < dim; d++)
              s += static_cast<double>(rq[static_cast<size_t>((i * heads + h) * dim + d)]) * static_cast<double>(rk[static_cast<size_t>((p * kv_heads + g) * dim + d)]);
            sum += weights[static_cast<size_t>(p)] = std::exp(s / std::sqrt(static_cast<double>(dim)));
          }
          for (int d = 0; d < dim; d++) {
            double o = 0;
            for (int p = begin; p < end; p++) o += weights[static_cast<size_t>(p)] * static_cast<double>(rv[static_cast<size_t>((p * kv_heads + g) * dim + d)]);
            const double e = std::fabs(o / sum - static_cast<double>(got[at++]));
            if (!(e <= worst)) worst = e;  // NaN too
          }
        }
    }
    return worst;
  }
};

const std::vector<Row> kRows = {{300, 20, 0, 0}, {290, 1, 0, 272}, {1, 1, 0, 0}, {310, 3, 1, 280}, {33, 33, 0, 0}, {257, 1, 0, 256}, {16, 1, 0, 0}};

void check_case(Case& c, phloem_context* context) {
  c.fill(context);
  std::vector<int> all;
  for (int r = 0; r < static_cast<int>(c.rows.size()); r++) all.push_back(r);
  const std::vector<float> together = c.attend(context, all);
  CHECK(c.error(together, all) < 2e-6);
  size_t at = 0;
  for (const int r : all) {
    const std::vector<float> alone = c.attend(context, {r});
    CHECK(std::memcmp(alone.data(), together.data() + at, alone.size() * sizeof(float)) == 0);
    at += alone.size();
  }
}

struct Context {
  phloem_context* p = nullptr;
  Context(int threads, int variant) { CHECK(phloem_create(threads, variant, &p) == PHLOEM_OK); }
  ~Context() { phloem_destroy(p); }
};

}  // namespace

TEST(attention_every_page_size_and_type) {
  for (const int variant : phloem_test::variants()) {
    Context context(2, variant);
    for (const int page_size : {1, 2, 4, 8, 16, 32, 64})
      for (const int kv_type : {PHLOEM_KV_F32, PHLOEM_KV_BF16}) {
        Case c(4, 2, 24, page_size, kv_type, page_size == 8 ? 70 : 0, kRows);
        check_case(c, context.p);
      }
  }
}

TEST(attention_every_head_dim) {
  for (const int variant : phloem_test::variants()) {
    Context context(1, variant);
    for (int dim = 16; dim <= 256; dim += dim < 80 ? 8 : 88)
      for (const int kv_type : {PHLOEM_KV_F32, PHLOEM_KV_BF16}) {
        Case c(3, 1, dim, 16, kv_type, 0, {{40, 17, 0, 0}, {33, 1, 0, 32}});
        check_case(c, context.p);
      }
  }
}

TEST(attention_every_group_size) {
  for (const int variant : phloem_test::variants()) {
    Context context(2, variant);
    for (int group = 1; group <= 14; group++) {
      Case c(2 * group, 2, 32, 16, PHLOEM_KV_F32, 0, {{280, 5, 0, 0}, {270, 1, 0, 256}});
      check_case(c, context.p);
    }
    Case wide(200, 1, 16, 16, PHLOEM_KV_F32, 0, {{20, 2, 0, 0}});
    check_case(wide, context.p);
  }
}

TEST(attention_many_threads_share_few_items) {
  Context context(8, PHLOEM_AUTO);
  for (int repeat = 0; repeat < 20; repeat++) {
    Case c(3, 3, 16, 16, PHLOEM_KV_F32, repeat % 2 == 0 ? 0 : 300, {{1500, 1, 0, 0}, {700, 40, 0, 0}}, static_cast<uint64_t>(repeat + 1));
    check_case(c, context.p);
  }
}

TEST(attention_refuses_a_plan_of_another_context) {
  Context a(1, PHLOEM_AUTO), b(1, PHLOEM_AUTO);
  Case c(3, 1, 16, 16, PHLOEM_KV_F32, 0, {{20, 2, 0, 0}});
  c.fill(a.p);
  c.lay_out({0}, false);
  phloem_attention_plan* plan;
  CHECK(phloem_attention_plan_create(a.p, &plan) == PHLOEM_OK);
  CHECK(phloem_attention(a.p, plan, &c.args) == PHLOEM_BAD_ARGUMENT);  // not built
  CHECK(phloem_attention_plan_build(b.p, plan, &c.args) == PHLOEM_BAD_ARGUMENT);
  CHECK(phloem_attention_plan_build(a.p, plan, &c.args) == PHLOEM_OK);
  CHECK(phloem_attention(b.p, plan, &c.args) == PHLOEM_BAD_ARGUMENT);
  CHECK(std::strstr(phloem_error(b.p), "plan") != nullptr);
  // A failed build leaves no plan that the next call could follow into other arrays.
  c.last[0] = 99;
  CHECK(phloem_attention_plan_build(a.p, plan, &c.args) == PHLOEM_BAD_ARGUMENT);
  CHECK(phloem_attention(a.p, plan, &c.args) == PHLOEM_BAD_ARGUMENT);
  phloem_attention_plan_destroy(plan);
}

TEST(attention_scratch_slots_are_not_written) {
  Context context(2, PHLOEM_AUTO);
  Case c(3, 1, 16, 4, PHLOEM_KV_F32, 0, {{20, 20, 0, 0}});
  c.fill(context.p);
  c.lay_out({0}, false);
  for (int64_t& slot : c.slots) slot = static_cast<int64_t>(c.num_pages) * 4;
  const std::vector<char> k = c.k_cache, v = c.v_cache;
  CHECK(phloem_append_kv(context.p, &c.args) == PHLOEM_OK);
  CHECK(c.k_cache == k && c.v_cache == v);
}

TEST(attention_pages_are_copied) {
  Context context(2, PHLOEM_AUTO);
  std::vector<std::vector<char>> planes(6, std::vector<char>(7 * 48));
  Random random(1);
  std::vector<void*> bases;
  for (auto& plane : planes) {
    for (char& x : plane) x = static_cast<char>(random.below(256));
    bases.push_back(plane.data());
  }
  auto expected = planes;
  const int32_t pairs[] = {0, 5, 0, 3, 4, 1};
  for (auto& plane : expected)
    for (int i = 0; i < 6; i += 2) std::copy_n(plane.begin() + pairs[i] * 48, 48, plane.begin() + pairs[i + 1] * 48);
  CHECK(phloem_copy_pages(context.p, bases.data(), 6, 48, pairs, 3, 6) == PHLOEM_OK);
  CHECK(planes == expected);
  const int32_t scratch[] = {6, 1};
  CHECK(phloem_copy_pages(context.p, bases.data(), 6, 48, scratch, 1, 6) == PHLOEM_BAD_ARGUMENT);
}
