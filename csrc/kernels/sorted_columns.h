// SPDX-License-Identifier: Apache-2.0
// trimmed_mean and meamed: statistics of the sorted values of each column. The median is a trimmed
// mean.
#pragma once

#include <cstdint>

#include "common.h"
#include "elements.h"

namespace fastagg::cpu {

// Both read S >= 1 rows once and write
//   out     // [d]
//   peak    // [1] the largest magnitude in all rows, NaN if any is NaN, 0 if d = 0
//   rows    // [S] pointers to d contiguous elements each
//   scales  // [S]: rows[s] stands for the float32 product scales[s] * rows[s]; or nullptr
// If the peak is not finite, the content of `out` is that of a sort with NaN beyond infinity.
//
// A mean is the float64 sum of the chosen values in ascending order, divided by their number and
// rounded to float32. So the bits depend neither on the order of rows nor on the instruction set.

// out[k] = the mean of the values of column k without the `trim` smallest and the `trim` largest
// ones, 0 <= 2 trim < S. With trim = (S - 1) / 2 it is the median: the middle value, or the mean of
// the two middle ones.
template <class T>  // float, Bfloat16 or Half
void trimmed_mean(float* out, float* peak, const T* const* rows, int64_t S, int64_t d, int64_t trim,
                  const float* scales, const Parallel& parallel);

// out[k] = the mean of the `keep` values of column k that are nearest to its median, 1 <= keep <=
// S. Distances are computed in float64. Of two values at the same distance, the smaller one is
// nearer.
template <class T>  // float, Bfloat16 or Half
void meamed(float* out, float* peak, const T* const* rows, int64_t S, int64_t d, int64_t keep,
            const float* scales, const Parallel& parallel);

}  // namespace fastagg::cpu
