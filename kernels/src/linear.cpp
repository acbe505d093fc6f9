// Who computes which panels, and what happens to a panel's sums: see linear.h.
#include "linear.h"
#include "simd.h"

namespace phloem::PHLOEM_NS {
namespace {

constexpr int NR = 3 * W;

vf silu(vf x) { return x / (set1(1.0f) + exp(zero() - x)); }

// Columns [column, column + count) of rows [row, row + rows) of y, from sums[rows][NR].
void finish(const LinearArgs& a, int row, int rows, int64_t column, int count, const float* sums) {
  for (int m = 0; m < rows; m++) {
    float* y = a.y + (row + m) * a.y_ld + column;
    const float* residual = a.residual == nullptr ? nullptr : a.residual + (row + m) * a.residual_ld + column;
    const float* s = sums + m * NR;
    for (int c = 0; c < count; c += W) {
      const int n = count - c < W ? count - c : W;
      vf v = load(s + c);
      if (n == W) {
        if (a.bias != nullptr) v = v + load(a.bias + column + c);
        if (residual != nullptr) v = v + load(residual + c);
        store(y + c, v);
      } else {
        if (a.bias != nullptr) v = v + load_part(a.bias + column + c, n);
        if (residual != nullptr) v = v + load_part(residual + c, n);
        store_part(y + c, v, n);
      }
    }
  }
}

void finish_gated(const LinearArgs& a, int row, int rows, int64_t column, int count, const float* gate, const float* up) {
  for (int m = 0; m < rows; m++) {
    float* y = a.y + (row + m) * a.y_ld + column;
    for (int c = 0; c < count; c += W) {
      const vf v = silu(load(gate + m * NR + c)) * load(up + m * NR + c);
      if (count - c >= W) store(y + c, v);
      else store_part(y + c, v, count - c);
    }
  }
}

void panel_sums(const LinearArgs& a, const Matrix& m, int panel, int row, int rows, float* out, float* transposed, bool cold) {
  if (quantised(m.kind)) panel_quant(m, panel, a.quant, row, rows, out);
  else panel_float(m, panel, a.x + row * a.x_ld, a.x_ld, rows, PanelOut{out, transposed, cold});
}

}  // namespace

void linear_run(const LinearArgs& a, Spmd& spmd) {
  if (a.quantise) {
    int begin, end;
    spmd.share(a.rows * a.quant.blocks, 1, &begin, &end);
    quantise_blocks(a.quant, a.x, a.x_ld, begin, end);
    spmd.barrier();
  }
  float* const sums = reinterpret_cast<float*>(spmd.scratch);
  float* const sums2 = sums + kBlockRows * NR;
  float* const transposed = sums2 + kBlockRows * NR;
  static_assert((2 * kBlockRows + kSumK) * NR * sizeof(float) <= kLinearScratch, "the scratch holds two blocks and a panel");

  int num_panels = 0;
  const int parts = a.gated ? 1 : a.num_parts;
  for (int i = 0; i < parts; i++) num_panels += panels(a.parts[i].matrix, NR);
  const int blocks = (a.rows + kBlockRows - 1) / kBlockRows;
  // Threads share out the panels, each streaming its own through all rows; with few panels a thread also the blocks of rows.
  const bool few = num_panels < 4 * spmd.threads;
  int begin, end;
  spmd.share(few ? num_panels * blocks : num_panels, 1, &begin, &end);
  for (int b = 0; b < blocks; b++) {
    const int first = few ? begin - b * num_panels : begin;
    const int last = few ? end - b * num_panels : end;
    const int row = b * kBlockRows, rows = a.rows - row < kBlockRows ? a.rows - row : kBlockRows;
    for (int i = 0, base = 0; i < parts; i++) {
      const LinearPart& part = a.parts[i];
      const int n = panels(part.matrix, NR);
      for (int p = first - base > 0 ? first - base : 0; p < n && p < last - base; p++) {
        const int count = part.matrix.n - p * NR < NR ? part.matrix.n - p * NR : NR;
        const bool cold = p == 0 || p + base == first;
        panel_sums(a, part.matrix, p, row, rows, sums, transposed, cold);
        if (a.gated) {
          panel_sums(a, a.parts[1].matrix, p, row, rows, sums2, transposed, cold);
          finish_gated(a, row, rows, p * NR, count, sums, sums2);
        } else {
          finish(a, row, rows, part.column + p * NR, count, sums);
        }
      }
      base += n;
    }
  }
}

}  // namespace phloem::PHLOEM_NS
