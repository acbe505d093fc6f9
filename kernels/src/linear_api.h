// What a phloem_matrix holds, and how a linear over several of them is checked and filled in; shared with program.cpp.
#pragma once

#include "context.h"
#include "linear.h"
#include "phloem_linear.h"

struct phloem_matrix {
  phloem::Matrix matrix;
  int64_t bytes;  // of ours; 0: someone else's
};

namespace phloem {

// PHLOEM_OK and the width of y, or a status with its message in the context.
int check_linear(phloem_context* context, const phloem_matrix* const* matrices, int num, bool gated, int* width);
// Everything but x, y, rows, bias, residual and quant.
void fill_linear(LinearArgs& args, const phloem_matrix* const* matrices, int num, bool gated);

}  // namespace phloem
