// SPDX-License-Identifier: Apache-2.0
// The last step of a round: move the parameters. All kernels share it, so their bits agree.
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
