// Whole pages: copied and read without regard to what is in them. Knows nothing of heads or tokens.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pool.h"

namespace phloem {

struct PageCopyArgs {
  void* const* planes;   // K and V of every layer: [num_planes] bases of [num_pages + 1] pages
  int32_t num_planes;
  size_t page_bytes;     // of one page in one plane
  const int32_t* pairs;  // [num_pairs][2]: source, target. No source is a target (P4), so their order does not matter.
  int32_t num_pairs;
};

// All threads call it; the caller places a barrier after.
void copy_pages(const PageCopyArgs& args, Spmd& spmd);

}  // namespace phloem
