// See attention.h for the arithmetic, attention_plan.h for who computes what. Here: one (tile, kv head), split by split.
//
//   rows of the tile: (token, q head of the group)        a piece: 16 positions on one page, for the tokens that share it
//
//             16 positions          256 positions                    head_dim
//   q [R][D] x K piece [D][16] -> s [R][256] -> softmax -> s x V piece [16][D] -> o [R][D] -> merged into the splits before
#include "attention.h"

#include "attention_kernels.h"
#include "simd.h"

namespace phloem::PHLOEM_NS {
namespace {

constexpr int kBlocks = kSplit / kBlock;
// Pieces between the one in use and the one being fetched: a piece lasts some 60 ns, memory 100 and more (1 row: 19 -> 23 GB/s).
constexpr int kAhead = 4;

struct Piece {
  const void* k;  // [head_dim][page_size], from its first position; null: the page is smaller than a block, gather it
  const void* v;  // [16][head_dim]
  int32_t segment, position;
  int32_t first, last;  // tokens of the tile that see any of it: [first, last)
};

// A thread's memory, cut from Spmd::scratch.
struct Scratch {
  float* q;         // [D][R], scaled
  float* s;         // [R][kScoreStride]
  float* o;         // [R][D], of the current split
  float* m;         // [R] its maxima
  float* l;         // [R] its sums
  float* all_o;     // [R][D], of the splits so far
  float* all_m;
  float* all_l;
  float* k;         // [kRun][D][16], pieces expanded to float
  float* v;         // [kRun][16][D]
  int32_t* low;     // [tokens]: a token sees positions low .. high - 1
  int32_t* high;
  int32_t* segment; // [tokens]: first token of each segment in the tile
  Piece* pieces;    // [kBlocks][segments]
};

size_t carve(const AttentionShape& shape, char* base, Scratch* out) {
  const size_t tokens = (size_t)tile_tokens(shape), rows = (size_t)tile_rows(shape), dim = (size_t)shape.head_dim;
  size_t at = 0;
  const auto take = [&](size_t bytes) {
    char* p = base == nullptr ? nullptr : base + at;
    at += (bytes + 63) / 64 * 64;
    return p;
  };
  const auto floats = [&](size_t n) { return reinterpret_cast<float*>(take(n * sizeof(float))); };
  out->q = floats(rows * dim);
  out->s = floats(rows * kScoreStride);
  out->o = floats(rows * dim);
  out->m = floats(rows);
  out->l = floats(rows);
  out->all_o = floats(rows * dim);
  out->all_m = floats(rows);
  out->all_l = floats(rows);
  out->k = floats(kRun * dim * kBlock);
  out->v = floats(kRun * dim * kBlock);
  out->low = reinterpret_cast<int32_t*>(take(tokens * sizeof(int32_t)));
  out->high = reinterpret_cast<int32_t*>(take(tokens * sizeof(int32_t)));
  out->segment = reinterpret_cast<int32_t*>(take((tokens + 1) * sizeof(int32_t)));
  out->pieces = reinterpret_cast<Piece*>(take((tokens * kBlocks + 1) * sizeof(Piece)));
  return at;
}

inline int at_least(int a, int b) { return a > b ? a : b; }
inline int at_most(int a, int b) { return a < b ? a : b; }

template <class T>
struct Worker {
  const AttentionArgs& args;
  const Scratch scratch;
  const int group, dim, page_size, ldq;
  const Tile* tile = nullptr;
  const Segment* segments = nullptr;
  int kv_head = 0;
  int num_pieces = 0;

  Worker(const AttentionArgs& a, const Scratch& s)
      : args(a), scratch(s), group(a.shape.heads / a.shape.kv_heads), dim(a.shape.head_dim), page_size(a.shape.page_size), ldq(tile_rows(a.shape)) {}

  const T* k_page(int page) const {
    return static_cast<const T*>(args.k_cache) + ((int64_t)page * args.shape.kv_heads + kv_head) * dim * page_size;
  }
  const T* v_page(int page) const {
    return static_cast<const T*>(args.v_cache) + ((int64_t)page * args.shape.kv_heads + kv_head) * dim * page_size;
  }
  int page_of(const Segment& segment, int position) const {
    return args.batch.kv_indices[segment.pages + position / page_size];
  }
  bool sees(int token, int begin, int end) const { return scratch.high[token] > begin && scratch.low[token] < end; }

