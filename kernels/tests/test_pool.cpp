#include <atomic>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "pool.h"
#include "test.h"

using phloem::Pool;
using phloem::Spmd;

TEST(pool_runs_every_thread_once_a_region) {
  for (int threads : {1, 2, 3, 5}) {
    Pool pool(threads);
    std::vector<std::atomic<int>> seen(static_cast<size_t>(threads));
    for (int i = 0; i < 500; i++) CHECK(pool.run([&](Spmd& s) { seen[static_cast<size_t>(s.thread)]++; }));
    for (auto& n : seen) CHECK(n == 500);
  }
}

TEST(pool_barrier_separates_phases) {
  for (int threads : {2, 4}) {
    Pool pool(threads);
    std::vector<int> value(static_cast<size_t>(threads), 0);
    std::atomic<int> wrong{0};
    pool.run([&](Spmd& s) {
      for (int round = 1; round <= 300; round++) {
        value[static_cast<size_t>(s.thread)] = round;
        s.barrier();
        for (int v : value) wrong += v != round;
        s.barrier();
      }
    });
    CHECK(wrong == 0);
  }
}

TEST(pool_workers_sleep_and_wake) {
  Pool pool(2);
  for (int i = 0; i < 20; i++) {
    usleep(3000);  // longer than they spin
    std::atomic<int> n{0};
    pool.run([&](Spmd& s) {
      if (s.thread == 1) usleep(1000);  // the barrier's sleepers too
      n++;
    });
    CHECK(n == 2);
  }
}

TEST(pool_several_at_once) {
  Pool a(2), b(3);
  std::atomic<int> n{0};
  for (int i = 0; i < 200; i++) {
    a.run([&](Spmd&) { n++; });
    b.run([&](Spmd&) { n++; });
  }
  CHECK(n == 1000);
}

TEST(pool_share_covers_everything_once) {
  for (int n : {0, 1, 5, 31, 64, 100})
    for (int grain : {1, 4, 24})
      for (int threads : {1, 2, 3, 7}) {
        int next = 0;
        for (int t = 0; t < threads; t++) {
          Spmd s{t, threads, nullptr, nullptr};
          int begin, end;
          s.share(n, grain, &begin, &end);
          CHECK(begin == next && begin <= end && (begin % grain == 0 || begin == n));
          next = end;
        }
        CHECK(next == n);
      }
}

TEST(pool_scratch_is_each_threads_own) {
  Pool pool(3);
  CHECK(pool.reserve_scratch(100) && pool.reserve_scratch(50000));
  std::atomic<int> wrong{0};
  pool.run([&](Spmd& s) {
    std::memset(s.scratch, s.thread, 50000);
    s.barrier();
    for (int i = 0; i < 50000; i++) wrong += s.scratch[i] != s.thread;
    wrong += (reinterpret_cast<uintptr_t>(s.scratch) & 63) != 0;
  });
  CHECK(wrong == 0);
}

TEST(pool_in_a_forked_child_refuses_and_does_not_hang) {
  Pool* pool = new Pool(2);
  pool->run([](Spmd&) {});
  const pid_t child = fork();
  if (child == 0) {
    const bool ran = pool->run([](Spmd&) {});
    delete pool;
    _exit(ran ? 1 : 0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(pool->run([](Spmd&) {}));
  delete pool;
}

TEST(context_refuses_what_it_cannot_be) {
  phloem_context* context = reinterpret_cast<phloem_context*>(1);
  CHECK(phloem_create(0, PHLOEM_AUTO, &context) == PHLOEM_BAD_ARGUMENT && context == nullptr);
  CHECK(std::strstr(phloem_create_error(), "threads is 0") != nullptr);
  CHECK(phloem_create(1, 9, &context) == PHLOEM_BAD_ARGUMENT);
  CHECK(phloem_create(1, PHLOEM_AUTO, nullptr) == PHLOEM_BAD_ARGUMENT);
  for (int v : phloem_test::variants()) {
    CHECK(phloem_create(1, v, &context) == PHLOEM_OK && phloem_variant(context) == v);
    phloem_destroy(context);
  }
  phloem_destroy(nullptr);
}
