// SPDX-License-Identifier: Apache-2.0
// weighted_sum: what every aggregation rule without memory ends with.
#pragma once

#include <cstdint>

#include "common.h"
#include "elements.h"

namespace fastagg::cpu {

// out = beta * out + sum_s weights[s] * rows[s], one pass, in the order of s: float32 in groups of
// 8 rows, float64 across groups. With beta = 0 the old content of out is not read (it may be NaN).
//   out       // [d]
//   rows      // [S] pointers to d contiguous elements each
//   weights   // [S]
template <class T>  // float, Bfloat16 or Half
void weighted_sum(float* out, const T* const* rows, int64_t S, int64_t d, const double* weights,
                  double beta, const Parallel& parallel);

}  // namespace fastagg::cpu
