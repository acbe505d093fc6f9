// C entries of phloem_linear.h, and the checks that the kernels rely on.
#include "linear_api.h"

#include <cstring>
#include <new>

#include "elementwise.h"
#include "phloem_linear.h"

using phloem::Kind;
using phloem::Matrix;
using phloem::Spmd;

namespace phloem {

int check_linear(phloem_context* context, const phloem_matrix* const* matrices, int num, bool gated, int* width) {
  if (num < 1 || num > kMaxParts || matrices == nullptr)
    return context->fail(PHLOEM_BAD_ARGUMENT, "a linear takes 1 to %d matrices, got %d", kMaxParts, num);
  *width = 0;
  for (int i = 0; i < num; i++) {
    if (matrices[i] == nullptr) return context->fail(PHLOEM_BAD_ARGUMENT, "matrix %d is NULL", i);
    if (matrices[i]->matrix.k != matrices[0]->matrix.k)
      return context->fail(PHLOEM_BAD_ARGUMENT, "matrix %d takes %d inputs, matrix 0 takes %d", i, matrices[i]->matrix.k, matrices[0]->matrix.k);
    *width += matrices[i]->matrix.n;
  }
  if (gated) {
    if (num != 2 || matrices[0]->matrix.n != matrices[1]->matrix.n)
      return context->fail(PHLOEM_BAD_ARGUMENT, "a gated linear takes two matrices, gate and up, of one shape");
    *width = matrices[0]->matrix.n;
  }
  return PHLOEM_OK;
}

void fill_linear(LinearArgs& args, const phloem_matrix* const* matrices, int num, bool gated) {
  args.k = matrices[0]->matrix.k;
  args.num_parts = num;
  args.gated = gated;
  args.quantise = false;
  for (int i = 0, column = 0; i < num; i++) {
    args.parts[i] = {matrices[i]->matrix, column};
    column += matrices[i]->matrix.n;
    args.quantise = args.quantise || quantised(matrices[i]->matrix.kind);
  }
}

}  // namespace phloem

namespace {

const char* kind_name(int kind) {
  static const char* const names[] = {"f32", "bf16", "q8_0", "q4_0", "q4_1", "f16"};
  return kind >= 0 && kind <= PHLOEM_F16 ? names[kind] : "unknown";
}

int check_source(phloem_context* context, int kind, int n, int k, const void* rows, int64_t row_bytes, phloem_matrix** out) {
  if (context == nullptr) return PHLOEM_BAD_ARGUMENT;
  if (out == nullptr || rows == nullptr) return context->fail(PHLOEM_BAD_ARGUMENT, "rows or the result is NULL");
  *out = nullptr;
  if (kind < 0 || kind > PHLOEM_F16) return context->fail(PHLOEM_BAD_ARGUMENT, "there is no matrix kind %d", kind);
  if (n < 1 || k < 1) return context->fail(PHLOEM_BAD_ARGUMENT, "a matrix of %d x %d has nothing in it", n, k);
  if (phloem::quantised(static_cast<Kind>(kind)) && k % 32 != 0)
    return context->fail(PHLOEM_BAD_ARGUMENT, "%s comes in blocks of 32, but a row has %d elements", kind_name(kind), k);
  const int64_t least = phloem::source_row_bytes(static_cast<Kind>(kind), k);
  if (row_bytes < least)
    return context->fail(PHLOEM_BAD_ARGUMENT, "a %s row of %d elements takes %lld bytes, the stride is %lld", kind_name(kind), k,
                         static_cast<long long>(least), static_cast<long long>(row_bytes));
  return PHLOEM_OK;
}

}  // namespace

