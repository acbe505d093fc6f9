// Linears against a plain double loop over what the weights stand for, and against themselves, bit for bit (B1).
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "half.h"
#include "phloem_linear.h"
#include "test.h"

using phloem_test::Random;

namespace {

struct Context {
  phloem_context* c = nullptr;
  Context(int threads, int variant) { CHECK(phloem_create(threads, variant, &c) == PHLOEM_OK); }
  ~Context() { phloem_destroy(c); }
};

uint16_t to_half(float f) {  // truncating is good enough to make test scales
  uint32_t u;
  std::memcpy(&u, &f, 4);
  const int e = static_cast<int>((u >> 23) & 255) - 112;
  return e <= 0 ? 0 : static_cast<uint16_t>((u >> 16 & 0x8000u) | static_cast<uint32_t>(e) << 10 | (u >> 13 & 0x3ffu));
}

// Random rows of a kind, and the numbers that they stand for.
struct Weights {
  int kind, n, k;
  int64_t row_bytes;
  std::vector<char> rows;
  std::vector<double> value;

  Weights(int kind_, int n_, int k_, uint64_t seed) : kind(kind_), n(n_), k(k_), value(static_cast<size_t>(n_) * static_cast<size_t>(k_)) {
    Random random(seed);
    const int block = kind == PHLOEM_Q8_0 ? 34 : kind == PHLOEM_Q4_0 ? 18 : kind == PHLOEM_Q4_1 ? 20 : 0;
    row_bytes = block ? k / 32 * block : kind == PHLOEM_F32 ? 4 * k : 2 * k;
    rows.resize(static_cast<size_t>(row_bytes * n));
    for (int i = 0; i < n; i++)
      for (int j = 0; j < k; j++) {
        double& v = value[static_cast<size_t>(i) * static_cast<size_t>(k) + static_cast<size_t>(j)];
        char* row = rows.data() + i * row_bytes;
        const float f = random.uniform();
        if (kind == PHLOEM_F32) {
          std::memcpy(row + 4 * j, &f, 4);
          v = f;
        } else if (kind == PHLOEM_BF16 || kind == PHLOEM_F16) {
          uint32_t u;
          std::memcpy(&u, &f, 4);
          const uint16_t h = kind == PHLOEM_BF16 ? static_cast<uint16_t>(u >> 16) : to_half(f);
          std::memcpy(row + 2 * j, &h, 2);
          u = static_cast<uint32_t>(h) << 16;
          float back;
          std::memcpy(&back, &u, 4);
          v = kind == PHLOEM_BF16 ? back : phloem::half_to_f(h);
        } else {
          char* b = row + j / 32 * block;
          const int e = j % 32;
          if (e == 0) {
            const uint16_t d = to_half(0.01f + 0.01f * random.uniform()), m = to_half(0.1f * random.uniform());
            std::memcpy(b, &d, 2);
            if (kind == PHLOEM_Q4_1) std::memcpy(b + 2, &m, 2);
          }
          uint16_t d, m = 0;
          std::memcpy(&d, b, 2);
          if (kind == PHLOEM_Q4_1) std::memcpy(&m, b + 2, 2);
          if (kind == PHLOEM_Q8_0) {
            const int8_t q = static_cast<int8_t>(random.below(256) - 128);  // -128 too
            b[2 + e] = static_cast<char>(q);
            v = static_cast<double>(phloem::half_to_f(d)) * q;
          } else {
            const int q = random.below(16);
            char& byte = b[(kind == PHLOEM_Q4_1 ? 4 : 2) + (e & 15)];
            byte = static_cast<char>(byte | q << (e >= 16 ? 4 : 0));
            v = kind == PHLOEM_Q4_1 ? static_cast<double>(phloem::half_to_f(d)) * q + phloem::half_to_f(m)
                                    : static_cast<double>(phloem::half_to_f(d)) * (q - 8);
          }
        }
      }
  }
  phloem_matrix* pack(phloem_context* c) const {
    phloem_matrix* m = nullptr;
    CHECK(phloem_matrix_pack(c, kind, n, k, rows.data(), row_bytes, &m) == PHLOEM_OK);
    return m;
  }
  bool quantised() const { return kind == PHLOEM_Q8_0 || kind == PHLOEM_Q4_0 || kind == PHLOEM_Q4_1; }
};

// x as the quantised kernels see it: per 32, to int8.
std::vector<double> as_int8(const std::vector<float>& x) {
  std::vector<double> out(x.size());
  for (size_t b = 0; b < x.size(); b += 32) {
    float most = 0;
    for (size_t i = b; i < b + 32; i++) most = std::max(most, std::fabs(x[i]));
    const float scale = most / 127.0f, inverse = most > 0 ? 127.0f / most : 0;
    for (size_t i = b; i < b + 32; i++) out[i] = static_cast<double>(std::nearbyint(x[i] * inverse)) * scale;
  }
  return out;
}

std::vector<float> random_floats(size_t n, uint64_t seed) {
  Random random(seed);
  std::vector<float> v(n);
  for (auto& f : v) f = random.uniform();
  return v;
}

std::vector<float> linear(phloem_context* c, std::vector<const phloem_matrix*> m, int width, const float* x, int k, int rows,
                          bool gated = false, const float* bias = nullptr, const float* residual = nullptr) {
  std::vector<float> y(static_cast<size_t>(rows) * static_cast<size_t>(width), std::nanf(""));
  CHECK(phloem_linear(c, m.data(), static_cast<int>(m.size()), gated, x, k, rows, bias, residual, width, y.data(), width) == PHLOEM_OK);
  return y;
}

bool same(const float* a, const float* b, size_t n) { return std::memcmp(a, b, n * 4) == 0; }

const int kKinds[] = {PHLOEM_F32, PHLOEM_BF16, PHLOEM_F16, PHLOEM_Q8_0, PHLOEM_Q4_0, PHLOEM_Q4_1};

}  // namespace

