// SPDX-License-Identifier: Apache-2.0
// The one copy of the helpers that the CPU kernels share. No torch here.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <new>
#include <utility>

namespace fastagg {

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

namespace cpu {

// How a kernel runs its tasks. The binding supplies `launch`, which calls entry(context, worker)
// once for each worker in [0, workers), concurrently, and returns when all are done. The CPU
// launchers take a `Parallel` where the CUDA ones take a stream.
//
// Tasks are pulled from a shared counter, so which worker runs a task is not fixed: a kernel must
// make its result depend on the tasks alone (fixed blocks, partial results reduced in task order).
struct Parallel {
  int workers;
  void (*launch)(int workers, void (*entry)(void* context, int worker), void* context);

  // Calls body(task, worker) for every task in [0, tasks).
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

// Uninitialised, cache-line-aligned scratch memory. The thread that frees a block keeps it for its
// next one: fresh memory costs a page fault for every 4 KB, which would be a tenth of a gram.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : block_(kept().take(std::max<int64_t>(bytes, 1))) {}
  ~Scratch() { kept().put(block_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(block_.data);
  }

 private:
  struct Block {
    void* data = nullptr;
    int64_t bytes = 0;
  };

  struct Kept {
    static constexpr int64_t kLargest = 128 << 20;  // larger ones go back to the system
    Block blocks[4];

    // The smallest block that is large enough, or a new one.
    Block take(int64_t bytes) {
      Block* best = nullptr;
      for (Block& block : blocks)
        if (block.bytes >= bytes && (!best || block.bytes < best->bytes)) best = &block;
      if (best) return std::exchange(*best, Block());
      const int64_t rounded = ceil_div(bytes, 64) * 64;
      void* data = std::aligned_alloc(64, static_cast<std::size_t>(rounded));
      if (!data) throw std::bad_alloc();
      return {data, rounded};
    }
    // Keeps the block in the place of the smallest one, which is freed.
    void put(Block block) {
      Block* least = std::min_element(std::begin(blocks), std::end(blocks),
                                      [](auto& x, auto& y) { return x.bytes < y.bytes; });
      if (block.bytes <= kLargest && block.bytes > least->bytes) std::swap(block, *least);
      std::free(block.data);
    }
    ~Kept() {
      for (Block& block : blocks) std::free(block.data);
    }
  };
  static Kept& kept() {
    static thread_local Kept kept;
    return kept;
  }

  Block block_;
};

}  // namespace cpu
}  // namespace fastagg
