// Panels of f32 and bf16, and plain rows of either, which are turned into f32 panels a block of k at a time.
//
//           k →                          acc[MR][3] in registers
//   x  [MR rows]  broadcast  ─┐
//                             ├─ fma     panel [k][3 vectors]: read once per tile of MR rows, from L2 after the first tile
//   w  [3 vectors] load ──────┘
//
// The block of k is a matter of caches alone: partial sums wait in `out` as the floats they are. While the tiles use one block
// from L1 the next comes from memory into L2, in several streams: more lines are on their way at a time than in one.
//
//     block in use  ████████████████████        next  █▒▒▒▒ █▒▒▒▒ █▒▒▒▒ █▒▒▒▒    a line of each for every 4 k of a tile
#include "linear.h"
#include "simd.h"

namespace phloem::PHLOEM_NS {
namespace {

constexpr int NV = 3, NR = NV * W;
constexpr int MR = W == 16 ? 8 : 4;       // 24 + 3 registers of 32, 12 + 3 of 16
constexpr int kBlockK = W == 16 ? 96 : 192;  // 18 KiB of f32: they stay in L1
constexpr int kRowsBlockK = 128;          // of plain rows: its transposed block stays in L1
constexpr int kAhead = 4096;              // bytes that a single tile prefetches ahead of itself

enum Source { kFloats, kPairs };

// What is fetched along: kLines lines for every 4 k, `stride` bytes apart; the next ones are `step` bytes further.
struct Fetch {
  const char* next;
  int64_t stride, step;
};

// sums (+)= x[M rows][kc] * panel[kc][NR].
template <int M, Source S, int kLines>
void tile(int kc, const float* x, int64_t x_ld, const char* panel, float* out, bool first, Fetch& fetch) {
  const char* next = fetch.next;
  vf acc[M][NV];
  PHLOEM_UNROLL for (int m = 0; m < M; m++)
    PHLOEM_UNROLL for (int v = 0; v < NV; v++) acc[m][v] = first ? zero() : load(out + m * NR + v * W);

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

// One block of k for all rows. What lies behind the block in memory (the next block, the next panel) is fetched while the tiles
// of this one run, evenly: otherwise the first tile of every block waits for DRAM (M = 32: 130 -> 160 GFLOP/s).
template <Source S>
void block(int kc, const float* x, int64_t x_ld, int rows, const char* panel, int64_t bytes, float* out, bool first, bool fetch) {
  constexpr int kOwn = S == kFloats ? NR * 4 * 4 / 64 : NR * 4 * 2 / 64;  // lines that 4 k take
  if (!fetch || rows <= MR) {
    Fetch ahead{panel + kAhead, 64, 64 * kOwn};
    for (int m = 0; m < rows; m += MR) {
      const int n = rows - m < MR ? rows - m : MR;
      if (fetch) tile_of<S, kOwn>(n, kc, x, x_ld, panel, out, first, ahead);
      else tile_of<S, 0>(n, kc, x + m * x_ld, x_ld, panel, out + m * NR, first, ahead);
    }
    return;
  }
  const int64_t lines = (bytes + 63) / 64, sixth = (lines + 5) / 6 * 64;
  if (rows <= 2 * MR) {  // halves, so that both have time to fetch
    Fetch next{panel + bytes, sixth, 64};
    const int half = (rows + 1) / 2;
    tile_of<S, 6>(half, kc, x, x_ld, panel, out, first, next);
    tile_of<S, 6>(rows - half, kc, x + half * x_ld, x_ld, panel, out + half * NR, first, next);
    return;
  }
  const int64_t times = (int64_t)(rows / MR) * (kc / 4) + 1, least = (lines + times - 1) / times;  // 1: a block of less than 4 k
  const int64_t streams = least > 4 ? 6 : least, stride = (lines + streams - 1) / streams * 64;
  Fetch next{panel + bytes, stride, 64};
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

// rows r0 .. of m, k0 .. k0 + kc, as a panel [kc][NR].
void transpose(const Matrix& m, int r0, int k0, int kc, float* out) {
  const int columns = m.n - r0 < NR ? m.n - r0 : NR;
  for (int c0 = 0; c0 < NR; c0 += W) {
    for (int k = 0; k < kc; k += W) {
      const int left = kc - k < W ? kc - k : W;
      vf t[W];
      PHLOEM_UNROLL for (int i = 0; i < W; i++) {
        if (c0 + i >= columns) {
          t[i] = zero();
          continue;
        }
        const char* row = m.data + (int64_t)(r0 + c0 + i) * m.row_bytes;
        if (m.kind == Kind::kF32) {
          const float* p = reinterpret_cast<const float*>(row) + k0 + k;
          t[i] = left == W ? load(p) : load_part(p, left);
        } else {
          const uint16_t* p = reinterpret_cast<const uint16_t*>(row) + k0 + k;
          if (left == W) {
            t[i] = load_bf16(p);
          } else {
            alignas(64) float part[W] = {};
            for (int j = 0; j < left; j++) part[j] = bf16_to_f(p[j]);
            t[i] = load(part);
          }
        }
      }
      transpose_square(t);
      PHLOEM_UNROLL for (int i = 0; i < W; i++)
        if (i < left) store(out + (int64_t)(k + i) * NR + c0, t[i]);
    }
  }
}

}  // namespace

void panel_float(const Matrix& m, int panel, const float* x, int64_t x_ld, int rows, const PanelOut& o) {
  if (m.row_bytes > 0) {
    for (int k = 0; k < m.k; k += kRowsBlockK) {
      const int kc = m.k - k < kRowsBlockK ? m.k - k : kRowsBlockK;
      transpose(m, panel * NR, k, kc, o.transposed);
      const char* block_data = reinterpret_cast<const char*>(o.transposed);
      block<kFloats>(kc, x + k, x_ld, rows, block_data, (int64_t)kc * NR * 4, o.out, k == 0, false);
    }
    return;
  }
  const char* data = m.data + panel * m.panel_bytes;
  const int64_t per_k = m.kind == Kind::kF32 ? NR * 4 : NR * 2;
  for (int k = 0; k < m.k; k += kBlockK) {
    const int kc = m.k - k < kBlockK ? m.k - k : kBlockK;
    if (m.kind == Kind::kF32) block<kFloats>(kc, x + k, x_ld, rows, data + k * per_k, kc * per_k, o.out, k == 0, true);
    else block<kPairs>(kc, x + k, x_ld, rows, data + k * per_k, kc * per_k, o.out, k == 0, true);
  }
}

}  // namespace phloem::PHLOEM_NS