TEST(linear_is_right_and_a_rows_bits_are_its_own) {
  struct Shape { int n, k; };
  for (int variant : phloem_test::variants()) {
    Context one(1, variant), two(2, variant), three(3, variant);
    for (int kind : kKinds)
      for (const Shape shape : {Shape{1, 32}, Shape{47, 64}, Shape{96, 320}, Shape{130, 1056}, Shape{50, 33}, Shape{13, 1}, Shape{49, 1531}}) {
        if (shape.k % 32 != 0 && kind >= PHLOEM_Q8_0 && kind <= PHLOEM_Q4_1) continue;
        const Weights w(kind, shape.n, shape.k, 7);
        const int rows = 70;
        const size_t n = static_cast<size_t>(shape.n), k = static_cast<size_t>(shape.k);
        const auto x = random_floats(rows * k, 11);
        const auto xs = w.quantised() ? as_int8(x) : std::vector<double>(x.begin(), x.end());
        phloem_matrix* m1 = w.pack(one.c);
        phloem_matrix* m2 = w.pack(two.c);
        phloem_matrix* m3 = w.pack(three.c);
        const auto y = linear(one.c, {m1}, shape.n, x.data(), shape.k, rows);
        for (size_t r = 0; r < rows; r += 23)
          for (size_t i = 0; i < n; i++) {
            double want = 0, size = 1e-30;
            for (size_t j = 0; j < k; j++) {
              want += xs[r * k + j] * w.value[i * k + j];
              size += std::fabs(xs[r * k + j] * w.value[i * k + j]);
            }
            CHECK(std::fabs(y[r * n + i] - want) <= 1e-6 * size);
          }
        for (int count : {1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 33, 64, 65})
          for (int first : {0, 1, 5}) {
            const float* part = x.data() + static_cast<size_t>(first) * k;
            const auto got = linear(two.c, {m2}, shape.n, part, shape.k, count);
            CHECK(same(got.data(), y.data() + static_cast<size_t>(first) * n, static_cast<size_t>(count) * n));
          }
        CHECK(same(linear(three.c, {m3}, shape.n, x.data(), shape.k, rows).data(), y.data(), rows * n));
        phloem_matrix_destroy(one.c, m1);
        phloem_matrix_destroy(two.c, m2);
        phloem_matrix_destroy(three.c, m3);
      }
  }
}

