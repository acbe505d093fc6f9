// See pool.h. Waiting is spinning first, a futex after: waking a sleeper costs 70 us, more than most barriers last.
#include "pool.h"

#include <chrono>
#include <cstdlib>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace phloem {
namespace {

// Between regions the engine plans its next step, well under a millisecond; in a region a longer wait than a kernel's
// imbalance means that the other thread lost its core, and then spinning keeps the core it could have.
constexpr std::chrono::microseconds kRegionSpin{1000};
constexpr std::chrono::microseconds kBarrierSpin{100};

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

#if defined(__linux__)
void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, 0x7fffffff, nullptr, nullptr, 0);
}
#else
void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  if (word.load() == value) std::this_thread::sleep_for(std::chrono::microseconds(50));
}
void wake_all(std::atomic<uint32_t>&) {}
#endif

void wait_while(std::atomic<uint32_t>& word, uint32_t value, std::atomic<uint32_t>& sleepers, std::chrono::microseconds spin) {
  for (int i = 0; i < 64; i++) {
    if (word.load(std::memory_order_acquire) != value) return;
    pause();
  }
  const auto until = std::chrono::steady_clock::now() + spin;
  do {
    for (int i = 0; i < 32; i++) {
      if (word.load(std::memory_order_acquire) != value) return;
      pause();
    }
  } while (std::chrono::steady_clock::now() < until);
  sleepers.fetch_add(1);
  while (word.load() == value) sleep_while(word, value);
  sleepers.fetch_sub(1);
}

// Rounding and denormal modes are a thread's own, and a library in this process may have changed the caller's (torch can
// flush denormals): bits must not depend on which thread computed them.
class DefaultFloatMode {
#if defined(__x86_64__)
  unsigned saved_ = _mm_getcsr();

 public:
  DefaultFloatMode() { _mm_setcsr(0x1f80); }
  ~DefaultFloatMode() { _mm_setcsr(saved_); }
#else
 public:
  DefaultFloatMode() {}
  ~DefaultFloatMode() {}
#endif
};

}  // namespace

struct Pool::Workers {
  std::vector<std::thread> threads;
};

Pool::Pool(int threads) : threads_(threads < 1 ? 1 : threads), owner_pid_(getpid()) {
  scratch_ = new char*[static_cast<size_t>(threads_)]();
  if (threads_ == 1) return;
  workers_ = new Workers;
  workers_->threads.reserve(static_cast<size_t>(threads_ - 1));
  try {
    for (int t = 1; t < threads_; t++) workers_->threads.emplace_back([this, t] { worker(t); });
  } catch (const std::system_error&) {  // no more threads: end those that started, then say so
    stop_ = true;
    epoch_.fetch_add(1);
    wake_all(epoch_);
    for (auto& thread : workers_->threads) thread.join();
    delete workers_;
    delete[] scratch_;
    throw;
  }
}

Pool::~Pool() {
  if (!usable()) return;  // a fork()ed child: the workers are not here, and their std::threads can be neither joined nor dropped
  if (workers_ != nullptr) {
    stop_ = true;
    epoch_.fetch_add(1);
    wake_all(epoch_);
    for (auto& thread : workers_->threads) thread.join();
    delete workers_;
  }
  for (int t = 0; t < threads_; t++) std::free(scratch_[t]);
  delete[] scratch_;
}

bool Pool::usable() const { return owner_pid_ == getpid(); }

bool Pool::reserve_scratch(size_t bytes) {
  bytes = (bytes + 4095) & ~size_t{4095};
  if (bytes <= scratch_bytes_) return true;
  for (int t = 0; t < threads_; t++) {
    void* fresh = std::aligned_alloc(4096, bytes);
    if (fresh == nullptr) return false;
    std::free(scratch_[t]);
    scratch_[t] = static_cast<char*>(fresh);
  }
  scratch_bytes_ = bytes;
  return true;
}

void Pool::enter(int thread, Function f, void* arg) {
  DefaultFloatMode mode;
  Spmd spmd{thread, threads_, scratch_[thread], this};
  f(arg, spmd);
}

void Pool::worker(int thread) {
  uint32_t seen = 0;
  for (;;) {
    wait_while(epoch_, seen, sleepers_, kRegionSpin);
    seen++;  // regions cannot be missed: the next one starts only after this worker has passed the last barrier of this one
    if (stop_) return;
    enter(thread, function_, arg_);
    barrier();
  }
}

bool Pool::run(Function f, void* arg) {
  if (!usable()) return false;
  if (threads_ == 1) {
    enter(0, f, arg);
    return true;
  }
  function_ = f;
  arg_ = arg;
  epoch_.fetch_add(1);
  if (sleepers_.load() != 0) wake_all(epoch_);
  enter(0, f, arg);
  barrier();
  return true;
}

void Pool::barrier() {
  const uint32_t phase = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(threads_)) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.fetch_add(1);
    if (waiters_.load() != 0) wake_all(phase_);
  } else {
    wait_while(phase_, phase, waiters_, kBarrierSpin);
  }
}

}  // namespace phloem
