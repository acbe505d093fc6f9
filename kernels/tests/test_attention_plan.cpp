// The plan cannot change a bit of the result, so its own promises are checked here: who shares, who waits, what is allocated.
#include <algorithm>
#include <set>
#include <tuple>

#include "attention_plan.h"
#include "test.h"

namespace {

using namespace phloem;
using phloem_test::Random;

constexpr AttentionShape kShape{9, 3, 64, 16, 5000};

struct Rows {
  std::vector<int32_t> qo_indptr{0}, kv_indptr{0}, indices, last;

  void add(const std::vector<int32_t>& pages, int32_t last_len, int32_t tokens) {
    qo_indptr.push_back(qo_indptr.back() + tokens);
    indices.insert(indices.end(), pages.begin(), pages.end());
    kv_indptr.push_back(static_cast<int32_t>(indices.size()));
    last.push_back(last_len);
  }
  PageBatch batch() const {
    return {static_cast<int32_t>(last.size()), qo_indptr.back(), nullptr, qo_indptr.data(), kv_indptr.data(), indices.data(), last.data(), nullptr};
  }
};

std::vector<int32_t> range(int32_t begin, int32_t end) {
  std::vector<int32_t> pages;
  for (int32_t p = begin; p < end; p++) pages.push_back(p);
  return pages;
}

int tiles_of(const PlanView& view) {
  int tiles = 0;
  for (int i = 0; i < view.num_items; i++) tiles = std::max(tiles, view.items[i].tile + 1);
  return tiles;
}

// Every token once, sharing only what is shared, every (tile, head, split) once.
void check_plan(const PlanView& view, const AttentionShape& shape, const PageBatch& batch) {
  std::vector<int> seen(static_cast<size_t>(batch.tokens), 0);
  const int tiles = tiles_of(view);
  for (int t = 0; t < tiles; t++) {
    const Tile& tile = view.tiles[t];
    int tokens = 0;
    for (int i = 0; i < tile.num_segments; i++) {
      const Segment& s = view.segments[tile.first_segment + i];
      tokens += s.tokens;
      CHECK(s.position + s.tokens <= tile.length);
      for (int j = 0; j < s.tokens; j++) seen[static_cast<size_t>(s.token + j)]++;
      if (i == 0) CHECK(s.shared == 0);
      for (int p = 0; i > 0 && p < s.shared; p += shape.page_size)
        CHECK(batch.kv_indices[s.pages + p / shape.page_size] == batch.kv_indices[view.segments[tile.first_segment + i - 1].pages + p / shape.page_size]);
    }
    CHECK(tokens == tile.tokens && tokens <= tile_tokens(shape));
  }
  CHECK(std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; }));
  std::set<std::tuple<int, int, int>> items;
  size_t expected = 0;
  for (int i = 0; i < view.num_items; i++) CHECK(items.emplace(view.items[i].tile, view.items[i].kv_head, view.items[i].split).second);
  for (int t = 0; t < tiles; t++) {
    const int splits = view.tiles[t].splits;
    CHECK(splits == 0 || splits == (view.tiles[t].length + kSplit - 1) / kSplit);
    expected += static_cast<size_t>(shape.kv_heads * std::max(1, splits));
    for (int h = 0; h < shape.kv_heads; h++)
      for (int s = splits == 0 ? -1 : 0; s < splits; s++) CHECK(items.count({t, h, s}) == 1);
  }
  CHECK(items.size() == expected);
}

}  // namespace

TEST(attention_plan_joins_rows_that_share_pages) {
  // Three trees of eight decodes, dealt out in turn: one tile each, all but the last two pages of a row read once.
  Rows rows;
  for (int i = 0; i < 24; i++) {
    std::vector<int32_t> pages = range(100 * (i % 3), 100 * (i % 3) + 60);
    pages.push_back(1000 + 2 * i);
    pages.push_back(1001 + 2 * i);
    rows.add(pages, 3, 1);
  }
  AttentionPlan plan;
  CHECK(plan.build(kShape, rows.batch(), 1) == nullptr);
  check_plan(plan.view(), kShape, rows.batch());
  CHECK(tiles_of(plan.view()) == 3);
  for (int t = 0; t < tiles_of(plan.view()); t++) {
    CHECK(plan.view().tiles[t].num_segments == 8);
    for (int i = 1; i < 8; i++) CHECK(plan.view().segments[plan.view().tiles[t].first_segment + i].shared == 960);
  }
}

