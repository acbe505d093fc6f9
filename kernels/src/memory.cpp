// See memory.h.
#include "memory.h"

#include <sys/mman.h>

namespace phloem {
namespace {

constexpr size_t kHuge = size_t{2} << 20;
constexpr size_t kChunk = size_t{64} << 20;

char* map(size_t size) {
  // One huge page more than asked for, so that an aligned run of `size` is in it; the ends go back.
  char* raw = static_cast<char*>(mmap(nullptr, size + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (raw == MAP_FAILED) return nullptr;
  const size_t head = (kHuge - reinterpret_cast<size_t>(raw) % kHuge) % kHuge;
  if (head > 0) munmap(raw, head);
  if (kHuge - head > 0) munmap(raw + head + size, kHuge - head);
#if defined(MADV_HUGEPAGE)
  madvise(raw + head, size, MADV_HUGEPAGE);  // advice: without it, or where refused, the same bytes more slowly
#endif
  return raw + head;
}

}  // namespace

Memory::~Memory() {
  for (const Chunk& chunk : chunks_) munmap(chunk.base, chunk.size);
}

void* Memory::allocate(size_t bytes) {
  bytes = (bytes + 63) & ~size_t{63};
  if (bytes == 0) bytes = 64;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (Chunk& chunk : chunks_)
    if (chunk.size - chunk.used >= bytes) {
      char* p = chunk.base + chunk.used;
      chunk.used += bytes;
      chunk.live++;
      return p;
    }
  const size_t size = bytes > kChunk ? (bytes + kHuge - 1) & ~(kHuge - 1) : kChunk;
  char* base = map(size);
  if (base == nullptr) return nullptr;
  chunks_.push_back({base, size, bytes, 1});
  return base;
}

void Memory::release(void* p) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < chunks_.size(); i++) {
    Chunk& chunk = chunks_[i];
    if (p < chunk.base || p >= chunk.base + chunk.size) continue;
    if (--chunk.live == 0) {
      munmap(chunk.base, chunk.size);
      chunks_.erase(chunks_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    return;
  }
}

}  // namespace phloem
