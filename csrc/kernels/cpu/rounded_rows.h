// SPDX-License-Identifier: Apache-2.0
// The sum of rows that are rounded and kept in shorter numbers: one step of columns of a group of
// rows at a time. First each row is rounded by itself, then all are added. In one loop over
// columns, the conversions of the next columns would wait for the chain of G additions of these.
#pragma once

#include "row_blocks.h"

namespace fastagg::cpu {

// sums = from + weight * (row - old) for `count` columns of G rows, in ascending order of rows,
// with the bits of memory_total (memory.h). `from` may be `sums`.
template <int W, int G, class Count>
FASTAGG_INLINE void add_differences(double* sums, const double* from, const float (&rows)[G][kStep],
                                    const float (&old)[G][kStep], const double (&weights)[G],
                                    Count count) {
  constexpr int kHalf = W / 2;
  int64_t k = 0;
  for (; k + kHalf <= count; k += kHalf) {
    Vec<double, kHalf> sum = load<kHalf>(from + k);
    unroll<G>([&](auto g) FASTAGG_INLINE_LAMBDA {
      sum += weights[g] * (load_double<kHalf>(rows[g] + k) - load_double<kHalf>(old[g] + k));
    });
    store<kHalf>(sums + k, sum);
  }
  for (; k < count; ++k) {
    double sum = from[k];
    for (int g = 0; g < G; ++g)
      sum += weights[g] * (static_cast<double>(rows[g][k]) - static_cast<double>(old[g][k]));
    sums[k] = sum;
  }
}

}  // namespace fastagg::cpu