TEST(attention_plan_keeps_strangers_apart) {
  Rows rows;
  for (int i = 0; i < 24; i++) rows.add(range(100 * i, 100 * i + 50), 16, 1);
  AttentionPlan plan;
  CHECK(plan.build(kShape, rows.batch(), 2) == nullptr);
  check_plan(plan.view(), kShape, rows.batch());
  CHECK(tiles_of(plan.view()) == 24);
}

TEST(attention_plan_gives_every_thread_work) {
  // One long decode, one long decode among short ones, a short prompt: none may leave a thread waiting for one long item.
  for (const int threads : {2, 4}) {
    Rows one, among, prompt;
    one.add(range(0, 512), 16, 1);
    among.add(range(0, 512), 16, 1);
    for (int i = 0; i < 8; i++) among.add(range(600 + 2 * i, 602 + 2 * i), 16, 1);
    prompt.add(range(0, 4), 16, 64);
    for (const Rows* rows : {&one, &among, &prompt}) {
      AttentionPlan plan;
      CHECK(plan.build(kShape, rows->batch(), threads) == nullptr);
      check_plan(plan.view(), kShape, rows->batch());
      CHECK(plan.view().num_items >= 3 * threads);
    }
    AttentionPlan plan;
    CHECK(plan.build(kShape, among.batch(), threads) == nullptr);
    CHECK(plan.view().items[0].split >= 0);  // the long row's pieces come first
  }
  Rows one;
  one.add(range(0, 512), 16, 1);
  AttentionPlan plan;
  CHECK(plan.build(kShape, one.batch(), 1) == nullptr);
  CHECK(plan.view().num_items == 3);  // one thread has nobody to share with
}

TEST(attention_plan_random_tries) {
  Random random(5);
  AttentionPlan plan;
  for (int trial = 0; trial < 300; trial++) {
    Rows rows;
    std::vector<std::vector<int32_t>> tables;
    int32_t next = 0;
    const int count = 1 + random.below(20);
    for (int r = 0; r < count; r++) {
      std::vector<int32_t> table;
      if (r > 0 && random.below(3) > 0) {
        const auto& from = tables[static_cast<size_t>(random.below(r))];
        table.assign(from.begin(), from.begin() + random.below(static_cast<int>(from.size()) + 1));
      }
      for (int i = random.below(30); i > 0; i--) table.push_back(next++);
      if (table.empty()) table.push_back(next++);
      tables.push_back(table);
      const int last = 1 + random.below(16), length = (static_cast<int>(table.size()) - 1) * 16 + last;
      rows.add(table, last, 1 + (random.below(2) > 0 ? 0 : random.below(length)));
    }
    CHECK(plan.build(kShape, rows.batch(), 1 + random.below(4)) == nullptr);
    check_plan(plan.view(), kShape, rows.batch());
  }
}

TEST(attention_plan_allocates_nothing_within_its_limits) {
  AttentionPlan plan;
  plan.reserve(kShape, 512, 64, 5000, 2);
  Rows small, large, decodes;
  small.add(range(0, 1), 1, 1);
  for (int i = 0; i < 64; i++) decodes.add(range(70 * i, 70 * i + 70), 16, 1);
  large.add(range(0, 5000), 16, 512);
  CHECK(plan.build(kShape, small.batch(), 2) == nullptr);
  const PlanView before = plan.view();
  for (const Rows* rows : {&large, &decodes, &small}) {
    CHECK(plan.build(kShape, rows->batch(), 2) == nullptr);
    const PlanView after = plan.view();
    CHECK(after.segments == before.segments && after.tiles == before.tiles);
    CHECK(after.partials == before.partials && after.pending == before.pending && after.ticket == before.ticket);
  }
}
