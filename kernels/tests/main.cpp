// phloem_tests [substring]: runs the tests whose name holds it; exit status 1 if any failed.
#include "test.h"

namespace phloem_test {
std::vector<Test>& tests() {
  static std::vector<Test> list;
  return list;
}
int failures = 0;
}  // namespace phloem_test

int main(int argc, char** argv) {
  int run = 0;
  for (const auto& test : phloem_test::tests()) {
    if (argc > 1 && std::strstr(test.name, argv[1]) == nullptr) continue;
    const int before = phloem_test::failures;
    test.run();
    run++;
    std::printf("%-6s %s\n", phloem_test::failures == before ? "ok" : "FAILED", test.name);
  }
  std::printf("%d tests, %d failed checks\n", run, phloem_test::failures);
  return phloem_test::failures != 0 || run == 0 ? 1 : 0;
}
