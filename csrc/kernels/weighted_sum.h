// SPDX-License-Identifier: Apache-2.0
// weighted_sum: the weighted sum of rows, which is the last step of rules without memory rows.
#pragma once

#include <cstdint>

#include "common.h"
#include "elements.h"

namespace fastagg::cpu {

// out = beta * out + sum_s weights[s] * rows[s], in one pass, in the order of s: float32 inside
// groups of 8 rows, float64 across groups. With beta = 0 the old content of out is not read (it may
// be NaN). The common factor of the weights is applied in float64 (weight_scale.h), and what is
// left of each weight is rounded to float32.
//   out       // [d]
//   rows      // [S] pointers to d contiguous elements each
//   weights   // [S]
template <class T>  // float, Bfloat16 or Half
void weighted_sum(float* out, const T* const* rows, int64_t S, int64_t d, const double* weights,
                  double beta, const Parallel& parallel);

}  // namespace fastagg::cpu
