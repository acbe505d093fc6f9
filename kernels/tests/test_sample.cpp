// Draws against a sort, on rows of awkward sizes: what Python's comparison with numpy does too, here under the sanitizers.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "phloem_sample.h"
#include "test.h"

using phloem_test::Random;

namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

phloem_sample_row plain_row() {
  phloem_sample_row r{};
  r.top_p = r.repetition_penalty = 1;
  r.temperature = 1;
  return r;
}

// The kept ids, likeliest first, by the definitions.
std::vector<int> kept_ids(const std::vector<double>& x, const phloem_sample_row& r) {
  std::vector<int> ids;
  for (int i = 0; i < (int)x.size(); i++)
    if (x[i] > -kInf) ids.push_back(i);
  std::stable_sort(ids.begin(), ids.end(), [&](int a, int b) { return x[a] > x[b]; });
  if (r.temperature == 0) ids.resize(1);
  if (r.top_k > 0 && (int)ids.size() > r.top_k) ids.resize(r.top_k);
  std::vector<double> weight;
  for (int id : ids) weight.push_back(r.temperature == 0 ? 1.0 : std::exp((x[id] - x[ids[0]]) / r.temperature));
  if (r.top_p < 1) {
    const double total = std::accumulate(weight.begin(), weight.end(), 0.0);
    double running = 0;
    size_t n = 0;
    while (running < r.top_p * total && n < ids.size()) running += weight[n++];
    ids.resize(n);
  }
  size_t n = 0;
  while (n < ids.size() && weight[n] >= r.min_p) n++;
  ids.resize(n);
  return ids;
}

}  // namespace

TEST(draws_stay_in_the_kept_set) {
  for (int variant : phloem_test::variants()) {
    for (int threads : {1, 3}) {
      phloem_context* context = nullptr;
      CHECK(phloem_create(threads, variant, &context) == PHLOEM_OK);
      Random random(7);
      for (int vocab : {1, 2, 31, 32, 33, 63, 64, 65, 127, 1000, 4099}) {
        const int width = vocab + random.below(40), words = (vocab + 31) / 32, rows = 12;
        std::vector<float> logits((size_t)width * rows);
        for (float& v : logits) v = random.uniform() * 6;
        // Exactly as long as the contract says: the sanitizer sees a word too many.
        std::vector<uint32_t> mask(words), allowed(words);
        for (uint32_t& w : mask) w = (uint32_t)random.next() | (uint32_t)random.next();
        for (uint32_t& w : allowed) w = (uint32_t)random.next() | (uint32_t)random.next();
        std::vector<int32_t> ids(20), times(20), block = {-1, vocab, 1 << 30, random.below(vocab)};
        std::vector<double> bias(20);
        for (int i = 0; i < 20; i++) ids[i] = i * vocab / 20 + (i % 7 == 6 ? 10000 : 0), times[i] = i % 3, bias[i] = random.uniform() * 5;
        std::vector<phloem_sample_row> sampled(rows, plain_row());
        for (int i = 0; i < rows; i++) {
          phloem_sample_row& r = sampled[i];
          r.logits_row = i;
          r.position = (uint64_t)i;
          r.temperature = i % 4 == 0 ? 0 : 0.3 + i * 0.2;
          if (i % 3 == 1) r.top_k = 1 + random.below(vocab + 3);
          if (i % 3 == 2) r.top_p = 0.05 + 0.9 * std::fabs(random.uniform());
          if (i % 5 == 4) r.min_p = 0.1;
          if (i % 2 == 1) r.mask = mask.data();
          if (i % 4 == 3) r.allowed = allowed.data();
          if (i % 6 == 5) r.block_ids = block.data(), r.num_block = 4;
          r.logprobs = PHLOEM_LOGPROB_SAMPLED | (i % 2 ? PHLOEM_LOGPROB_MODEL : 0);
          r.top = i % 3 == 0 ? PHLOEM_MAX_TOP : i;
        }
        std::vector<phloem_sample_result> results(rows);
        CHECK(phloem_sample(context, logits.data(), width, rows, width, vocab, sampled.data(), rows, results.data()) == PHLOEM_OK);
        for (int i = 0; i < rows; i++) {
          const phloem_sample_row& r = sampled[i];
          std::vector<double> x(vocab);
          bool any = false;
          for (int t = 0; t < vocab; t++) {
            bool legal = (r.mask == nullptr || (mask[t / 32] >> (t % 32) & 1)) && (r.allowed == nullptr || (allowed[t / 32] >> (t % 32) & 1));
            x[t] = legal ? (double)logits[(size_t)i * width + t] : -(double)kInf;
          }
          if (r.num_block > 0) {
            std::vector<double> blocked = x;
            blocked[block[3]] = -kInf;
            if (r.mask == nullptr || *std::max_element(blocked.begin(), blocked.end()) > -kInf) x = blocked;
          }
          any = *std::max_element(x.begin(), x.end()) > -kInf;
          CHECK(results[i].status == (any ? PHLOEM_DRAWN : PHLOEM_DEAD_END));
          if (!any) continue;
          const std::vector<int> kept = kept_ids(x, r);
          CHECK(std::find(kept.begin(), kept.end(), results[i].token) != kept.end());
          CHECK(results[i].sampled <= 0 && std::isfinite(results[i].sampled));
          if (r.logprobs == PHLOEM_LOGPROB_SAMPLED) {
            CHECK(results[i].num_top == std::min((int)kept.size(), r.top));
            for (int j = 0; j < results[i].num_top; j++) CHECK(results[i].top_ids[j] == kept[j]);
          } else {
            CHECK(results[i].num_top == std::min(vocab, r.top));
          }
        }
        for (auto& r : sampled)
          r.penalty_ids = ids.data(), r.penalty_times = times.data(), r.bias_ids = ids.data(), r.bias_values = bias.data(), r.num_penalty = r.num_bias = 20,
          r.repetition_penalty = 1.3f, r.frequency_penalty = 0.5, r.presence_penalty = -0.5;
        CHECK(phloem_sample(context, logits.data(), width, rows, width, vocab, sampled.data(), rows, results.data()) == PHLOEM_OK);
        // One row alone, another neighbour, the same bits.
        for (int i = 0; i < rows; i++) {
          phloem_sample_result solo;
          CHECK(phloem_sample(context, logits.data(), width, rows, width, vocab, &sampled[i], 1, &solo) == PHLOEM_OK);
          CHECK(solo.token == results[i].token && std::memcmp(&solo.sampled, &results[i].sampled, 4) == 0);
        }
      }
      phloem_destroy(context);
    }
  }
}

