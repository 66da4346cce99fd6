// SPDX-License-Identifier: Apache-2.0
// The largest magnitudes of rows, computed along with something else.
#pragma once

#include <cstdint>
#include <cstring>

#include "scratch.h"

namespace fastagg::cpu {

// One maximum for each worker and row. It does not matter which worker took which columns: a
// maximum of magnitudes is the same in any order.
class RowPeaks {
 public:
  RowPeaks(int64_t S, const Parallel& parallel)
      : S_(S), workers_(parallel.workers), scratch_(S * workers_ * int64_t{sizeof(int32_t)}) {
    std::fill_n(scratch_.as<int32_t>(), S * workers_, 0);
  }
  // [S] magnitude bits that only this worker changes
  int32_t* of(int worker) const { return scratch_.as<int32_t>() + worker * S_; }

  void write(float* out) const {
    for (int64_t s = 0; s < S_; ++s) {
      int32_t largest = 0;
      for (int worker = 0; worker < workers_; ++worker) largest = std::max(largest, of(worker)[s]);
      std::memcpy(out + s, &largest, sizeof largest);
    }
  }

 private:
  int64_t S_;
  int workers_;
  Scratch scratch_;
};

}  // namespace fastagg::cpu
