// SPDX-License-Identifier: Apache-2.0
// scaffold_mean: the server's part of a SCAFFOLD round.
#pragma once

#include <cstdint>

#include "common.h"

namespace fastagg::cpu {

// With d[s] = steps[s] * updates[s] - mean, in one pass of 12 bytes per element of updates. Nothing
// that is read is changed:
//   out = sum_s weights[s] * updates[s];  next = mean + part * sum_s d[s]
//   kept[s] = controls[s] + d[s]
// Products and sums are float64; next and kept are rounded once.
//   out        // [d]
//   next       // [d]
//   peaks      // [S] max |updates[s]|, NaN if the row holds a NaN
//   mean       // [d]
//   updates    // [S] pointers to d contiguous elements each
//   controls   // [S] pointers to the memory rows of the same clients, d floats each
//   weights    // [S]
//   steps      // [S]
//   kept       // [S] pointers to d floats each, written
void scaffold_mean(double* out, float* next, float* peaks, const float* mean,
                   const float* const* updates, const float* const* controls, const double* weights,
                   const double* steps, double part, float* const* kept, int64_t S, int64_t d,
                   const Parallel& parallel);

}  // namespace fastagg::cpu