TEST(linear_shared_rows_have_the_bits_of_packed_ones) {
  for (int variant : phloem_test::variants()) {
    Context c(2, variant);
    for (int kind : {PHLOEM_F32, PHLOEM_BF16})
      for (int k : {1, 31, 128, 129, 300, 577}) {
        const Weights w(kind, 101, k, 3);
        phloem_matrix* packed = w.pack(c.c);
        phloem_matrix* shared = nullptr;
        CHECK(phloem_matrix_share(c.c, kind, w.n, k, w.rows.data(), w.row_bytes, &shared) == PHLOEM_OK);
        CHECK(phloem_matrix_bytes(shared) == 0 && phloem_matrix_bytes(packed) > 0);
        const auto x = random_floats(70 * static_cast<size_t>(k), 5);
        for (int rows : {1, 6, 70})
          CHECK(same(linear(c.c, {packed}, w.n, x.data(), k, rows).data(), linear(c.c, {shared}, w.n, x.data(), k, rows).data(),
                     static_cast<size_t>(rows) * 101));
        phloem_matrix_destroy(c.c, packed);
        phloem_matrix_destroy(c.c, shared);
      }
  }
}

TEST(a_stored_matrix_has_the_bits_of_a_packed_one) {
  for (int variant : phloem_test::variants()) {
    Context context(2, variant);
    for (int kind : {PHLOEM_F32, PHLOEM_BF16, PHLOEM_Q8_0, PHLOEM_Q4_1})
      for (int n : {1, 48, 97, 192})
        for (int k : {32, 96, 160}) {
          const Weights first(kind, n, k, 1), second(kind, n, k, 2);
          phloem_matrix *packed, *stored, *copied;
          CHECK(phloem_matrix_pack(context.c, kind, n, k, second.rows.data(), second.row_bytes, &packed) == PHLOEM_OK);
          CHECK(phloem_matrix_pack(context.c, kind, n, k, first.rows.data(), first.row_bytes, &stored) == PHLOEM_OK);
          CHECK(phloem_matrix_empty(context.c, kind, n, k, &copied) == PHLOEM_OK);
          CHECK(phloem_matrix_store(context.c, stored, kind, second.rows.data(), second.row_bytes) == PHLOEM_OK);
          CHECK(phloem_matrix_copy(context.c, copied, stored) == PHLOEM_OK);
          std::vector<float> x((size_t)k * 3), y((size_t)n * 3), z((size_t)n * 3);
          Random random(3);
          for (float& v : x) v = random.uniform();
          auto run = [&](const phloem_matrix* m, std::vector<float>& out) {
            CHECK(phloem_linear(context.c, &m, 1, 0, x.data(), k, 3, nullptr, nullptr, 0, out.data(), n) == PHLOEM_OK);
          };
          run(packed, y);
          for (phloem_matrix* m : {stored, copied}) {
            run(m, z);
            CHECK(std::memcmp(y.data(), z.data(), y.size() * 4) == 0);
          }
          CHECK(phloem_matrix_discard(context.c, stored) >= 0);
          run(stored, z);
          if (kind != PHLOEM_Q8_0)
            for (float v : z) CHECK(v == 0);
          CHECK(phloem_matrix_store(context.c, stored, kind, second.rows.data(), second.row_bytes) == PHLOEM_OK);
          run(stored, z);
          CHECK(std::memcmp(y.data(), z.data(), y.size() * 4) == 0);
          for (phloem_matrix* m : {packed, stored, copied}) phloem_matrix_destroy(context.c, m);
        }
    const float numbers[5] = {1, 2, 3, 4, 5};
    const uint16_t halves[4] = {10, 20, 30, 40};
    const int64_t at[3] = {(int64_t)(numbers + 4), (int64_t)numbers, (int64_t)(numbers + 2)}, half_at[2] = {(int64_t)(halves + 3), (int64_t)halves};
    float got[3];
    uint16_t got_halves[2];
    CHECK(phloem_gather(context.c, at, 3, 4, got) == PHLOEM_OK && got[0] == 5 && got[1] == 1 && got[2] == 3);
    CHECK(phloem_gather(context.c, half_at, 2, 2, got_halves) == PHLOEM_OK && got_halves[0] == 40 && got_halves[1] == 10);
    CHECK(phloem_gather(context.c, at, 3, 8, got) == PHLOEM_BAD_ARGUMENT);
  }
}

