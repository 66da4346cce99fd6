// SPDX-License-Identifier: Apache-2.0
// One block of columns of weighted_sum, for kernels that compute it along with something else.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "../weight_scale.h"
#include "simd.h"

namespace fastagg::cpu {

// weights[s] = factor * quotients[s].
struct ScaledWeights {
  std::vector<float> quotients;
  double factor;

  ScaledWeights(const double* weights, int64_t S) {
    double smallest = std::numeric_limits<double>::infinity(), largest = 0.0, total = 0.0;
    for (int64_t s = 0; s < S; ++s) {
      const double magnitude = std::abs(weights[s]);
      if (magnitude > 0.0) smallest = std::min(smallest, magnitude);
      largest = std::max(largest, magnitude);
      total += magnitude;
    }
    factor = common_factor(smallest, largest, total);
    quotients.reserve(S);
    for (int64_t s = 0; s < S; ++s) quotients.push_back(static_cast<float>(weights[s] / factor));
  }
};

// weighted_sum in columns [column, column + n), n <= kMaxBlock, on the calling thread.
//   out   // [d]
void weighted_sum_block(Isa isa, float* out, const float* const* rows, int64_t S,
                        const ScaledWeights& weights, double beta, int64_t column, int64_t n);

}  // namespace fastagg::cpu
