// A test is a function in a list; CHECK says where and what. No framework.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "phloem.h"

namespace phloem_test {

struct Test {
  const char* name;
  void (*run)();
};
std::vector<Test>& tests();
extern int failures;

struct Register {
  Register(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

// The same numbers on every machine.
struct Random {
  uint64_t state;
  explicit Random(uint64_t seed) : state(seed * 0x9e3779b97f4a7c15ull + 1) {}
  uint64_t next() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state * 0x2545f4914f6cdd1dull;
  }
  float uniform() { return static_cast<float>(static_cast<double>(next() >> 11) * (2.0 / 9007199254740992.0) - 1.0); }  // [-1, 1)
  int below(int n) { return static_cast<int>(next() % static_cast<uint64_t>(n)); }
};

// The variants that this machine can run, the baseline always among them.
inline std::vector<int> variants() {
  std::vector<int> found;
  for (int v = PHLOEM_BASE; v <= PHLOEM_X86_V4_VNNI; v++)
    if (phloem_supported(v)) found.push_back(v);
  return found;
}

}  // namespace phloem_test

#define TEST(name)                                                    \
  static void name();                                                 \
  static const phloem_test::Register register_##name(#name, &name);   \
  static void name()

#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) {                                                             \
      std::printf("%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition);     \
      phloem_test::failures++;                                                      \
    }                                                                               \
  } while (0)
