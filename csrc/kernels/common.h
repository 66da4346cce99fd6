// SPDX-License-Identifier: Apache-2.0
// Helpers that the contracts of all CPU kernels use. No torch header is included in kernels/.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace fastagg {

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

namespace cpu {

// How a kernel runs its tasks. The binding supplies `launch`, which calls entry(context, worker)
// for worker 0 and for any others in [1, workers), concurrently, and returns when all calls have
// returned. A CPU kernel takes a `Parallel` where a CUDA launcher takes a stream.
//
// Workers take tasks from a shared counter, in ascending order, so any worker may run any task, and
// a worker that starts late finds none. The result must depend on the tasks alone: tasks follow
// from the sizes, and partial results are reduced in the order of tasks.
//
// A task must not throw: other workers may wait for its result. Allocate before for_each.
struct Parallel {
  // Estimates, which need not be close: in the time in which a thread reads a byte from memory it
  // does about two multiply-adds. In the time in which it reads kWorkerBytes, a sleeping thread has
  // usually woken and begun, in a virtual machine, too.
  static constexpr int64_t kProductsPerByte = 2, kWorkerBytes = 2 << 20;

  int workers;
  void (*launch)(int workers, void (*entry)(void* context, int worker), void* context);

  // The same with fewer workers if there is little work, because waking a thread costs time.
  //   bytes      // read and written
  //   products   // multiply-adds
  Parallel for_work(int64_t bytes, int64_t products = 0) const {
    const int64_t most = (bytes + products / kProductsPerByte) / kWorkerBytes;
    return {static_cast<int>(std::clamp<int64_t>(most, 1, workers)), launch};
  }

  // Calls body(task, worker) for each task in [0, tasks). With one worker, no thread is started.
  template <class Body>
  void for_each(int64_t tasks, const Body& body) const {
    const int used = static_cast<int>(std::min<int64_t>(workers, tasks));
    if (used <= 1) {
      for (int64_t task = 0; task < tasks; ++task) body(task, 0);
      return;
    }
    struct Shared {
      const Body& body;
      int64_t tasks;
      std::atomic<int64_t> next;
    } shared{body, tasks, {0}};
    launch(
        used,
        [](void* context, int worker) {
          auto& s = *static_cast<Shared*>(context);
          for (int64_t task; (task = s.next.fetch_add(1, std::memory_order_relaxed)) < s.tasks;)
            s.body(task, worker);
        },
        &shared);
  }
};

}  // namespace cpu
}  // namespace fastagg
