// SPDX-License-Identifier: Apache-2.0
// weighted_sum: the weighted sum of rows, which is the last step of rules without memory rows.
#pragma once

#include <cmath>
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

// What apply_weighted_sum accepts. Magnitudes must be finite besides.
struct SumLimits {
  double sum;     // the largest magnitude in the sum
  double params;  // the largest magnitude in params, plus lr times that in the sum
};

// Whether params may move.
//   known, added   // the largest magnitudes in params and in the sum
inline bool fits_into(double known, double added, double lr, const SumLimits& limits) {
  return std::isfinite(known) && std::isfinite(added) && added <= limits.sum &&
         known + lr * added <= limits.params;
}

// params += lr * sum, with the bits of weighted_sum(sum, rows, ..., 0) and of weighted_sum(params,
// {sum}, {lr}, 1), if the limits hold; otherwise params do not change. One pass: params are written
// along with the sum and, at its end, copied back from `before` if a limit does not hold. Returns
// whether the limits hold.
//   params   // [d]
//   before   // [d], changed: the params from before
template <class T>  // float, Bfloat16 or Half
bool apply_weighted_sum(float* params, float* before, const T* const* rows, int64_t S, int64_t d,
                        const double* weights, double lr, const SumLimits& limits,
                        const Parallel& parallel);

}  // namespace fastagg::cpu
