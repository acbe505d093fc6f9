// Loops that do one thing as fast as the machine can (include/phloem_ceilings.h).
#pragma once

#include <cstdint>

#include "pool.h"
#include "variants.h"

namespace phloem {

// Each returns something that depends on all its work; the counts are of one thread.
PHLOEM_DECLARE(float, ceiling_read, (const char* memory, int64_t bytes, Spmd& spmd))
PHLOEM_DECLARE(float, ceiling_fma, (int64_t rounds, double* operations))
PHLOEM_DECLARE(float, ceiling_dot, (int64_t rounds, double* operations))

}  // namespace phloem
