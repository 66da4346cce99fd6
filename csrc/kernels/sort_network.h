// SPDX-License-Identifier: Apache-2.0
// Sorting networks: which pairs of positions to compare, in which order. They are known to the
// compiler, so that N values that are sorted by one stay in registers.
#pragma once

#include "host_device.h"

namespace fastagg {

// Batcher's odd-even merge sort of N values (Knuth, The Art of Computer Programming, volume 3,
// algorithm 5.2.2M): after `count` exchanges x[low[i]], x[high[i]] = min, max, the values ascend.
template <int N>
struct SortNetwork {
  int count = 0;
  int low[N * N / 2] = {}, high[N * N / 2] = {};  // far more than are used

  FASTAGG_HD constexpr SortNetwork() {
    for (int p = 1; p < N; p *= 2)
      for (int k = p; k >= 1; k /= 2)
        for (int j = k % p; j + k < N; j += 2 * k)
          for (int i = j; i < j + k && i + k < N; ++i)
            if (i / (2 * p) == (i + k) / (2 * p)) {
              low[count] = i;
              high[count] = i + k;
              ++count;
            }
  }
};

}  // namespace fastagg
