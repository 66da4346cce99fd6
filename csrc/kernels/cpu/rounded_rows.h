// SPDX-License-Identifier: Apache-2.0
// The sums of rows that are rounded and kept in shorter numbers: one step of columns of a group of
// rows at a time. First each row is rounded by itself, then all are added. In one loop over
// columns, the conversions of the next columns would wait for the chain of G additions of these.
#pragma once

#include "faded.h"
#include "row_blocks.h"

namespace fastagg::cpu {

// sums = from + weight * (row - fading * old) for `count` columns of G rows, in ascending order of
// rows, with the bits of memory_total (memory.h). `from` may be `sums`. Each term is one
// expression: Clang fuses the product with the difference only within one.
template <int W, int G, class Count>
FASTAGG_INLINE void add_differences(double* sums, const double* from, const float (&rows)[G][kStep],
                                    const float (&old)[G][kStep], const double* weights,
                                    double fading, Count count) {
  constexpr int kHalf = W / 2;
  int64_t k = 0;
  for (; k + kHalf <= count; k += kHalf) {
    Vec<double, kHalf> sum = load<kHalf>(from + k);
    unroll<G>([&](auto g) FASTAGG_INLINE_LAMBDA {
      sum +=
          weights[g] * (load_double<kHalf>(rows[g] + k) - fading * load_double<kHalf>(old[g] + k));
    });
    store<kHalf>(sums + k, sum);
  }
  for (; k < count; ++k) {
    double sum = from[k];
    for (int g = 0; g < G; ++g)
      sum +=
          weights[g] * (static_cast<double>(rows[g][k]) - fading * static_cast<double>(old[g][k]));
    sums[k] = sum;
  }
}

// Both sums of `count` columns of G rows, which begin at `begin` of sums, `from` and `faded`.
template <int W, int G, class Count>
FASTAGG_INLINE void add_both(double* sums, const double* from, const float (&rows)[G][kStep],
                             const float (&old)[G][kStep], const double* weights,
                             const FadedTotal& faded, int64_t begin, Count count) {
  add_differences<W, G>(sums + begin, from + begin, rows, old, weights, 1.0, count);
  if (!faded.out) return;
  double* const other = faded.out + begin;
  add_differences<W, G>(other, other, rows, old, faded.weights, faded.fading, count);
}

}  // namespace fastagg::cpu
