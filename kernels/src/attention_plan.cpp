// See attention_plan.h.
#include "attention_plan.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <tuple>
#include <vector>

namespace phloem {
namespace {

constexpr int kBlock = 16;            // positions that the kernels take at a time; less sharing than that is none to them
constexpr int kTileRows = 96;         // scores of a split for 96 rows: 100 KB, within L2 beside a page; 32 tokens at 3 q heads a group
constexpr int kMemoryCost = 6;        // reading a key and a value from memory takes about the time that 6 rows take to use them
constexpr int kLargeRows = 24;        // from here on computing takes longer than reading
constexpr int kItemsPerThread = 4;    // no item longer than a quarter of a thread's share, or its end is waited for
constexpr int64_t kMaxPartials = 2 << 20;  // floats of partial results, 8 MiB: tiles beyond stay in one piece
constexpr int kCounterStride = 16;    // uint32 a cache line

struct FreeDelete {
  void operator()(void* p) const { std::free(p); }
};
template <class T>
using Buffer = std::unique_ptr<T[], FreeDelete>;

template <class T>
Buffer<T> allocate(size_t n) {
  const size_t bytes = (n * sizeof(T) + 63) / 64 * 64;
  T* p = static_cast<T*>(std::aligned_alloc(64, bytes == 0 ? 64 : bytes));
  if (p == nullptr) throw std::bad_alloc();
  return Buffer<T>(p);
}

struct Range {
  int32_t begin, end, depth;  // order[begin .. end) agree on their first `depth` pages
};

}  // namespace

const char* check_shape(const AttentionShape& shape) {
  if (shape.kv_heads < 1 || shape.heads < 1 || shape.heads % shape.kv_heads != 0) return "heads is a multiple of kv_heads, both at least 1";
  if (shape.head_dim < 16 || shape.head_dim > 256 || shape.head_dim % 8 != 0) return "head_dim is a multiple of 8 from 16 to 256";
  const int32_t p = shape.page_size;
  if (p < 1 || p > 64 || (p & (p - 1)) != 0) return "page_size is a power of two from 1 to 64";
  if (shape.num_pages < 1) return "there is at least one page beside the scratch page";
  return nullptr;
}

int32_t tile_tokens(const AttentionShape& shape) {
  // Wide heads: q, scores and outputs of the tile should still fit L2.
  const int rows = shape.head_dim <= 128 ? kTileRows : kTileRows / 2;
  return std::max(1, rows / (shape.heads / shape.kv_heads));
}

struct AttentionPlan::Impl {
  std::vector<Segment> segments;
  std::vector<Tile> tiles;
  std::vector<int64_t> costs;  // of a tile, for one kv head
  std::vector<AttentionItem> items;
  std::vector<int64_t> item_costs;
  std::vector<int32_t> order, regrouped;  // rows
  std::vector<Range> stack;
  std::vector<int32_t> bucket;   // [num_pages]: while a range is grouped, page -> 1 + its group
  std::vector<int32_t> group_pages, group_begin;
  std::vector<int32_t> shared;   // [B]: leading pages in common with the row before it in `order`
  std::vector<int32_t> item_order;
  std::vector<AttentionItem> sorted;
  Buffer<float> partials;
  int64_t partials_size = 0;
  Buffer<int32_t> pending;
  int32_t pending_size = 0;
  Buffer<uint32_t> counters;     // the ticket, then a base a thread, each on its own line
  int32_t counter_threads = 0;