extern "C" {

PHLOEM_API int phloem_matrix_empty(phloem_context* context, int kind, int n, int k, phloem_matrix** out) {
  const int64_t any_row = INT64_MAX;
  if (const int status = check_source(context, kind, n, k, out, any_row, out)) return status;
  Matrix m{static_cast<Kind>(kind) == Kind::kF16 ? Kind::kF32 : static_cast<Kind>(kind), n, k, nullptr, 0, 0, 0, 0};
  const int64_t bytes = PHLOEM_PICK(matrix_layout, context->variant)(m);
  char* data = static_cast<char*>(context->memory.allocate(static_cast<size_t>(bytes)));
  auto* matrix = new (std::nothrow) phloem_matrix{m, bytes};
  if (data == nullptr || matrix == nullptr) {
    context->memory.release(data);
    delete matrix;
    return context->fail(PHLOEM_NO_MEMORY, "no memory for a %d x %d matrix of %lld bytes", n, k, static_cast<long long>(bytes));
  }
  matrix->matrix.data = data;
  *out = matrix;
  return PHLOEM_OK;
}

PHLOEM_API int phloem_matrix_store(phloem_context* context, phloem_matrix* matrix, int kind, const void* rows, int64_t row_bytes) {
  if (context == nullptr) return PHLOEM_BAD_ARGUMENT;
  if (matrix == nullptr || matrix->bytes == 0)
    return context->fail(PHLOEM_BAD_ARGUMENT, "only a packed matrix can be stored to, not %s", matrix == nullptr ? "NULL" : "a shared one");
  phloem_matrix* unused = nullptr;
  if (const int status = check_source(context, kind, matrix->matrix.n, matrix->matrix.k, rows, row_bytes, &unused)) return status;
  const Kind source = static_cast<Kind>(kind), own = matrix->matrix.kind;
  if (source != own && (phloem::quantised(source) || phloem::quantised(own)))
    return context->fail(PHLOEM_BAD_ARGUMENT, "%s rows cannot be stored into a %s matrix", kind_name(kind), kind_name(static_cast<int>(own)));
  const auto pack = PHLOEM_PICK(matrix_pack, context->variant);
  return context->run([&](Spmd& spmd) {
    int begin, end;
    spmd.share(phloem::panels(matrix->matrix, matrix->matrix.width), 1, &begin, &end);
    pack(matrix->matrix, source, static_cast<const char*>(rows), row_bytes, begin, end);
  });
}

PHLOEM_API int phloem_matrix_copy(phloem_context* context, phloem_matrix* target, const phloem_matrix* source) {
  if (context == nullptr) return PHLOEM_BAD_ARGUMENT;
  if (target == nullptr || source == nullptr || target->bytes == 0 || target->bytes != source->bytes ||
      target->matrix.kind != source->matrix.kind || target->matrix.n != source->matrix.n || target->matrix.k != source->matrix.k)
    return context->fail(PHLOEM_BAD_ARGUMENT, "only packed matrices of one kind and shape can be copied");
  return context->run([&](Spmd& spmd) {
    const int64_t begin = target->bytes * spmd.thread / spmd.threads, end = target->bytes * (spmd.thread + 1) / spmd.threads;
    std::memcpy(const_cast<char*>(target->matrix.data) + begin, source->matrix.data + begin, static_cast<size_t>(end - begin));
  });
}

PHLOEM_API int64_t phloem_matrix_discard(phloem_context* context, phloem_matrix* matrix) {
  if (context == nullptr || matrix == nullptr || matrix->bytes == 0) return 0;
  return phloem_memory_discard(context, const_cast<char*>(matrix->matrix.data), matrix->bytes);
}

PHLOEM_API int phloem_gather(phloem_context* context, const int64_t* addresses, int64_t count, int bytes, void* out) {
  if (context == nullptr) return PHLOEM_BAD_ARGUMENT;
  if (count < 0 || (bytes != 2 && bytes != 4) || (count > 0 && (addresses == nullptr || out == nullptr)))
    return context->fail(PHLOEM_BAD_ARGUMENT, "gather: %lld elements of %d bytes; expected 2 or 4", static_cast<long long>(count), bytes);
  // Every read misses the caches: fetched ahead, two dozen wait at once instead of one after another. By the calling thread alone: to
  // wake another takes longer, and it may find its core in a trainer's hands.
  constexpr int64_t kAhead = 24;
  char* const to = static_cast<char*>(out);
  for (int64_t i = 0; i < count; i++) {
    if (i + kAhead < count) __builtin_prefetch(reinterpret_cast<const void*>(addresses[i + kAhead]));
    std::memcpy(to + i * bytes, reinterpret_cast<const void*>(addresses[i]), static_cast<size_t>(bytes));
  }
  return PHLOEM_OK;
}

PHLOEM_API int phloem_matrix_pack(phloem_context* context, int kind, int n, int k, const void* rows, int64_t row_bytes,
                                  phloem_matrix** out) {
  if (const int status = check_source(context, kind, n, k, rows, row_bytes, out)) return status;
  phloem_matrix* matrix = nullptr;
  int status = phloem_matrix_empty(context, kind, n, k, &matrix);
  if (status == PHLOEM_OK) status = phloem_matrix_store(context, matrix, kind, rows, row_bytes);
  if (status != PHLOEM_OK) {
    phloem_matrix_destroy(context, matrix);
    return status;
  }
  *out = matrix;
  return PHLOEM_OK;
}

PHLOEM_API int phloem_matrix_share(phloem_context* context, int kind, int n, int k, const void* rows, int64_t row_bytes,
                                   phloem_matrix** out) {
  if (const int status = check_source(context, kind, n, k, rows, row_bytes, out)) return status;
  if (kind != PHLOEM_F32 && kind != PHLOEM_BF16)
    return context->fail(PHLOEM_BAD_ARGUMENT, "only f32 and bf16 rows can be shared, not %s: pack it", kind_name(kind));
  auto* matrix = new (std::nothrow) phloem_matrix{
      Matrix{static_cast<Kind>(kind), n, k, static_cast<const char*>(rows), row_bytes, PHLOEM_PICK(panel_width, context->variant)(), 0, 0}, 0};
  if (matrix == nullptr) return context->fail(PHLOEM_NO_MEMORY, "no memory for a matrix");
  *out = matrix;
  return PHLOEM_OK;
}

PHLOEM_API void phloem_matrix_destroy(phloem_context* context, phloem_matrix* matrix) {
  if (context == nullptr || matrix == nullptr) return;
  if (matrix->bytes > 0) context->memory.release(const_cast<char*>(matrix->matrix.data));
  delete matrix;
}

PHLOEM_API int64_t phloem_matrix_bytes(const phloem_matrix* matrix) { return matrix == nullptr ? 0 : matrix->bytes; }

PHLOEM_API int phloem_linear(phloem_context* context, const phloem_matrix* const* matrices, int num_matrices, int gated, const float* x,
                             int64_t x_ld, int rows, const float* bias, const float* residual, int64_t residual_ld, float* y,
                             int64_t y_ld) {
  if (context == nullptr) return PHLOEM_BAD_ARGUMENT;
  int width;
  if (const int status = phloem::check_linear(context, matrices, num_matrices, gated != 0, &width)) return status;
  if (x == nullptr || y == nullptr) return context->fail(PHLOEM_BAD_ARGUMENT, "x or y is NULL");
  if (gated != 0 && (bias != nullptr || residual != nullptr))
    return context->fail(PHLOEM_BAD_ARGUMENT, "a gated linear has no bias and no residual");
  if (rows < 0 || x_ld < matrices[0]->matrix.k || y_ld < width || (residual != nullptr && residual_ld < width))
    return context->fail(PHLOEM_BAD_ARGUMENT, "rows %d, strides %lld, %lld, %lld do not hold %d inputs and %d outputs", rows,
                         static_cast<long long>(x_ld), static_cast<long long>(y_ld), static_cast<long long>(residual_ld),
                         matrices[0]->matrix.k, width);
  if (rows == 0) return PHLOEM_OK;
  phloem::LinearArgs args{};
  phloem::fill_linear(args, matrices, num_matrices, gated != 0);
  args.x = x;
  args.x_ld = x_ld;
  args.rows = rows;
  args.y = y;
  args.y_ld = y_ld;
  args.bias = bias;
  args.residual = residual;
  args.residual_ld = residual_ld;
  if (args.quantise) {
    const int64_t bytes = PHLOEM_PICK(quant_rows_bytes, context->variant)(rows, args.k);
    if (bytes > context->quants_bytes) {
      context->memory.release(context->quants);
      context->quants = static_cast<char*>(context->memory.allocate(static_cast<size_t>(bytes)));
      context->quants_bytes = context->quants != nullptr ? bytes : 0;
    }
    if (context->quants == nullptr) return context->fail(PHLOEM_NO_MEMORY, "no memory to quantise %d rows of %d", rows, args.k);
    PHLOEM_PICK(quant_rows_at, context->variant)(args.quant, context->quants, rows, args.k, args.parts, args.num_parts);
  }
  const auto run = PHLOEM_PICK(linear_run, context->variant);
  return context->run([&](Spmd& spmd) { run(args, spmd); });
}

PHLOEM_API int phloem_embed(phloem_context* context, const phloem_matrix* table, const int32_t* ids, int rows, float* y, int64_t y_ld) {
  if (context == nullptr) return PHLOEM_BAD_ARGUMENT;
  if (table == nullptr || ids == nullptr || y == nullptr || rows < 0 || y_ld < table->matrix.k)
    return context->fail(PHLOEM_BAD_ARGUMENT, "embed: a NULL pointer, %d rows, or a stride below the width", rows);
  for (int i = 0; i < rows; i++)
    if (ids[i] < 0 || ids[i] >= table->matrix.n)
      return context->fail(PHLOEM_BAD_ARGUMENT, "token id %d is outside the table of %d", ids[i], table->matrix.n);
  const auto run = PHLOEM_PICK(embed_rows, context->variant);
  return context->run([&](Spmd& spmd) { run(table->matrix, ids, rows, y, y_ld, spmd); });
}

PHLOEM_API int phloem_rms_norm(phloem_context* context, const float* x, int64_t x_ld, const float* weight, float eps, int rows, int n,
                               float* y, int64_t y_ld) {
  if (context == nullptr) return PHLOEM_BAD_ARGUMENT;
  if (x == nullptr || weight == nullptr || y == nullptr || rows < 0 || n < 1 || x_ld < n || y_ld < n)
    return context->fail(PHLOEM_BAD_ARGUMENT, "rms_norm: a NULL pointer, %d rows of %d, or a stride below the width", rows, n);
  const auto run = PHLOEM_PICK(rms_norm_rows, context->variant);
  return context->run([&](Spmd& spmd) { run(x, x_ld, weight, eps, rows, n, y, y_ld, spmd); });
}

}  // extern "C"
