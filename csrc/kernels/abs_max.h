// SPDX-License-Identifier: Apache-2.0
// abs_max: the largest magnitude of each row. It is the cheapest way to find NaN and infinity.
#pragma once

#include <cstdint>

#include "common.h"

namespace fastagg::cpu {

// out[s] = max_k |rows[s][k]|; NaN if row s holds a NaN; 0 if d = 0.
//   rows    // [S] pointers to d contiguous floats each
//   out     // [S]
void abs_max(const float* const* rows, int64_t S, int64_t d, float* out, const Parallel& parallel);

}  // namespace fastagg::cpu
