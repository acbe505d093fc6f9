// Threads that run one region at a time, together. Knows nothing of models or batches.
//
//   caller   ──run(f)── f(0) ──barrier── f(0) ──barrier── ... ──end──► returns when all have ended
//   worker 1 ──spin──── f(1) ──barrier── f(1) ──barrier── ... ──end──► spins ~1 ms for the next region, then sleeps
//
// One pool a backend; several may live in a process. With one thread there is no worker and run() is a plain call.
// Workers never outlive the pool. A fork()ed child has no workers: there run() refuses, and destruction joins nobody.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace phloem {

class Pool;

// What a thread knows of its region. `scratch` is this thread's own, `Pool::reserve_scratch` bytes, 64-byte aligned, its
// contents undefined at the start of a region.
struct Spmd {
  int thread;
  int threads;
  char* scratch;
  Pool* pool;

  void barrier();
  // This thread's share of n items in chunks of `grain`: [*begin, *end).
  void share(int n, int grain, int* begin, int* end) const {
    const int64_t chunks = (n + grain - 1) / grain;
    const int64_t b = chunks * thread / threads * grain, e = chunks * (thread + 1) / threads * grain;
    *begin = (int)(b < n ? b : n);
    *end = (int)(e < n ? e : n);
  }
};

class Pool {
 public:
  using Function = void (*)(void* arg, Spmd& spmd);

  // threads >= 1, the caller of run() included.
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Runs f in every thread and returns when all have ended. False, and nothing run, in a fork()ed child.
  // Not reentrant, and for one caller at a time.
  bool run(Function f, void* arg);
  template <class F>
  bool run(F&& f) {
    using G = std::remove_reference_t<F>;
    return run([](void* arg, Spmd& spmd) { (*static_cast<G*>(arg))(spmd); }, const_cast<void*>(static_cast<const void*>(&f)));
  }

  // Makes each thread's scratch at least `bytes` long. Only between regions. False if there is no memory.
  bool reserve_scratch(size_t bytes);

  int threads() const { return threads_; }
  bool usable() const;  // false in a fork()ed child
  void barrier();       // inside a region; all threads call it

 private:
  struct Workers;
  void worker(int thread);
  void enter(int thread, Function f, void* arg);

  const int threads_;
  int owner_pid_;
  Workers* workers_ = nullptr;
  char** scratch_ = nullptr;
  size_t scratch_bytes_ = 0;
  Function function_ = nullptr;
  void* arg_ = nullptr;
  bool stop_ = false;
  alignas(64) std::atomic<uint32_t> epoch_{0};      // one more per region
  alignas(64) std::atomic<uint32_t> sleepers_{0};   // workers asleep on epoch_
  alignas(64) std::atomic<uint32_t> arrived_{0};    // threads in the current barrier
  alignas(64) std::atomic<uint32_t> phase_{0};      // one more per barrier passed
  alignas(64) std::atomic<uint32_t> waiters_{0};    // threads asleep on phase_
};

inline void Spmd::barrier() {
  if (threads > 1) pool->barrier();
}

}  // namespace phloem