  // Queries, scaled and packed; what each token sees.
  void open(const Tile& t, int head) {
    tile = &t;
    segments = args.plan->view().segments + t.first_segment;
    kv_head = head;
    int token = 0;
    for (int i = 0; i < t.num_segments; i++) {
      scratch.segment[i] = token;
      for (int j = 0; j < segments[i].tokens; j++, token++) {
        scratch.high[token] = segments[i].position + j + 1;
        scratch.low[token] = args.window > 0 ? at_least(0, scratch.high[token] - args.window) : 0;
        const float* q = args.qkv + (segments[i].token + j) * args.qkv_ld + (int64_t)head * group * dim;
        for (int g = 0; g < group; g++) scale_column(q + g * dim, args.scale, dim, scratch.q + token * group + g, ldq);
      }
    }
    scratch.segment[t.num_segments] = token;
  }
  int first_split() const {
    int low = scratch.low[0];
    for (int t = 1; t < tile->tokens; t++) low = at_most(low, scratch.low[t]);
    return low / kSplit;
  }

  // The pieces of a split, in the order in which they are used: runs of kRun blocks, each run by those that share it, where all
  // of its blocks are shared alike.
  void list_pieces(int split) {
    num_pieces = 0;
    const int end = at_most(tile->length, (split + 1) * kSplit);
    for (int position = split * kSplit; position < end; position += kRun * kBlock) {
      const int last = at_most(position + kRun * kBlock, (end + kBlock - 1) & ~(kBlock - 1));
      bool alike = true;
      for (int i = 1; i < tile->num_segments; i++) alike = alike && (segments[i].shared < position + kBlock || segments[i].shared >= last);
      for (int begin = position; begin < last; begin = alike ? last : begin + kBlock)
        for (int i = 0; i < tile->num_segments;) {
          const int first = i++;
          while (i < tile->num_segments && segments[i].shared >= begin + kBlock) i++;
          for (int at = begin; at < (alike ? last : begin + kBlock); at += kBlock) add_piece(at, first, i);
        }
    }
  }
  // Those of segments [first_segment, last_segment) that see any of the block at `position`.
  void add_piece(int position, int first_segment, int last_segment) {
    int first = scratch.segment[first_segment], last = scratch.segment[last_segment];
    while (first < last && !sees(first, position, position + kBlock)) first++;
    while (first < last && !sees(last - 1, position, position + kBlock)) last--;
    if (first == last) return;
    Piece& piece = scratch.pieces[num_pieces++];
    piece = {nullptr, nullptr, first_segment, position, first, last};
    // Of several segments any one knows the page, but only one that reaches this far has it in its table.
    while (scratch.segment[piece.segment + 1] <= first) piece.segment++;
    if (page_size >= kBlock) {
      const int page = page_of(segments[piece.segment], position), offset = position & (page_size - 1);
      piece.k = k_page(page) + offset;
      piece.v = v_page(page) + offset * dim;
    }
  }
  // Pieces from i on that can go together: the same tokens, positions on end.
  int run_of(int i) const {
    const Piece& piece = scratch.pieces[i];
    int n = 1;
    for (; n < kRun && i + n < num_pieces && piece.k != nullptr; n++) {
      const Piece& next = scratch.pieces[i + n];
      if (next.first != piece.first || next.last != piece.last || next.position != piece.position + n * kBlock) break;
    }
    return n;
  }

  // Pages smaller than a block: a block's worth of them, expanded to float, as far as any of the piece's tokens sees (all that
  // share the piece have these pages).
  int piece_end(const Piece& piece) const {
    int high = 0;
    for (int t = piece.first; t < piece.last; t++) high = at_least(high, scratch.high[t]);
    return at_most(piece.position + kBlock, high);
  }
  void gather_k(const Piece& piece) {
    const int end = piece_end(piece);
    for (int position = piece.position; position < end; position += page_size) {
      const T* page = k_page(page_of(segments[piece.segment], position));
      for (int d = 0; d < dim; d++)
        for (int j = 0; j < page_size; j++)
          scratch.k[d * kBlock + position - piece.position + j] = to_float(page[d * page_size + j]);
    }
  }
  void gather_v(const Piece& piece) {
    const int end = piece_end(piece);
    for (int position = piece.position; position < end; position += page_size) {
      const T* page = v_page(page_of(segments[piece.segment], position));
      const int n = page_size * dim;
      float* to = scratch.v + (int64_t)(position - piece.position) * dim;
      for (int j = 0; j < n; j++) to[j] = to_float(page[j]);
    }
  }
  void score(const Piece* pieces, int n, const Ahead* ahead) {
    const int first = pieces->first, rows = (pieces->last - first) * group;
    const float* q = scratch.q + first * group;
    float* s = scratch.s + (int64_t)first * group * kScoreStride + (pieces->position & (kSplit - 1));
    const float* expanded[kRun];
    for (int p = 0; p < n; p++) expanded[p] = scratch.k + p * dim * kBlock;
    if (pieces->k == nullptr) {
      gather_k(*pieces);
      scores(rows, dim, q, ldq, expanded, kBlock, 1, s, nullptr);
      return;
    }
    const T* k[kRun];
    for (int p = 0; p < n; p++) k[p] = static_cast<const T*>(pieces[p].k);
    if constexpr (sizeof(T) == 2) {
      if (rows > kScoreRows) {  // expanded once for several passes
        for (int p = 0; p < n; p++) expand_k(k[p], page_size, dim, scratch.k + p * dim * kBlock);
        scores(rows, dim, q, ldq, expanded, kBlock, n, s, ahead);
        return;
      }
    }
    scores(rows, dim, q, ldq, k, page_size, n, s, ahead);
  }

