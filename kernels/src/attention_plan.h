// Who computes what in one step's attention: made once from the CSR arrays, shared by all layers.
//
//   rows, ordered so that sharers of leading pages are neighbours          tiles: <= 96 / group query tokens
//     row 4   [7 3 9 2]      shared 0   ┐
//     row 0   [7 3 9 5]      shared 3   │ one tile: pages 7 3 9 are read once for all three
//     row 2   [7 3 9 5 8]    shared 4   ┘
//     row 1   [6 1 ...]      shared 0   ─ a tile for each run of its tokens
//
//   item = (tile, kv head), longest first, kv head by kv head, drawn from an atomic counter. A tile that alone would keep a thread busy long after
//   the others have ended is cut further, one item for each split of 256 positions; whoever finishes a (tile, kv head)'s last
//   split merges them, in order.
//
// Nothing here can change a bit of the result: that is attention.h's affair.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace phloem {

struct AttentionShape {
  int32_t heads;      // a multiple of kv_heads
  int32_t kv_heads;
  int32_t head_dim;   // a multiple of 8, 16 .. 256
  int32_t page_size;  // a power of two, 1 .. 64
  int32_t num_pages;  // page ids are below it; it is itself the scratch page's id
};

// null, or what is wrong with the shape (a static sentence).
const char* check_shape(const AttentionShape& shape);

// The page contract's arrays (python/runtime/backends/base.py) and the positions of the T tokens.
struct PageBatch {
  int32_t rows;
  int32_t tokens;
  const int32_t* positions;         // [T], for rope
  const int32_t* qo_indptr;         // [B + 1]
  const int32_t* kv_indptr;         // [B + 1]
  const int32_t* kv_indices;        // [P]
  const int32_t* kv_last_page_len;  // [B]
  const int64_t* kv_slots;          // [T]
};

constexpr int kSplit = 256;  // positions a split; part of the arithmetic (attention.h)

// Query tokens of one row within a tile.
struct Segment {
  int32_t token;      // first, in the batch
  int32_t tokens;
  int32_t position;   // of the first
  int32_t pages;      // its row's page table: kv_indices + pages
  int32_t shared;     // leading positions on pages in common with the segment before it in the tile
};

struct Tile {
  int32_t first_segment, num_segments;
  int32_t tokens;
  int32_t length;     // positions 0 .. length - 1 cover all its keys
  int32_t splits;     // 0: one item a kv head does all of it; else one item a split
  int64_t partials;   // splits > 0: where its partial results begin, in floats
  int32_t pending;    // splits > 0: index of the first of kv_heads counters of unfinished splits
};

struct AttentionItem {
  int32_t tile, kv_head;
  int32_t split;      // -1: all of them
};

// What the kernels see: plain arrays (kernels are compiled per variant and must not instantiate std:: templates, variants.h).
struct PlanView {
  const Segment* segments;
  const Tile* tiles;
  const AttentionItem* items;
  int32_t num_items;
  float* partials;
  int32_t* pending;     // atomic
  uint32_t* ticket;     // atomic; never reset within a step: each layer takes num_items + threads of them
  uint32_t* base;       // [threads][16]: the ticket at which the layer begins, each thread its own count
};

class AttentionPlan {
 public:
  AttentionPlan();
  ~AttentionPlan();
  AttentionPlan(const AttentionPlan&) = delete;
  AttentionPlan& operator=(const AttentionPlan&) = delete;

  // Memory for steps within these limits. build() grows what it lacks, so this only keeps steady state free of allocation.
  void reserve(const AttentionShape& shape, int32_t max_tokens, int32_t max_rows, int32_t max_pages, int32_t threads);

  // null, or why shape or arrays break the page contract (a static sentence); then the plan is empty. O(total pages).
  // Only between regions. `threads` is the number of threads that will call attention().
  const char* build(const AttentionShape& shape, const PageBatch& batch, int32_t threads);

  const PlanView& view() const { return view_; }

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
  PlanView view_{};
};

// Query tokens a tile may hold, and the rows (token, q head of the group) that is.
int32_t tile_tokens(const AttentionShape& shape);
inline int32_t tile_rows(const AttentionShape& shape) { return tile_tokens(shape) * (shape.heads / shape.kv_heads); }
// Floats of one split's partial result for `rows` rows: maxima, sums, outputs.
inline int64_t partial_floats(int32_t rows, int32_t head_dim) { return (int64_t)rows * (head_dim + 2); }

}  // namespace phloem
