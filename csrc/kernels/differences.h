// SPDX-License-Identifier: Apache-2.0
// difference_sum: the weighted sum and the norms of updates that are given as models: a server
// receives models, and subtracts the model that it had sent.
#pragma once

#include <cstdint>

#include "common.h"
#include "elements.h"

namespace fastagg::cpu {

// In one pass over the rows:
//   out = sum_s weights[s] * (rows[s] - base)
//   squares[s] = sum_k (rows[s][k] - base[k])^2
// A difference is rounded to float32; `out` then has the bits of weighted_sum of the differences.
// Squares are added in float32 within 64 columns, in float64 across them; infinite if one of these
// float32 sums is. Bits do not depend on the number of threads.
//   out       // [d]
//   squares   // [S]
//   rows      // [S] pointers to d contiguous elements each
//   base      // [d]
//   weights   // [S]
template <class T>  // float, Bfloat16 or Half
void difference_sum(float* out, double* squares, const T* const* rows, const float* base, int64_t S,
                    int64_t d, const double* weights, const Parallel& parallel);

}  // namespace fastagg::cpu