  // Maxima, exponentials and sums of every row of a split; the scores become weights.
  void softmax(int split) {
    const int base = split * kSplit;
    for (int t = 0; t < tile->tokens; t++) {
      const int begin = at_least(scratch.low[t] - base, 0), end = at_most(scratch.high[t] - base, kSplit);
      if (begin >= end) continue;
      for (int r = t * group; r < (t + 1) * group; r++)
        softmax_row(scratch.s + (int64_t)r * kScoreStride, begin, end, args.softcap, scratch.m + r, scratch.l + r);
    }
  }

  void accumulate(const Piece* pieces, int n, const Ahead* ahead) {
    const int first = pieces->first, last = pieces->last, position = pieces->position;
    const float* expanded[kRun];
    for (int p = 0; p < n; p++) expanded[p] = scratch.v + p * kBlock * dim;
    bool expand = pieces->v == nullptr;
    if (expand) {
      gather_v(*pieces);
      ahead = nullptr;
    } else if (sizeof(T) == 2 && (last - first) * group > kOutputRows) {
      expand = true;
      for (int p = 0; p < n; p++) widen_v(static_cast<const T*>(pieces[p].v), scratch.v + p * kBlock * dim);
    }
    const T* v[kRun];
    for (int p = 0; p < n; p++) v[p] = static_cast<const T*>(pieces[p].v);
    // Tokens that see all of the pieces go together; the others (the diagonal, a window's edge) one by one: each row touches
    // its own positions and no other, so what lies beyond them may be anything.
    for (int t = first; t < last;) {
      const int whole = n * kBlock;
      const Values values{n, at_least(scratch.low[t] - position, 0), at_most(scratch.high[t] - position, whole)};
      int after = t + 1;
      if (values.begin == 0 && values.end == whole)
        while (after < last && scratch.low[after] <= position && scratch.high[after] >= position + whole) after++;
      if (values.begin < values.end) {
        const float* s = scratch.s + (int64_t)t * group * kScoreStride + (position & (kSplit - 1));
        float* o = scratch.o + (int64_t)t * group * dim;
        const int rows = (after - t) * group;
        if (expand) outputs(rows, dim, values, s, expanded, o, ahead);
        else outputs(rows, dim, values, s, v, o, ahead);
        ahead = nullptr;
      }
      t = after;
    }
  }
  void widen_v(const uint16_t* v, float* to) const { expand_v(v, kBlock * dim, to); }
  void widen_v(const float*, float*) const {}

  // What is fetched while piece i of the list is used, the first time around (K) or the second (V).
  Ahead ahead_of(int i, bool values, int split) const {
    const int k_bytes = dim * page_size * (int)sizeof(T), v_bytes = dim * kBlock * (int)sizeof(T);
    int later = i + kAhead;
    if (later < num_pieces) {
      const Piece& piece = scratch.pieces[later];
      return values ? Ahead{static_cast<const char*>(piece.v), v_bytes} : Ahead{static_cast<const char*>(piece.k), k_bytes};
    }
    later -= num_pieces;
    if (!values) return {static_cast<const char*>(scratch.pieces[at_most(later, num_pieces - 1)].v), v_bytes};
    return {static_cast<const char*>(next_split_k((split + 1) * kSplit + later * kBlock)), k_bytes};
  }

  // o, m, l of one split for every row that has positions in it.
  void run_split(int split) {
    list_pieces(split);
    if (num_pieces == 0) return;
    Ahead ahead[kRun];
    for (int i = 0, n; i < num_pieces; i += n) {
      n = run_of(i);
      for (int p = 0; p < n; p++) ahead[p] = ahead_of(i + p, false, split);
      score(scratch.pieces + i, n, ahead);
    }
    softmax(split);
    int first = tile->tokens, last = 0;
    for (int i = 0; i < num_pieces; i++) {
      first = at_most(first, scratch.pieces[i].first);
      last = at_least(last, scratch.pieces[i].last);
    }
    clear(scratch.o + (int64_t)first * group * dim, (last - first) * group * dim);
    for (int i = 0, n; i < num_pieces; i += n) {
      n = run_of(i);
      for (int p = 0; p < n; p++) ahead[p] = ahead_of(i + p, true, split);
      accumulate(scratch.pieces + i, n, ahead);
    }
  }
  const void* next_split_k(int position) const {
    if (page_size < kBlock || position >= scratch.high[0]) return nullptr;
    return k_page(page_of(segments[0], position)) + (position & (page_size - 1));
  }