TEST(linear_parts_of_any_kind_lie_side_by_side) {
  for (int variant : phloem_test::variants()) {
    Context c(2, variant);
    std::vector<const phloem_matrix*> parts;
    std::vector<std::vector<float>> alone;
    const auto x = random_floats(9 * 96, 2);
    int width = 0;
    for (int kind : kKinds) {
      const Weights w(kind, 17 + kind, 96, static_cast<uint64_t>(kind));
      parts.push_back(w.pack(c.c));
      alone.push_back(linear(c.c, {parts.back()}, w.n, x.data(), 96, 9));
      width += w.n;
    }
    const auto bias = random_floats(static_cast<size_t>(width), 8), residual = random_floats(9 * static_cast<size_t>(width), 9);
    const auto y = linear(c.c, parts, width, x.data(), 96, 9, false, bias.data(), residual.data());
    for (size_t r = 0; r < 9; r++) {
      size_t at = 0;
      for (size_t p = 0; p < parts.size(); p++)
        for (size_t i = 0; i < alone[p].size() / 9; i++, at++) {
          const size_t j = r * static_cast<size_t>(width) + at;
          CHECK(y[j] == (alone[p][r * (alone[p].size() / 9) + i] + bias[at]) + residual[j]);
        }
    }
    // in place: the residual is y itself
    std::vector<float> in_place = residual;
    CHECK(phloem_linear(c.c, parts.data(), static_cast<int>(parts.size()), 0, x.data(), 96, 9, bias.data(), in_place.data(), width,
                        in_place.data(), width) == PHLOEM_OK);
    CHECK(same(in_place.data(), y.data(), y.size()));
    for (auto* m : parts) phloem_matrix_destroy(c.c, const_cast<phloem_matrix*>(m));
  }
}

TEST(linear_gated_is_silu_of_one_times_the_other) {
  for (int variant : phloem_test::variants()) {
    Context c(2, variant);
    for (int gate_kind : kKinds)
      for (int up_kind : {gate_kind, static_cast<int>(PHLOEM_F32)}) {
        const Weights g(gate_kind, 77, 64, 1), u(up_kind, 77, 64, 2);
        phloem_matrix* gate = g.pack(c.c);
        phloem_matrix* up = u.pack(c.c);
        const auto x = random_floats(66 * 64, 4);
        const auto a = linear(c.c, {gate}, 77, x.data(), 64, 66), b = linear(c.c, {up}, 77, x.data(), 64, 66);
        const auto y = linear(c.c, {gate, up}, 77, x.data(), 64, 66, true);
        for (size_t i = 0; i < y.size(); i++) {
          const double want = a[i] / (1.0 + std::exp(-static_cast<double>(a[i]))) * b[i];
          CHECK(std::fabs(y[i] - want) <= 1e-6 * std::fabs(want) + 1e-12);
        }
        CHECK(same(linear(c.c, {gate, up}, 77, x.data() + 64 * 3, 64, 1, true).data(), y.data() + 77 * 3, 77));
        phloem_matrix_destroy(c.c, gate);
        phloem_matrix_destroy(c.c, up);
      }
  }
}

