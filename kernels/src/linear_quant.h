// How a variant multiplies quantised blocks: the orders that packing and kernel must agree on.
#pragma once

#include "simd.h"

#if defined(__AVX512VNNI__)
#define PHLOEM_VNNI 1
#endif

namespace phloem::PHLOEM_NS {

#if defined(PHLOEM_VNNI)
constexpr int kQ8Group = 4;       // consecutive k side by side in a column
constexpr int kQ8Offset = 0x80;   // quants are stored as q + 128, unsigned
#else
constexpr int kQ8Group = 2;
constexpr int kQ8Offset = 0;
#endif
#if defined(PHLOEM_GENERIC)
constexpr int kQ4Group = 2;       // no unsigned x signed byte product: nibbles are widened to int16
#else
constexpr int kQ4Group = 4;
#endif

}  // namespace phloem::PHLOEM_NS