  void order_rows(const PageBatch& batch, int32_t num_pages);
  void group(const PageBatch& batch, Range range);
  void cut_tiles(const AttentionShape& shape, const PageBatch& batch, int32_t threads);
  void cut_items(const AttentionShape& shape, int32_t threads);
  void sort_items(int32_t group_size);
};

AttentionPlan::AttentionPlan() : impl_(new Impl) {}
AttentionPlan::~AttentionPlan() = default;

void AttentionPlan::reserve(const AttentionShape& shape, int32_t max_tokens, int32_t max_rows, int32_t max_pages, int32_t threads) {
  Impl& m = *impl_;
  const int32_t cap = tile_tokens(shape);
  // Tiles below the cap come only in numbers that give each thread a few.
  const size_t segments = (size_t)max_rows + (size_t)max_tokens / (size_t)cap + 1 + 2 * (size_t)(threads * kItemsPerThread);
  // Only tiles above a share of the whole are split, so there are few of them, of at most `max_pages` pages together.
  const size_t splits = (size_t)max_pages * (size_t)shape.page_size / kSplit + segments;
  const size_t items = (segments + splits) * (size_t)shape.kv_heads;
  m.segments.reserve(segments);
  m.tiles.reserve(segments);
  m.costs.reserve(segments);
  m.items.reserve(items);
  m.item_costs.reserve(items);
  m.item_order.reserve(items);
  m.sorted.reserve(items);
  m.order.reserve((size_t)max_rows);
  m.regrouped.reserve((size_t)max_rows);
  m.shared.reserve((size_t)max_rows);
  m.stack.reserve((size_t)max_rows + 1);
  m.group_pages.reserve((size_t)max_rows);
  m.group_begin.reserve((size_t)max_rows + 1);
  if (m.bucket.size() < (size_t)shape.num_pages) m.bucket.assign((size_t)shape.num_pages, 0);
  if (threads > 1 && m.partials_size < kMaxPartials) {
    m.partials = allocate<float>(kMaxPartials);  // untouched until used
    m.partials_size = kMaxPartials;
  }
  const int32_t counters = (int32_t)segments * shape.kv_heads;
  if (m.pending_size < counters) {
    m.pending = allocate<int32_t>((size_t)counters);
    m.pending_size = counters;
  }
  if (m.counter_threads < threads) {
    m.counters = allocate<uint32_t>((size_t)(threads + 1) * kCounterStride);
    m.counter_threads = threads;
  }
}

static const char* check(const AttentionShape& shape, const PageBatch& batch) {
  if (batch.rows < 1 || batch.tokens < 1) return "a batch has at least one row and one token";
  if (batch.qo_indptr[0] != 0 || batch.kv_indptr[0] != 0) return "qo_indptr and kv_indptr begin with 0";
  if (batch.qo_indptr[batch.rows] != batch.tokens) return "qo_indptr ends with the number of tokens";
  for (int32_t b = 0; b < batch.rows; b++) {
    const int64_t tokens = (int64_t)batch.qo_indptr[b + 1] - batch.qo_indptr[b];
    const int64_t pages = (int64_t)batch.kv_indptr[b + 1] - batch.kv_indptr[b];
    const int32_t last = batch.kv_last_page_len[b];
    if (tokens < 1) return "every row has at least one token: qo_indptr must rise";
    if (pages < 1) return "every row has at least one page: kv_indptr must rise";
    if (last < 1 || last > shape.page_size) return "kv_last_page_len is between 1 and page_size";
    const int64_t length = (pages - 1) * shape.page_size + last;
    if (length > INT32_MAX / 2) return "a row holds at most 2^30 keys";
    if (tokens > length) return "a row has no more tokens than keys";
    for (int64_t i = batch.kv_indptr[b]; i < batch.kv_indptr[b + 1]; i++)
      if (batch.kv_indices[i] < 0 || batch.kv_indices[i] >= shape.num_pages)
        return "kv_indices are between 0 and num_pages - 1 (the scratch page is in no page table)";
  }
  return nullptr;
}

const char* AttentionPlan::build(const AttentionShape& shape, const PageBatch& batch, int32_t threads) {
  view_ = PlanView{};
  if (const char* wrong = check_shape(shape)) return wrong;
  if (const char* wrong = check(shape, batch)) return wrong;
  Impl& m = *impl_;
  m.order_rows(batch, shape.num_pages);
  m.cut_tiles(shape, batch, threads);
  m.cut_items(shape, threads);
  m.sort_items(shape.heads / shape.kv_heads);
  if (m.counter_threads < threads) {
    m.counters = allocate<uint32_t>((size_t)(threads + 1) * kCounterStride);
    m.counter_threads = threads;
  }
  std::fill_n(m.counters.get(), (size_t)(m.counter_threads + 1) * kCounterStride, 0u);
  view_ = {m.segments.data(), m.tiles.data(), m.items.data(), (int32_t)m.items.size(), m.partials.get(),
           m.pending.get(), m.counters.get(), m.counters.get() + kCounterStride};
  return nullptr;
}

// A depth-first walk of the trie of page tables that never builds it: O(rows + pages), as each (row, depth) is looked at once
// to extend what its range has in common and at most once more to part it.
void AttentionPlan::Impl::order_rows(const PageBatch& batch, int32_t num_pages) {
  const int32_t rows = batch.rows;
  if (bucket.size() < (size_t)num_pages) bucket.assign((size_t)num_pages, 0);
  order.resize((size_t)rows);
  regrouped.resize((size_t)rows);
  shared.assign((size_t)rows, 0);
  for (int32_t b = 0; b < rows; b++) order[(size_t)b] = b;
  stack.clear();
  stack.push_back({0, rows, 0});
  while (!stack.empty()) {
    const Range range = stack.back();
    stack.pop_back();
    group(batch, range);
  }
}

void AttentionPlan::Impl::group(const PageBatch& batch, Range range) {
  const auto pages = [&](int32_t row) { return batch.kv_indptr[row + 1] - batch.kv_indptr[row]; };
  const auto page = [&](int32_t row, int32_t i) { return batch.kv_indices[batch.kv_indptr[row] + i]; };
  int32_t depth = range.depth;
  // As deep as all agree.
  for (;; depth++) {
    const int32_t first = order[(size_t)range.begin];
    bool agree = depth < pages(first);
    for (int32_t i = range.begin + 1; agree && i < range.end; i++) {
      const int32_t row = order[(size_t)i];
      agree = depth < pages(row) && page(row, depth) == page(first, depth);
    }
    if (!agree || range.end - range.begin == 1) break;
  }
  for (int32_t i = range.begin + 1; i < range.end; i++) shared[(size_t)i] = depth;
  if (range.end - range.begin == 1) return;
  // Part them by their page at `depth`, in order of appearance; those that end here come first.
  group_pages.clear();
  group_begin.clear();
  int32_t ended = 0;
  for (int32_t i = range.begin; i < range.end; i++) {
    const int32_t row = order[(size_t)i];
    if (depth >= pages(row)) {
      ended++;
      continue;
    }
    int32_t& slot = bucket[(size_t)page(row, depth)];
    if (slot == 0) {
      group_pages.push_back(page(row, depth));
      group_begin.push_back(0);
      slot = (int32_t)group_pages.size();
    }
    group_begin[(size_t)slot - 1]++;
  }
  int32_t at = range.begin + ended;
  for (int32_t& begin : group_begin) {
    const int32_t count = begin;
    begin = at;
    if (count > 1) stack.push_back({at, at + count, depth + 1});
    at += count;
  }
  int32_t end_at = range.begin;
  for (int32_t i = range.begin; i < range.end; i++) {
    const int32_t row = order[(size_t)i];
    if (depth >= pages(row)) regrouped[(size_t)end_at++] = row;
    else regrouped[(size_t)group_begin[(size_t)bucket[(size_t)page(row, depth)] - 1]++] = row;
  }
  std::copy(regrouped.begin() + range.begin, regrouped.begin() + range.end, order.begin() + range.begin);
  for (const int32_t p : group_pages) bucket[(size_t)p] = 0;
}

// As many tokens a tile as caches allow, fewer if that left threads without work: short contexts have no splits to share out.
static int32_t tile_cap(const AttentionShape& shape, const PageBatch& batch, int32_t threads) {
  const int32_t cap = tile_tokens(shape);
  int32_t longest = 0;
  for (int32_t b = 0; b < batch.rows; b++)
    longest = std::max(longest, (batch.kv_indptr[b + 1] - batch.kv_indptr[b]) * shape.page_size);
  const int64_t wanted = (int64_t)threads * kItemsPerThread;
  const int64_t tiles = (batch.tokens + cap - 1) / cap, splits = (longest + kSplit - 1) / kSplit;
  if (threads == 1 || tiles * splits * shape.kv_heads >= wanted) return cap;
  return (int32_t)std::min<int64_t>(cap, std::max<int64_t>(1, (int64_t)batch.tokens * shape.kv_heads / wanted));
}

void AttentionPlan::Impl::cut_tiles(const AttentionShape& shape, const PageBatch& batch, int32_t threads) {
  const int32_t cap = tile_cap(shape, batch, threads), group_size = shape.heads / shape.kv_heads;
  segments.clear();
  tiles.clear();
  costs.clear();
  for (size_t i = 0; i < order.size(); i++) {
    const int32_t row = order[i];
    const int32_t first = batch.qo_indptr[row], count = batch.qo_indptr[row + 1] - first;
    const int32_t length = (batch.kv_indptr[row + 1] - batch.kv_indptr[row] - 1) * shape.page_size + batch.kv_last_page_len[row];
    for (int32_t done = 0; done < count;) {
      int32_t common = 0;
      bool join = false;
      if (done == 0 && i > 0) {
        // Few positions in common are not worth a tile that must walk two long tables.
        common = std::min(shared[i] * shape.page_size, length);
        join = common >= kBlock && (int64_t)common * 8 >= length && tiles.back().tokens < cap;
      }
      if (!join) {
        tiles.push_back({(int32_t)segments.size(), 0, 0, 0, 0, 0, 0});
        costs.push_back(0);
        common = 0;
      }
      Tile& tile = tiles.back();
      const int32_t tokens = std::min(count - done, cap - tile.tokens);
      const int32_t reach = length - count + done + tokens;  // keys of the segment's last token
      segments.push_back({first + done, tokens, length - count + done, batch.kv_indptr[row], common});
      tile.num_segments++;
      tile.tokens += tokens;
      tile.length = std::max(tile.length, reach);
      costs.back() += (int64_t)reach * tokens * group_size + (int64_t)std::max(0, reach - common) * kMemoryCost;
      done += tokens;
    }
  }
}

void AttentionPlan::Impl::cut_items(const AttentionShape& shape, int32_t threads) {
  const int32_t group_size = shape.heads / shape.kv_heads;
  int64_t total = 0, partial = 0;
  int32_t waiting = 0;
  for (const int64_t cost : costs) total += cost * shape.kv_heads;
  items.clear();
  item_costs.clear();
  for (size_t t = 0; t < tiles.size(); t++) {
    Tile& tile = tiles[t];
    const int32_t splits = (tile.length + kSplit - 1) / kSplit;
    const int64_t floats = partial_floats(tile.tokens * group_size, shape.head_dim) * splits * shape.kv_heads;
    const bool cut = threads > 1 && splits > 1 && costs[t] * threads * kItemsPerThread > total && partial + floats <= kMaxPartials;
    if (cut) {
      tile.splits = splits;
      tile.partials = partial;
      tile.pending = waiting;
      partial += floats;
      waiting += shape.kv_heads;
    }
    for (int32_t h = 0; h < shape.kv_heads; h++)
      for (int32_t s = 0; s < (cut ? splits : 1); s++) {
        items.push_back({(int32_t)t, h, cut ? s : -1});
        item_costs.push_back(cut ? costs[t] / splits : costs[t]);
      }
  }
  if (partial > partials_size) {
    partials = allocate<float>((size_t)kMaxPartials);
    partials_size = kMaxPartials;
  }
  if (waiting > pending_size) {
    pending = allocate<int32_t>((size_t)waiting);
    pending_size = waiting;
  }
  for (const Tile& tile : tiles)
    if (tile.splits > 0) std::fill_n(pending.get() + tile.pending, shape.kv_heads, tile.splits);
}

// Longest first, in steps of two, as the last ones then end together. Among those of about one length a large tile's neighbours
// are those of the same kv head and split: prompts have many tiles over the same pages, which are then in the thread's cache.
// A small tile's are its other kv heads, whose part of the pages lies beside.
void AttentionPlan::Impl::sort_items(int32_t group_size) {
  item_order.resize(items.size());
  for (size_t i = 0; i < items.size(); i++) item_order[i] = (int32_t)i;
  const auto key = [this, group_size](int32_t i) {
    const AttentionItem& item = items[(size_t)i];
    int32_t length = 0;
    while (item_costs[(size_t)i] >> length > 1) length++;
    const bool large = tiles[(size_t)item.tile].tokens * group_size >= kLargeRows;
    return large ? std::make_tuple(-length, 0, item.kv_head, item.split, item.tile)
                 : std::make_tuple(-length, 1, item.tile, item.split, item.kv_head);
  };
  std::sort(item_order.begin(), item_order.end(), [&key](int32_t a, int32_t b) { return key(a) < key(b); });
  sorted.resize(items.size());
  for (size_t i = 0; i < items.size(); i++) sorted[i] = items[(size_t)item_order[i]];
  items.swap(sorted);
}

}  // namespace phloem
