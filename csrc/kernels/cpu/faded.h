// SPDX-License-Identifier: Apache-2.0
// Blocks of columns of a FadedTotal.
#pragma once

#include <cstdint>

#include "../faded_total.h"
#include "simd.h"

namespace fastagg::cpu {

// The sum for columns from `begin` on and rows from `s` on.
FASTAGG_INLINE FadedTotal part_of(const FadedTotal& faded, int64_t s, int64_t begin) {
  if (!faded.out) return {};
  return {faded.out + begin, faded.weights + s, faded.fading};
}

// The sum for n columns from `column` on, before any row: fading * total. `total` begins at
// `column`.
FASTAGG_INLINE FadedTotal begin_faded(const FadedTotal& faded, const double* total, int64_t column,
                                      int64_t n) {
  const FadedTotal block = part_of(faded, 0, column);
  if (block.out)
    for (int64_t k = 0; k < n; ++k) block.out[k] = block.fading * total[k];
  return block;
}

}  // namespace fastagg::cpu
