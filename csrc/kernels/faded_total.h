// SPDX-License-Identifier: Apache-2.0
// A second sum over the rows of memory_total (memory.h) and quantized_total (int8_rows.h), in the
// same pass.
#pragma once

namespace fastagg {

// out = fading * total + sum_s weights[s] * (m[s] - fading * old[s]), with the total, new rows m
// and old rows of the call, in float64: the aggregate of rules whose weights are not those of the
// total (FedStale).
struct FadedTotal {
  double* out = nullptr;            // [d], changed; nullptr: there is no such sum
  const double* weights = nullptr;  // [S]
  double fading = 1.0;
};

}  // namespace fastagg
