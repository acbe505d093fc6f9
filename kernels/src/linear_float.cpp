// Panels of f32 and bf16, and plain rows of either, which are turned into f32 panels a block of k at a time.
// Plain rows of 48 outputs lie on end in memory as a panel does: while one is computed with, the next comes into L2 as it lies.
//
//           k →                          acc[MR][3] in registers
//   x  [MR rows]  broadcast  ─┐
//                             ├─ fma     panel [k][3 vectors]: read once per tile of MR rows, from L2 after the first tile
//   w  [3 vectors] load ──────┘
//
// A block of k is summed from zero and then added to `out`: sixteen short chains err less than one of 1536 (rms 7.0e-7 of the
// result -> 1.9e-7). So its length is part of the bits, one for all variants. While the tiles use one block from L1 the next comes
// from memory into L2, in several streams: more lines are on their way at a time than in one.
//
//     block in use  ████████████████████        next  █▒▒▒▒ █▒▒▒▒ █▒▒▒▒ █▒▒▒▒    a line of each for every 4 k of a tile
#include "linear.h"
#include "simd.h"

namespace phloem::PHLOEM_NS {
namespace {

constexpr int NV = 3, NR = NV * W;
constexpr int MR = W == 16 ? 8 : 4;       // 24 + 3 registers of 32, 12 + 3 of 16
static_assert(kSumK * NR * 4 <= 18 << 10, "a block of a panel stays in L1");
constexpr int kAhead = 4096;              // bytes that a single tile prefetches ahead of itself

enum Source { kFloats, kPairs };

// What is fetched along: kLines lines for every 4 k, `stride` bytes apart; the next ones are `step` bytes further.
struct Fetch {
  const char* next;
  int64_t stride, step;
};

// out (+)= x[M rows][kc] * panel[kc][NR], summed from zero.
template <int M, Source S, int kLines>
void tile(int kc, const float* x, int64_t x_ld, const char* panel, float* out, bool first, Fetch& fetch) {
  const char* next = fetch.next;
  vf acc[M][NV];
  PHLOEM_UNROLL for (int m = 0; m < M; m++)
    PHLOEM_UNROLL for (int v = 0; v < NV; v++) acc[m][v] = zero();

  const auto step = [&](int k, const vf* w) __attribute__((always_inline)) {
    PHLOEM_UNROLL for (int m = 0; m < M; m++) {
      const vf a = set1(x[m * x_ld + k]);
      PHLOEM_UNROLL for (int v = 0; v < NV; v++) acc[m][v] = fma(a, w[v], acc[m][v]);
    }
  };
  const auto one = [&](int k) __attribute__((always_inline)) {  // f32: k; bf16: k and k + 1
    vf w[NV];
    if (S == kFloats) {
      const float* p = reinterpret_cast<const float*>(panel) + (int64_t)k * NR;
      PHLOEM_UNROLL for (int v = 0; v < NV; v++) w[v] = load(p + v * W);
      step(k, w);
    } else {
      const int32_t* p = reinterpret_cast<const int32_t*>(panel) + (int64_t)(k / 2) * NR;
      vi pair[NV];
      PHLOEM_UNROLL for (int v = 0; v < NV; v++) pair[v] = load_i(p + v * W);
      PHLOEM_UNROLL for (int v = 0; v < NV; v++) w[v] = pair_even(pair[v]);
      step(k, w);
      PHLOEM_UNROLL for (int v = 0; v < NV; v++) w[v] = pair_odd(pair[v]);
      step(k + 1, w);
    }
  };
  constexpr int kStep = S == kFloats ? 1 : 2;
  int k = 0;
  for (; k + 4 <= kc; k += 4) {
    PHLOEM_UNROLL for (int i = 0; i < 4; i += kStep) one(k + i);
    PHLOEM_UNROLL for (int i = 0; i < kLines; i++) prefetch_l2(next + fetch.stride * i);
    if (kLines > 0) next += fetch.step;
  }
  for (; k + kStep <= kc; k += kStep) one(k);
  if (S == kPairs && k < kc) {  // an odd k is last: its pair's other half is padding, x has no such element
    const int32_t* p = reinterpret_cast<const int32_t*>(panel) + (int64_t)(k / 2) * NR;
    vf w[NV];
    PHLOEM_UNROLL for (int v = 0; v < NV; v++) w[v] = pair_even(load_i(p + v * W));
    step(k, w);
  }
  if (!first)
    PHLOEM_UNROLL for (int m = 0; m < M; m++)
      PHLOEM_UNROLL for (int v = 0; v < NV; v++) acc[m][v] = load(out + m * NR + v * W) + acc[m][v];
  PHLOEM_UNROLL for (int m = 0; m < M; m++)
    PHLOEM_UNROLL for (int v = 0; v < NV; v++) store(out + m * NR + v * W, acc[m][v]);
  fetch.next = next;
}

// A tile of 1 to MR rows. Each (rows, kLines) is code of its own, so only those that pay exist: kOwn or none.
template <Source S, int kLines>
void tile_of(int rows, int kc, const float* x, int64_t x_ld, const char* panel, float* out, bool first, Fetch& fetch) {
  switch (rows) {
    case 1: return tile<1, S, kLines>(kc, x, x_ld, panel, out, first, fetch);
    case 2: return tile<2, S, kLines>(kc, x, x_ld, panel, out, first, fetch);
    case 3: return tile<3, S, kLines>(kc, x, x_ld, panel, out, first, fetch);
    case 4: return tile<4, S, kLines>(kc, x, x_ld, panel, out, first, fetch);
#if defined(PHLOEM_AVX512)
    case 5: return tile<5, S, kLines>(kc, x, x_ld, panel, out, first, fetch);
    case 6: return tile<6, S, kLines>(kc, x, x_ld, panel, out, first, fetch);
    case 7: return tile<7, S, kLines>(kc, x, x_ld, panel, out, first, fetch);
    case 8: return tile<8, S, kLines>(kc, x, x_ld, panel, out, first, fetch);
#endif
    default: return;
  }
}

// One block of k for all rows. `ahead`: `bytes` that will be wanted next (the next block, the next panel); they are fetched while
// the tiles of this one run, evenly: otherwise the first tile of every block waits for DRAM (M = 32: 130 -> 160 GFLOP/s).
template <Source S>
void block(int kc, const float* x, int64_t x_ld, int rows, const char* panel, const char* ahead, int64_t bytes, float* out, bool first) {
  constexpr int kOwn = S == kFloats ? NR * 4 * 4 / 64 : NR * 4 * 2 / 64;  // lines that 4 k take
  if (rows <= MR) {
    Fetch own{ahead, 64, 64 * kOwn};
    tile_of<S, kOwn>(rows, kc, x, x_ld, panel, out, first, own);
    return;
  }
  const int64_t lines = (bytes + 63) / 64, sixth = (lines + 5) / 6 * 64;
  if (rows <= 2 * MR) {  // halves, so that both have time to fetch
    Fetch next{ahead, sixth, 64};
    const int half = (rows + 1) / 2;
    tile_of<S, 6>(half, kc, x, x_ld, panel, out, first, next);
    tile_of<S, 6>(rows - half, kc, x + half * x_ld, x_ld, panel, out + half * NR, first, next);
    return;
  }
  const int64_t times = (int64_t)(rows / MR) * (kc / 4) + 1, least = (lines + times - 1) / times;  // 1: a block of less than 4 k
  const int64_t streams = least > 4 ? 6 : least, stride = (lines + streams - 1) / streams * 64;
  Fetch next{ahead, stride, 64};
  const char* const end = next.next + stride;
  for (int m = 0; m < rows; m += MR) {
    const int n = rows - m < MR ? rows - m : MR;
    const float* a = x + m * x_ld;
    float* o = out + m * NR;
    if (next.next >= end || n < MR) tile_of<S, 0>(n, kc, a, x_ld, panel, o, first, next);
    else if (streams == 1) tile<MR, S, 1>(kc, a, x_ld, panel, o, first, next);
    else if (streams == 2) tile<MR, S, 2>(kc, a, x_ld, panel, o, first, next);
    else if (streams == 3) tile<MR, S, 3>(kc, a, x_ld, panel, o, first, next);
    else if (streams == 4) tile<MR, S, 4>(kc, a, x_ld, panel, o, first, next);
    else tile<MR, S, 6>(kc, a, x_ld, panel, o, first, next);
  }
}

PHLOEM_INLINE vf load_weights(const float* p) { return load(p); }
PHLOEM_INLINE vf load_weights(const uint16_t* p) { return load_bf16(p); }

// W rows of `squares` * W elements, W columns of a panel each. Straight code on registers: a branch for every row of a square makes
// GCC 12 keep it in memory, which takes longer than the shuffles.
template <class T>
void transpose_squares(const char* rows, int64_t row_bytes, int squares, float* out, int64_t ahead) {
  for (int s = 0; s < squares; s++, rows += W * sizeof(T), out += (int64_t)W * NR) {
    if (ahead > 0)
      PHLOEM_UNROLL for (int i = 0; i < W; i++) prefetch_l2(rows + i * row_bytes + ahead);
    vf t[W];
    PHLOEM_UNROLL for (int i = 0; i < W; i++) t[i] = load_weights(reinterpret_cast<const T*>(rows + i * row_bytes));
    transpose_square(t);
    PHLOEM_UNROLL for (int i = 0; i < W; i++) store(out + i * NR, t[i]);
  }
}

// What is no whole square: `columns` of W rows (the rest are zeros), `left` of W elements.
template <class T>
void transpose_rest(const char* rows, int64_t row_bytes, int columns, int left, float* out) {
  for (int i = 0; i < W; i++)
    for (int k = 0; k < left; k++) {
      const T* row = reinterpret_cast<const T*>(rows + i * row_bytes);
      out[(int64_t)k * NR + i] = i >= columns ? 0.0f : sizeof(T) == 4 ? static_cast<float>(row[k]) : bf16_to_f(static_cast<uint16_t>(row[k]));
    }
}

// Rows r0 .. of m, k0 .. k0 + kc, as a panel [kc][NR]. ahead: bytes further along each row that are fetched on the way, or 0.
template <class T>
void transpose(const Matrix& m, int r0, int k0, int kc, float* out, int64_t ahead) {
  for (int c = 0; c < NR; c += W) {
    const char* rows = m.data + (r0 + c) * m.row_bytes + k0 * (int64_t)sizeof(T);
    const int there = m.n - r0 - c, columns = there < 0 ? 0 : there < W ? there : W;
    int k = 0;
    if (columns == W) {
      transpose_squares<T>(rows, m.row_bytes, kc / W, out + c, ahead);
      k = kc / W * W;
    }
    for (; k < kc; k += W)
      transpose_rest<T>(rows + k * (int64_t)sizeof(T), m.row_bytes, columns, kc - k < W ? kc - k : W, out + (int64_t)k * NR + c);
  }
}

}  // namespace

void panel_float(const Matrix& m, int panel, const float* x, int64_t x_ld, int rows, const PanelOut& o) {
  const bool floats = m.kind == Kind::kF32;
  if (m.row_bytes > 0) {
    // As much of the next panel as this block is of this one, in whatever order: it is all wanted, and L2 holds it.
    const char* ahead = m.data + (int64_t)(panel + 1) * NR * m.row_bytes;
    for (int k = 0; k < m.k; k += kSumK) {
      const int kc = m.k - k < kSumK ? m.k - k : kSumK;
      const int64_t bytes = (int64_t)kc * NR * (floats ? 4 : 2), further = o.cold && k + kc < m.k ? kSumK * (floats ? 4 : 2) : 0;
      if (floats) transpose<float>(m, panel * NR, k, kc, o.transposed, further);
      else transpose<uint16_t>(m, panel * NR, k, kc, o.transposed, further);
      block<kFloats>(kc, x + k, x_ld, rows, reinterpret_cast<const char*>(o.transposed), ahead, bytes, o.out, k == 0);
      ahead += bytes;
    }
    return;
  }
  const char* data = m.data + panel * m.panel_bytes;
  const int64_t per_k = floats ? NR * 4 : NR * 2;
  for (int k = 0; k < m.k; k += kSumK) {
    const int kc = m.k - k < kSumK ? m.k - k : kSumK;
    const int64_t bytes = kc * per_k;
    const char *at = data + k * per_k, *ahead = at + (rows <= MR ? kAhead : bytes);
    if (floats) block<kFloats>(kc, x + k, x_ld, rows, at, ahead, bytes, o.out, k == 0);
    else block<kPairs>(kc, x + k, x_ld, rows, at, ahead, bytes, o.out, k == 0);
  }
}

}  // namespace phloem::PHLOEM_NS
