// SPDX-License-Identifier: Apache-2.0
// How the parameters move at the end of a round, the same to the bit in every kernel that does it.
#pragma once

#include <cstdint>

#include "simd.h"

namespace fastagg::cpu {

// params[k] += lr * norm * total[k], or lr * (norm * total[k] - params[k]) if `models`.
FASTAGG_INLINE void apply_total(float* params, const double* total, int64_t n, double lr,
                                double norm, bool models) {
  for (int64_t k = 0; k < n; ++k) {
    const double p = params[k], mean = norm * total[k];
    params[k] = static_cast<float>(p + lr * (models ? mean - p : mean));
  }
}

}  // namespace fastagg::cpu