TEST(linear_carries_a_number_that_is_none) {
  for (int variant : phloem_test::variants()) {
    Context c(1, variant);
    for (int kind : kKinds) {
      const Weights w(kind, 5, 64, 1);
      phloem_matrix* m = w.pack(c.c);
      auto x = random_floats(2 * 64, 4);
      x[70] = kind % 2 ? std::nanf("") : INFINITY;
      const auto y = linear(c.c, {m}, 5, x.data(), 64, 2);
      for (size_t i = 0; i < 5; i++) CHECK(std::isfinite(y[i]) && !std::isfinite(y[5 + i]));
      phloem_matrix_destroy(c.c, m);
    }
  }
}

TEST(embed_reads_back_the_table) {
  for (int variant : phloem_test::variants()) {
    Context c(2, variant);
    for (int kind : kKinds) {
      const Weights w(kind, 103, 96, 1);
      phloem_matrix* m = w.pack(c.c);
      const int32_t ids[] = {102, 0, 5, 48, 47, 5};
      std::vector<float> y(6 * 96);
      CHECK(phloem_embed(c.c, m, ids, 6, y.data(), 96) == PHLOEM_OK);
      for (size_t r = 0; r < 6; r++)
        for (size_t j = 0; j < 96; j++) CHECK(std::fabs(y[r * 96 + j] - w.value[static_cast<size_t>(ids[r]) * 96 + j]) <= 1e-7);
      const int32_t bad[] = {0, 103};
      CHECK(phloem_embed(c.c, m, bad, 2, y.data(), 96) == PHLOEM_BAD_ARGUMENT);
      CHECK(std::string(phloem_error(c.c)).find("103") != std::string::npos);
      phloem_matrix_destroy(c.c, m);
    }
  }
}

TEST(rms_norm_is_right_for_every_width) {
  for (int variant : phloem_test::variants()) {
    Context c(2, variant);
    for (int n : {1, 3, 15, 16, 17, 64, 576, 577}) {
      const auto x = random_floats(5 * static_cast<size_t>(n), 1), w = random_floats(static_cast<size_t>(n), 2);
      std::vector<float> y(x.size());
      CHECK(phloem_rms_norm(c.c, x.data(), n, w.data(), 1e-5f, 5, n, y.data(), n) == PHLOEM_OK);
      for (size_t r = 0; r < 5; r++) {
        double sum = 0;
        const size_t width = static_cast<size_t>(n);
        for (size_t i = 0; i < width; i++) sum += static_cast<double>(x[r * width + i]) * x[r * width + i];
        const double scale = 1 / std::sqrt(sum / n + 1e-5);
        for (size_t i = 0; i < width; i++) CHECK(std::fabs(y[r * width + i] - x[r * width + i] * scale * w[i]) <= 2e-6);
      }
    }
  }
}

TEST(matrices_refuse_what_they_cannot_hold) {
  Context c(1, PHLOEM_AUTO);
  phloem_matrix* m = nullptr;
  const float data[64] = {};
  CHECK(phloem_matrix_pack(c.c, PHLOEM_Q8_0, 1, 33, data, 400, &m) == PHLOEM_BAD_ARGUMENT && m == nullptr);
  CHECK(std::string(phloem_error(c.c)).find("blocks of 32") != std::string::npos);
  CHECK(phloem_matrix_pack(c.c, PHLOEM_F32, 2, 16, data, 63, &m) == PHLOEM_BAD_ARGUMENT);
  CHECK(phloem_matrix_pack(c.c, 17, 2, 16, data, 64, &m) == PHLOEM_BAD_ARGUMENT);
  CHECK(phloem_matrix_share(c.c, PHLOEM_Q4_0, 1, 32, data, 18, &m) == PHLOEM_BAD_ARGUMENT);
  CHECK(phloem_matrix_pack(c.c, PHLOEM_F32, 2, 16, data, 64, &m) == PHLOEM_OK);
  float y[2];
  CHECK(phloem_linear(c.c, &m, 1, 0, data, 15, 1, nullptr, nullptr, 0, y, 2) == PHLOEM_BAD_ARGUMENT);
  CHECK(phloem_linear(c.c, &m, 1, 1, data, 16, 1, nullptr, nullptr, 0, y, 2) == PHLOEM_BAD_ARGUMENT);
  phloem_matrix_destroy(c.c, m);
}
