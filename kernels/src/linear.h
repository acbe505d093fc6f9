// y = x W^T and what is fused to it. One order of k per output element, whatever M, the tile, the chunk or the thread (B1).
//
//   f32, bf16   part = fma(x[k], w[k], part) for each block of kSumK k, from 0; sum = sum + part for blocks 0, 1, ...
//   q8_0, q4_*  x is quantised to int8 per 32 (scale = max|x| / 127); block sums are exact integers;
//               sum = fma(block sum, scale_x * scale_w, sum) for blocks 0, 1, ...   (q4_1: then + minimum * sum of x's block)
//   epilogue    (sum + bias) + residual, or silu(gate sum) * up sum
#pragma once

#include <cstddef>
#include <cstdint>

#include "matrix.h"
#include "pool.h"
#include "variants.h"

namespace phloem {

// Room for x quantised: [max rows] of int8 and int16, scales and sums per block of 32. Made by quant_rows_bytes / quant_rows_at.
struct QuantRows {
  int8_t* q8;       // [rows][k]; null if no weight wants it
  int16_t* q16;     // [rows][k]; null if no weight wants it
  float* scale;     // [rows][blocks]
  int32_t* sum;     // [rows][blocks]: of the quants
  float* scaled;    // [rows][blocks]: scale * sum
  int32_t k, blocks;
};

struct LinearPart {
  Matrix matrix;
  int32_t column;   // first column of y that it fills
};

constexpr int kMaxParts = 8;

struct LinearArgs {
  const float* x;
  int64_t x_ld;
  int32_t rows;
  int32_t k;
  float* y;
  int64_t y_ld;
  const float* bias;        // [columns of y] or null
  const float* residual;    // rows of y's width, may be y itself; or null
  int64_t residual_ld;
  // gated: parts[0] is the gate, parts[1] the up matrix, both [width, k]; y = silu(gate) * up. No bias, no residual.
  int32_t num_parts;
  bool gated;
  bool quantise;            // some part is quantised: quant is filled from x first
  LinearPart parts[kMaxParts];
  QuantRows quant;
};

// Length of a chain over k of f32 and bf16 weights: part of the bits, whatever the variant.
constexpr int kSumK = 96;
// Rows per pass over the weights: as many as keep their part of x in L2 beside a panel.
constexpr int kBlockRows = 64;
// Bytes of Spmd::scratch that linear_run needs.
constexpr size_t kLinearScratch = size_t{96} << 10;

// Bytes of a QuantRows for `rows` rows of k, and the struct laid over such memory (64-byte aligned).
PHLOEM_DECLARE(int64_t, quant_rows_bytes, (int rows, int k))
PHLOEM_DECLARE(void, quant_rows_at, (QuantRows& q, char* memory, int rows, int k, const LinearPart* parts, int num_parts))
// Blocks [begin, end) of x, quantised; they count through the rows, q.blocks a row.
PHLOEM_DECLARE(void, quantise_blocks, (const QuantRows& q, const float* x, int64_t x_ld, int begin, int end))

// All threads; a barrier inside if it quantises. The caller places one before (x is ready) and after (y is).
PHLOEM_DECLARE(void, linear_run, (const LinearArgs& args, Spmd& spmd))

// One panel of one matrix for rows [0, rows) of x: raw sums to out[rows][panel_width]. Internal to linear*.cpp.
struct PanelOut {
  float* out;
  float* transposed;        // scratch for plain rows, [kSumK][panel_width]
  bool cold;                // nobody fetched this panel ahead: the first of a thread
};
PHLOEM_DECLARE(void, panel_float, (const Matrix& m, int panel, const float* x, int64_t x_ld, int rows, const PanelOut& o))
PHLOEM_DECLARE(void, panel_quant, (const Matrix& m, int panel, const QuantRows& q, int row, int rows, float* out))

}  // namespace phloem
