// SPDX-License-Identifier: Apache-2.0
// Temporary memory of the CPU kernels, reused from one call to the next.
#pragma once

#include <cstdint>

namespace fastagg::cpu {

// Uninitialised memory, aligned to cache lines, for the lifetime of this object.
//
// A freed block goes to a pool that all threads share, because fresh memory costs a page fault for
// every 4 KB, which would be a tenth of a gram. The pool keeps the blocks used last, at most 8 of
// them and at most kScratchLimit bytes in total, and returns the others to the system.
class Scratch {
 public:
  // Throws std::bad_alloc. Kernels make their scratch before the parallel part: a task that throws
  // could leave others waiting for it.
  explicit Scratch(int64_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(block_.data);
  }

  struct Block {
    void* data = nullptr;
    int64_t bytes = 0;
  };

 private:
  int64_t requested_;  // bytes; a block from the pool may be larger
  Block block_;
};

constexpr int64_t kScratchLimit = int64_t{128} << 20;

struct ScratchUse {
  int64_t kept;  // bytes in the pool
  int64_t used;  // bytes that kernels of all threads have requested and not freed yet
  int64_t peak;  // the largest `used` since the last reset
};
ScratchUse scratch_use();
void reset_scratch_peak();

}  // namespace fastagg::cpu