  float* out_row(int token, int g) const {
    int i = 0;
    while (scratch.segment[i + 1] <= token) i++;
    return args.out + (int64_t)(segments[i].token + token - scratch.segment[i]) * args.out_ld + ((int64_t)kv_head * group + g) * dim;
  }

  // All splits of the tile, merged as they come.
  void run_whole() {
    const int first = first_split();
    for (int split = first; split * kSplit < tile->length; split++) {
      run_split(split);
      for (int t = 0; t < tile->tokens; t++) {
        if (!sees(t, split * kSplit, (split + 1) * kSplit)) continue;
        const bool begins = scratch.low[t] / kSplit == split;
        for (int r = t * group; r < (t + 1) * group; r++)
          merge(begins, dim, scratch.all_o + (int64_t)r * dim, scratch.all_m + r, scratch.all_l + r, scratch.o + (int64_t)r * dim,
                scratch.m[r], scratch.l[r]);
      }
    }
    for (int t = 0; t < tile->tokens; t++)
      for (int g = 0; g < group; g++) {
        const int r = t * group + g;
        divide(dim, scratch.all_o + (int64_t)r * dim, scratch.all_l[r], out_row(t, g));
      }
  }

  // One split, its result left in the plan for the merge.
  void run_part(int split) {
    const int rows = tile->tokens * group;
    if (split < first_split()) return;
    run_split(split);
    float* to = part(split);
    for (int t = 0; t < tile->tokens; t++) {
      if (!sees(t, split * kSplit, (split + 1) * kSplit)) continue;
      for (int r = t * group; r < (t + 1) * group; r++) {
        to[r] = scratch.m[r];
        to[rows + r] = scratch.l[r];
        copy(scratch.o + (int64_t)r * dim, dim, to + 2 * rows + (int64_t)r * dim);
      }
    }
  }
  float* part(int split) const {
    return args.plan->view().partials + tile->partials +
           ((int64_t)kv_head * tile->splits + split) * partial_floats(tile->tokens * group, dim);
  }
  void merge_parts() {
    const int rows = tile->tokens * group;
    for (int t = 0; t < tile->tokens; t++) {
      const int first = scratch.low[t] / kSplit;
      for (int g = 0; g < group; g++) {
        const int r = t * group + g;
        for (int split = first; split * kSplit < scratch.high[t]; split++) {
          const float* from = part(split);
          merge(split == first, dim, scratch.all_o, scratch.all_m, scratch.all_l, from + 2 * rows + (int64_t)r * dim, from[r], from[rows + r]);
        }
        divide(dim, scratch.all_o, scratch.all_l[0], out_row(t, g));
      }
    }
  }

  void run(const AttentionItem& item) {
    const PlanView& plan = args.plan->view();
    open(plan.tiles[item.tile], item.kv_head);
    if (item.split < 0) {
      run_whole();
      return;
    }
    run_part(item.split);
    int32_t* pending = plan.pending + tile->pending + kv_head;
    if (__atomic_sub_fetch(pending, 1, __ATOMIC_ACQ_REL) == 0) {
      merge_parts();
      __atomic_store_n(pending, tile->splits, __ATOMIC_RELAXED);  // for the next layer, a barrier away
    }
  }
};

template <class T>
void run_items(const AttentionArgs& args, Spmd& spmd) {
  const PlanView& plan = args.plan->view();
  Scratch scratch;
  carve(args.shape, spmd.scratch, &scratch);
  Worker<T> worker(args, scratch);
  // Every thread draws one ticket too many, so a layer takes exactly num_items + threads and nobody has to reset the counter.
  uint32_t* base = plan.base + 16 * spmd.thread;
  for (;;) {
    const uint32_t ticket = __atomic_fetch_add(plan.ticket, 1u, __ATOMIC_RELAXED) - *base;
    if (ticket >= (uint32_t)plan.num_items) break;
    worker.run(plan.items[ticket]);
  }
  *base += (uint32_t)plan.num_items + (uint32_t)spmd.threads;
}

}  // namespace

void attention(const AttentionArgs& args, Spmd& spmd) {
  if (args.kv_type == KvType::kBf16) run_items<uint16_t>(args, spmd);
  else run_items<float>(args, spmd);
}

size_t attention_scratch_bytes(const AttentionShape& shape) {
  Scratch unused;
  return carve(shape, nullptr, &unused);
}

}  // namespace phloem::PHLOEM_NS
