// Memory for weights and buffers: 2 MiB-aligned chunks that the system may back with huge pages (worth 10 % of a decode step).
//
//   chunk  [ matrix | matrix | free | matrix | free ]      64 MiB, or as long as one larger allocation
//
// Many matrices share a chunk, since rounding each to 2 MiB would waste more than the embedded model weighs. A chunk goes back
// to the system when its last matrix does. Any thread may call: Python's collector releases from wherever it runs.
#pragma once

#include <cstddef>
#include <mutex>
#include <vector>

namespace phloem {

class Memory {
 public:
  Memory() = default;
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  void* allocate(size_t bytes);  // 64-byte aligned, zeroed; null if there is none
  void release(void* p);         // null is fine
  // What is at p .. p + bytes goes back to the system, and the addresses stay: zero, and taken again when written.
  static size_t discard(void* p, size_t bytes);

 private:
  struct Block {
    size_t offset, size;
    bool free, fresh;  // fresh: never handed out, so still zero
  };
  struct Chunk {
    char* base;
    size_t size;
    std::vector<Block> blocks;  // ascending, without gaps
  };
  std::mutex mutex_;
  std::vector<Chunk> chunks_;
};

}  // namespace phloem
