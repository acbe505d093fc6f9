#include <vector>

#include "memory.h"
#include "test.h"

TEST(memory_is_aligned_zeroed_and_never_shared) {
  phloem::Memory memory;
  phloem_test::Random random(1);
  struct Piece { unsigned char* p; size_t size; unsigned char mark; };
  std::vector<Piece> live;
  for (int step = 0; step < 2000; step++) {
    if (!live.empty() && random.below(2) == 0) {
      const size_t i = static_cast<size_t>(random.below(static_cast<int>(live.size())));
      bool intact = true;
      for (size_t j = 0; j < live[i].size; j++) intact = intact && live[i].p[j] == live[i].mark;
      CHECK(intact);
      memory.release(live[i].p);
      live.erase(live.begin() + static_cast<std::ptrdiff_t>(i));
    } else {
      const size_t size = static_cast<size_t>(random.below(40000));
      auto* p = static_cast<unsigned char*>(memory.allocate(size));
      CHECK(p != nullptr && reinterpret_cast<uintptr_t>(p) % 64 == 0);
      bool zero = true;
      for (size_t j = 0; j < size; j++) zero = zero && p[j] == 0;
      CHECK(zero);
      const auto mark = static_cast<unsigned char>(1 + random.below(255));
      std::memset(p, mark, size);
      live.push_back({p, size, mark});
    }
  }
  void* large = memory.allocate(size_t{70} << 20);
  CHECK(large != nullptr && reinterpret_cast<uintptr_t>(large) % (2u << 20) == 0);
  memory.release(large);
  memory.release(nullptr);
}

TEST(memory_released_is_used_again) {
  phloem::Memory memory;
  void* keep = memory.allocate(64);
  void* first = memory.allocate(1 << 20);
  memory.release(first);
  for (int i = 0; i < 1000; i++) {
    void* p = memory.allocate(1 << 20);
    CHECK(p == first);
    memory.release(p);
  }
  memory.release(keep);
}
