// SPDX-License-Identifier: Apache-2.0
// Partial sums that are computed in any order and added in one.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

namespace fastagg::cpu {

// Adds the partial sums of parts 0, 1, 2, ... to `sums`, in this order, whichever worker has them
// when. Those of part p wait in buffer p % window for all parts before; a worker that is a whole
// window ahead waits too. No barrier, and no more memory than the window.
//
// Parts must be started in order (`Parallel::for_each` does) and finished without waiting for
// others, so that the next part to be added is always in the hands of somebody who works on it.
class OrderedSum {
 public:
  // Entries [begin, end) of sums, and of each buffer, of which part p has `buffers + (p % window) *
  // stride`.
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

  // The buffer of part p, with zeros in [begin, end).
  double* start(int64_t p) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      has_room_.wait(lock, [&] { return p < next_ + window_; });
    }
    std::fill(buffer(p) + begin_, buffer(p) + end_, 0.0);
    return buffer(p);
  }

  // The sums of part p are in its buffer.
  void finish(int64_t p) {
    const std::lock_guard<std::mutex> lock(mutex_);
    done_[p % window_] = true;
    const int64_t before = next_;
    for (; done_[next_ % window_]; ++next_) {
      const double* partial = buffer(next_);
      for (int64_t k = begin_; k < end_; ++k) sums_[k] += partial[k];
      done_[next_ % window_] = false;
    }
    if (next_ != before) has_room_.notify_all();
  }

 private:
  double* buffer(int64_t p) { return buffers_ + p % window_ * stride_; }

  double* const sums_;
  const int64_t begin_, end_;
  double* const buffers_;
  const int64_t stride_, window_;
  std::mutex mutex_;
  std::condition_variable has_room_;
  std::vector<bool> done_;  // by part % window: finished, not yet added
  int64_t next_ = 0;        // the part to be added next
};

}  // namespace fastagg::cpu
