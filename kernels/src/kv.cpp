// See kv.h.
#include "kv.h"

#include <cstring>

namespace phloem {

void copy_pages(const PageCopyArgs& args, Spmd& spmd) {
  const int64_t n = (int64_t)args.num_planes * args.num_pairs;
  const int64_t begin = n * spmd.thread / spmd.threads, end = n * (spmd.thread + 1) / spmd.threads;
  for (int64_t i = begin; i < end; i++) {
    char* plane = static_cast<char*>(args.planes[i / args.num_pairs]);
    const int32_t* pair = args.pairs + 2 * (i % args.num_pairs);
    if (pair[0] != pair[1])
      std::memcpy(plane + args.page_bytes * (size_t)pair[1], plane + args.page_bytes * (size_t)pair[0], args.page_bytes);
  }
}

}  // namespace phloem