// A trainer recomputes what was drawn from: the kept set, the mass it had, and the same logprob from a score under it.
TEST(a_score_under_the_kept_set_is_the_draw) {
  for (int variant : phloem_test::variants()) {
    phloem_context* context = nullptr;
    CHECK(phloem_create(2, variant, &context) == PHLOEM_OK);
    Random random(11);
    for (int vocab : {1, 3, 33, 64, 127, 4099}) {
      const int width = vocab + (vocab % 2 ? 5 : 0), words = (vocab + 31) / 32, rows = 10;
      std::vector<float> logits((size_t)width * rows);
      for (float& v : logits) v = random.uniform() * 8;
      std::vector<uint32_t> mask(words, 0x5b6db6dbu), kept((size_t)words * rows);
      std::vector<phloem_sample_row> sampled(rows, plain_row());
      for (int i = 0; i < rows; i++) {
        phloem_sample_row& r = sampled[i];
        r.logits_row = i;
        r.position = (uint64_t)i;
        r.temperature = i == 9 ? 0 : 0.5 + 0.25 * (i % 4);
        r.logprobs = PHLOEM_LOGPROB_MODEL | PHLOEM_LOGPROB_SAMPLED | PHLOEM_LOGPROB_MASS;
        r.kept = kept.data() + (size_t)words * i;
        if (i % 2) r.mask = mask.data();
        if (i % 3 == 1) r.top_k = 1 + random.below(vocab);
        if (i % 3 == 2) r.top_p = 0.7;
        if (i == 6) r.min_p = 0.05;
      }
      std::vector<phloem_sample_result> drawn(rows), scored(rows);
      CHECK(phloem_sample(context, logits.data(), width, rows, width, vocab, sampled.data(), rows, drawn.data()) == PHLOEM_OK);
      std::vector<phloem_score_row> scores(rows);
      for (int i = 0; i < rows; i++)
        scores[i] = {sampled[i].kept, sampled[i].temperature, i, drawn[i].token, 0, PHLOEM_LOGPROB_SAMPLED | PHLOEM_LOGPROB_MASS};
      CHECK(phloem_score(context, logits.data(), width, rows, width, vocab, scores.data(), rows, scored.data()) == PHLOEM_OK);
      for (int i = 0; i < rows; i++) {
        const int token = drawn[i].token;
        CHECK((sampled[i].kept[token / 32] >> (token % 32) & 1) == 1);
        CHECK(std::memcmp(&drawn[i].sampled, &scored[i].sampled, 4) == 0 && std::memcmp(&drawn[i].mass, &scored[i].mass, 4) == 0);
        CHECK(std::memcmp(&drawn[i].model, &scored[i].model, 4) == 0);
        if (sampled[i].temperature == 0) {
          CHECK(drawn[i].sampled == 0 && drawn[i].mass == 0);
          continue;
        }
        const float* x = logits.data() + (size_t)i * width;
        double total = 0, inside = 0;
        for (int t = 0; t < width; t++) total += std::exp(x[t] / sampled[i].temperature);
        for (int t = 0; t < vocab; t++)
          if (sampled[i].kept[t / 32] >> (t % 32) & 1) inside += std::exp(x[t] / sampled[i].temperature);
        const double scaled = x[token] / sampled[i].temperature;
        CHECK(std::fabs(drawn[i].sampled - (scaled - std::log(inside))) < 1e-5);
        CHECK(std::fabs((double)drawn[i].sampled + drawn[i].mass - (scaled - std::log(total))) < 1e-5);
        if (width == vocab && i == 0) CHECK(drawn[i].mass == 0);  // nothing was cut: exactly
      }
    }
    phloem_destroy(context);
  }
}

