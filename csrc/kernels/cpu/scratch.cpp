// SPDX-License-Identifier: Apache-2.0
#include "scratch.h"

#include <pthread.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <mutex>
#include <new>

#include "../common.h"

namespace fastagg::cpu {
namespace {

using Block = Scratch::Block;

class Pool {
 public:
  // The smallest block that is large enough, or an empty one.
  Block take(int64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    int best = -1;
    for (int k = 0; k < count_; ++k)
      if (blocks_[k].bytes >= bytes && (best < 0 || blocks_[k].bytes < blocks_[best].bytes))
        best = k;
    use_.used += bytes;
    use_.peak = std::max(use_.peak, use_.used);
    if (best < 0) return {};
    const Block block = blocks_[best];
    std::copy(blocks_ + best + 1, blocks_ + count_, blocks_ + best);
    --count_;
    use_.kept -= block.bytes;
    return block;
  }

  // Keeps a block that was taken for `requested` bytes; frees the ones used least recently to make
  // room.
  void put(Block block, int64_t requested) {
    Block freed[kBlocks + 1];
    int count = 0;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      use_.used -= requested;
      if (block.bytes > kScratchLimit) {
        freed[count++] = block;
      } else if (block.data) {
        while (count_ == kBlocks || use_.kept + block.bytes > kScratchLimit) {
          freed[count++] = blocks_[--count_];
          use_.kept -= blocks_[count_].bytes;
        }
        std::copy_backward(blocks_, blocks_ + count_, blocks_ + count_ + 1);
        blocks_[0] = block;
        ++count_;
        use_.kept += block.bytes;
      }
    }
    for (int k = 0; k < count; ++k) std::free(freed[k].data);
  }

  ScratchUse use() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return use_;
  }
  void reset_peak() {
    const std::lock_guard<std::mutex> lock(mutex_);
    use_.peak = use_.used;
  }

  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  static constexpr int kBlocks = 8;
  std::mutex mutex_;
  Block blocks_[kBlocks];  // the one used last first
  int count_ = 0;
  ScratchUse use_ = {};
};

// Never destroyed: a thread may still use it while the process ends. fork() waits until no thread
// holds the mutex, which the child would find locked for ever.
Pool& pool() {
  static Pool& pool = *new Pool;
  static const int once =
      pthread_atfork([] { pool.lock(); }, [] { pool.unlock(); }, [] { pool.unlock(); });
  static_cast<void>(once);
  return pool;
}

// Made when the library is loaded: a child of fork() that interrupts the first call would wait for
// the end of that call.
[[maybe_unused]] const Pool& loaded = pool();

}  // namespace

Scratch::Scratch(int64_t bytes)
    : requested_(std::max<int64_t>(bytes, 1)), block_(pool().take(requested_)) {
  if (block_.data) return;
  const int64_t rounded = ceil_div(requested_, 64) * 64;
  block_ = {std::aligned_alloc(64, static_cast<std::size_t>(rounded)), rounded};
  if (block_.data) return;
  pool().put({}, requested_);
  throw std::bad_alloc();
}

Scratch::~Scratch() {
  pool().put(block_, requested_);
}

ScratchUse scratch_use() {
  return pool().use();
}

void reset_scratch_peak() {
  pool().reset_peak();
}

}  // namespace fastagg::cpu
