// SPDX-License-Identifier: Apache-2.0
// Scratch memory of the CPU kernels.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <new>
#include <utility>

#include "../common.h"

namespace fastagg::cpu {

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

}  // namespace fastagg::cpu
