// SPDX-License-Identifier: Apache-2.0
// Adds partial sums in a fixed order, whichever worker computes them when.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

namespace fastagg::cpu {

// Adds the partial sums of chunks 0, 1, 2, ... to `sums`, in this order. The partial sums of chunk
// c wait in buffer c % window until all chunks before c have been added; a worker that is a whole
// window ahead waits. There is no barrier, and no more memory than the window.
//
// Chunks must be started in ascending order, as Parallel::for_each does, and a task may hold at
// most `window` chunks that are not finished. Between start and finish, a task must neither throw
// nor wait for other tasks. Then some worker is always computing the chunk to be added next, so no
// worker waits for ever.
class OrderedSum {
 public:
  // Adds entries [begin, end). Chunk c uses the buffer at buffers + (c % window) * stride.
  OrderedSum(double* sums, int64_t begin, int64_t end, double* buffers, int64_t stride,
             int64_t window)
      : sums_(sums),
        begin_(begin),
        end_(end),
        buffers_(buffers),
        stride_(stride),
        window_(window),
        done_(window) {
    std::fill(sums_ + begin_, sums_ + end_, 0.0);
  }

  // Returns the buffer of chunk c, with zeros in [begin, end).
  double* start(int64_t c) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      has_room_.wait(lock, [&] { return c < next_ + window_; });
    }
    std::fill(buffer(c) + begin_, buffer(c) + end_, 0.0);
    return buffer(c);
  }

  // The buffer of chunk c has its sums.
  void finish(int64_t c) {
    const std::lock_guard<std::mutex> lock(mutex_);
    done_[c % window_] = true;
    const int64_t before = next_;
    for (; done_[next_ % window_]; ++next_) {
      const double* partial = buffer(next_);
      for (int64_t k = begin_; k < end_; ++k) sums_[k] += partial[k];
      done_[next_ % window_] = false;
    }
    if (next_ != before) has_room_.notify_all();
  }

 private:
  double* buffer(int64_t c) { return buffers_ + c % window_ * stride_; }

  double* const sums_;
  const int64_t begin_, end_;
  double* const buffers_;
  const int64_t stride_, window_;
  std::mutex mutex_;
  std::condition_variable has_room_;
  std::vector<bool> done_;  // by chunk % window: finished, not yet added
  int64_t next_ = 0;        // the chunk to add next
};

}  // namespace fastagg::cpu