TEST(scores_are_log_softmax) {
  phloem_context* context = nullptr;
  CHECK(phloem_create(2, PHLOEM_AUTO, &context) == PHLOEM_OK);
  Random random(3);
  for (int width : {1, 5, 64, 100, 777}) {
    std::vector<float> logits((size_t)width * 2);
    for (float& v : logits) v = random.uniform() * 9;
    std::vector<phloem_score_row> rows = {{nullptr, 1, 0, width - 1, 3, 0}, {nullptr, 1, 1, 0, PHLOEM_MAX_TOP, 0}};
    std::vector<phloem_sample_result> results(2);
    CHECK(phloem_score(context, logits.data(), width, 2, width, width, rows.data(), 2, results.data()) == PHLOEM_OK);
    for (int i = 0; i < 2; i++) {
      double total = 0;
      for (int t = 0; t < width; t++) total += std::exp((double)logits[(size_t)i * width + t]);
      CHECK(std::fabs(results[i].model - ((double)logits[(size_t)i * width + rows[i].target] - std::log(total))) < 1e-5);
      CHECK(results[i].num_top == std::min(width, rows[i].top));
    }
    logits[width - 1] = NAN;
    CHECK(phloem_score(context, logits.data(), width, 2, width, width, rows.data(), 2, results.data()) == PHLOEM_OK);
    CHECK(results[0].status == PHLOEM_NOT_FINITE && results[1].status == PHLOEM_DRAWN);
  }
  phloem_destroy(context);
}

TEST(bad_sampling_arguments_are_refused) {
  phloem_context* context = nullptr;
  CHECK(phloem_create(1, PHLOEM_AUTO, &context) == PHLOEM_OK);
  float logits[8] = {};
  phloem_sample_result result;
  auto status = [&](void (*spoil)(phloem_sample_row&)) {
    phloem_sample_row r = plain_row();
    spoil(r);
    return phloem_sample(context, logits, 4, 2, 4, 4, &r, 1, &result);
  };
  CHECK(status([](phloem_sample_row&) {}) == PHLOEM_OK);
  CHECK(status([](phloem_sample_row& r) { r.logits_row = 2; }) == PHLOEM_BAD_ARGUMENT);
  CHECK(status([](phloem_sample_row& r) { r.logits_row = -1; }) == PHLOEM_BAD_ARGUMENT);
  CHECK(status([](phloem_sample_row& r) { r.top = PHLOEM_MAX_TOP + 1; }) == PHLOEM_BAD_ARGUMENT);
  CHECK(status([](phloem_sample_row& r) { r.temperature = NAN; }) == PHLOEM_BAD_ARGUMENT);
  CHECK(status([](phloem_sample_row& r) { r.top_p = 0; }) == PHLOEM_BAD_ARGUMENT);
  CHECK(status([](phloem_sample_row& r) { r.num_bias = 1; }) == PHLOEM_BAD_ARGUMENT);
  CHECK(status([](phloem_sample_row& r) { r.num_block = -1; }) == PHLOEM_BAD_ARGUMENT);
  phloem_sample_row r = plain_row();
  CHECK(phloem_sample(context, logits, 4, 2, 4, 5, &r, 1, &result) == PHLOEM_BAD_ARGUMENT);
  CHECK(phloem_sample(context, nullptr, 4, 2, 4, 4, &r, 1, &result) == PHLOEM_BAD_ARGUMENT);
  CHECK(phloem_sample(nullptr, logits, 4, 2, 4, 4, &r, 1, &result) == PHLOEM_BAD_ARGUMENT);
  phloem_score_row score = {nullptr, 1, 0, 4, 0, 0};
  CHECK(phloem_score(context, logits, 4, 2, 4, 4, &score, 1, &result) == PHLOEM_BAD_ARGUMENT);
  score.target = 0;
  score.temperature = NAN;
  CHECK(phloem_score(context, logits, 4, 2, 4, 4, &score, 1, &result) == PHLOEM_BAD_ARGUMENT);
  phloem_destroy(context);
}
