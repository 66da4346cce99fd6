// SPDX-License-Identifier: Apache-2.0
// A float64 sum in a fixed order, on one thread, for S x S numbers.
#pragma once

#include <cstdint>

#include "simd.h"

namespace fastagg::cpu {

// The sum of term(0), ..., term(n - 1), in eight partial sums, so that the compiler can vectorize
// it. The order does not depend on the instruction set.
template <class Term>
FASTAGG_INLINE double fixed_sum(int64_t n, const Term& term) {
  constexpr int kSums = 8;
  double sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= n; i += kSums)
    for (int k = 0; k < kSums; ++k) sums[k] += term(i + k);
  for (int k = 0; i < n; ++i, ++k) sums[k] += term(i);
  for (int half = kSums / 2; half > 0; half /= 2)
    for (int k = 0; k < half; ++k) sums[k] += sums[k + half];
  return sums[0];
}

}  // namespace fastagg::cpu
