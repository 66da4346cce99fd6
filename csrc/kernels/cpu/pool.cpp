// SPDX-License-Identifier: Apache-2.0
#include "pool.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <cfenv>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "wake_core.h"

namespace fastagg::cpu {
namespace {

using Entry = void (*)(void* context, int worker);

// How long a thread looks for an event before it sleeps. Waking a sleeping thread takes about as
// long. On a busy machine this is the most that a call costs others.
constexpr std::chrono::microseconds kLook{50};

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits for found() for at most kLook.
template <class Found>
void look_for(const Found& found) {
  const auto end = std::chrono::steady_clock::now() + kLook;
  do {
    for (int turn = 0; turn < 32; ++turn) {
      if (found()) return;
      pause();
    }
  } while (std::chrono::steady_clock::now() < end);
}

// A call in progress. The pool's mutex guards all fields that change.
struct Job {
  const Entry entry;
  void* const context;
  const int workers;
  const int core = this_core();  // where it was called
  std::fenv_t environment = {};
  int begun = 1;                // workers that have begun; the caller is worker 0
  std::atomic<int> running{0};  // helpers that have begun and not returned
  bool listed = true;
  Job* next = nullptr;
  std::condition_variable returned = {};
};

class Pool {
 public:
  void run(int workers, Entry entry, void* context) {
    Job job{entry, context, workers};
    std::fegetenv(&job.environment);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      start_helpers(workers - 1);
      append(job);
      wake_apart(sleepers_, job.core);
    }
    for (int helper = 1; helper < workers; ++helper) work_.notify_one();
    entry(context, 0);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (job.listed) remove(job);
    }
    look_for([&] { return job.running.load(std::memory_order_relaxed) == 0; });
    std::unique_lock<std::mutex> lock(mutex_);  // also: no helper is about to notify
    job.returned.wait(lock, [&] { return job.running == 0; });
  }

 private:
  void start_helpers(int wanted) {
    if (started_ >= wanted) return;
    sigset_t blocked, before;
    sigfillset(&blocked);
    // A thread receives these for what it did itself. If it blocks them, no handler runs.
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT})
      sigdelset(&blocked, fault);
    pthread_sigmask(SIG_SETMASK, &blocked, &before);  // a new thread inherits the mask
    try {
      for (; started_ < wanted; ++started_) std::thread([this] { help(); }).detach();
    } catch (...) {  // no more threads, or memory: go on with those that there are
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void help() {
#ifdef __APPLE__
    pthread_setname_np("fastagg");
#else
    pthread_setname_np(pthread_self(), "fastagg");
#endif
    Sleeper self;
    int caller = -1;  // the core of the last one
    std::unique_lock<std::mutex> lock(mutex_);
    self.next = sleepers_;
    sleepers_ = &self;
    for (;;) {
      if (!first_) {
        lock.unlock();
        look_for([&] { return listed_.load(std::memory_order_relaxed) > 0; });
        lock.lock();
      }
      if (!first_) {
        falls_asleep(self, caller);
        work_.wait(lock, [&] { return first_ != nullptr; });
        self.asleep = false;
      }
      Job& job = *first_;
      const int worker = job.begun++;
      ++job.running;
      if (job.begun == job.workers) remove(job);
      caller = job.core;
      lock.unlock();
      come_back(self);
      std::fesetenv(&job.environment);
      job.entry(job.context, worker);
      lock.lock();
      if (--job.running == 0) job.returned.notify_one();
    }
  }

  void append(Job& job) {
    Job** end = &first_;
    while (*end) end = &(*end)->next;
    *end = &job;
    ++listed_;
  }

  void remove(Job& job) {
    Job** link = &first_;
    while (*link != &job) link = &(*link)->next;
    *link = job.next;
    job.listed = false;
    --listed_;
  }

  std::mutex mutex_;
  std::condition_variable work_;
  Job* first_ = nullptr;         // the calls that take more helpers, oldest first
  std::atomic<int> listed_{0};   // their number
  Sleeper* sleepers_ = nullptr;  // all helpers
  int started_ = 0;
};

// Never destroyed: helpers wait on it while the process ends. A child of fork() has none of the
// helpers, and the mutex may be locked there; so it gets a pool of its own.
std::atomic<Pool*> the_pool;

Pool& pool() {
  static const int once = [] {
    the_pool = new Pool;
    return pthread_atfork(nullptr, nullptr, [] { the_pool = new Pool; });
  }();
  static_cast<void>(once);
  return *the_pool;
}

// Made when the library is loaded: a child of fork() that interrupts the first call would wait for
// the end of that call.
[[maybe_unused]] const Pool& loaded = pool();

}  // namespace

Parallel pool_threads(int workers) {
  return {workers, [](int used, Entry entry, void* context) { pool().run(used, entry, context); }};
}

}  // namespace fastagg::cpu
