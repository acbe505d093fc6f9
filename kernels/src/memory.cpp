// See memory.h.
#include "memory.h"

#include <cstring>

#include <sys/mman.h>
#include <unistd.h>

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
  for (size_t attempt = 0; attempt < 2; attempt++) {
    for (Chunk& chunk : chunks_)
      for (size_t i = 0; i < chunk.blocks.size(); i++) {
        Block& block = chunk.blocks[i];
        if (!block.free || block.size < bytes) continue;
        char* p = chunk.base + block.offset;
        if (!block.fresh) std::memset(p, 0, bytes);
        const Block rest{block.offset + bytes, block.size - bytes, true, block.fresh};
        block = {block.offset, bytes, false, false};
        if (rest.size > 0) chunk.blocks.insert(chunk.blocks.begin() + static_cast<std::ptrdiff_t>(i) + 1, rest);
        return p;
      }
    if (attempt > 0) break;
    const size_t size = bytes > kChunk ? (bytes + kHuge - 1) & ~(kHuge - 1) : kChunk;
    char* base = map(size);
    if (base == nullptr) return nullptr;
    chunks_.push_back({base, size, {{0, size, true, true}}});
  }
  return nullptr;
}

void Memory::release(void* p) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t c = 0; c < chunks_.size(); c++) {
    Chunk& chunk = chunks_[c];
    if (p < chunk.base || p >= chunk.base + chunk.size) continue;
    std::vector<Block>& blocks = chunk.blocks;
    for (size_t i = 0; i < blocks.size(); i++) {
      if (chunk.base + blocks[i].offset != p) continue;
      blocks[i].free = true;
      // One free block of neighbours: fresh only if all of it is.
      const size_t first = i > 0 && blocks[i - 1].free ? i - 1 : i;
      const size_t last = i + 1 < blocks.size() && blocks[i + 1].free ? i + 1 : i;
      blocks[first].size = blocks[last].offset + blocks[last].size - blocks[first].offset;
      blocks[first].fresh = false;
      blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(first) + 1, blocks.begin() + static_cast<std::ptrdiff_t>(last) + 1);
      break;
    }
    if (blocks.size() == 1 && blocks[0].free) {
      munmap(chunk.base, chunk.size);
      chunks_.erase(chunks_.begin() + static_cast<std::ptrdiff_t>(c));
    }
    return;
  }
}

size_t Memory::discard(void* p, size_t bytes) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  char* const begin = static_cast<char*>(p);
  char* const end = begin + bytes;
  char* const first = reinterpret_cast<char*>((reinterpret_cast<size_t>(begin) + page - 1) / page * page);
  char* const last = reinterpret_cast<char*>(reinterpret_cast<size_t>(end) / page * page);
  if (first >= last || madvise(first, static_cast<size_t>(last - first), MADV_DONTNEED) != 0) {
    std::memset(begin, 0, bytes);
    return 0;
  }
  std::memset(begin, 0, static_cast<size_t>(first - begin));
  std::memset(last, 0, static_cast<size_t>(end - last));
  return static_cast<size_t>(last - first);
}

}  // namespace phloem
