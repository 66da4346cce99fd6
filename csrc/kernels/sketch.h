// SPDX-License-Identifier: Apache-2.0
// sketch: a sparse Johnson-Lindenstrauss transform of rows, with one nonzero for each column.
// sketch_and_sum: the same, and the weighted sum of the rows.
#pragma once

#include <cstdint>

#include "common.h"
#include "sketch_hash.h"

namespace fastagg::cpu {

// Adds the sketches and the squared norms of rows to `out` and `squares`:
//   out[s][bucket(j)] += sign(j) * rows[s][j - begin]    for columns j in [begin, begin + d)
//   squares[s]        += sum_j rows[s][j - begin]^2
// with bucket and sign as in sketch_hash.h. All sums are float64. In every bucket columns ascend,
// so `out` of calls for neighbouring ranges of columns, in ascending order, has the bits of one
// call. `squares` may differ in the last bits. Both have the same bits on every instruction set. A
// row with a NaN or an infinity makes its square NaN or infinite.
//   out       // [S, k]
//   squares   // [S]
//   rows      // [S] pointers to d contiguous elements each
//   k         // a power of two in [kLeastBuckets, kMostBuckets]
//   begin     // the first column, >= 0
template <class T>  // float, Bfloat16 or Half
void sketch(double* out, double* squares, const T* const* rows, int64_t S, int64_t d, int64_t k,
            uint64_t seed, int64_t begin, const Parallel& parallel);

// sketch, and sum = sum_s weights[s] * rows[s], with the bits of `sketch` and of `weighted_sum`.
// Rows are read from memory once, unless there are more threads than groups of 8 rows.
//   sum       // [d]; its old content is not read
//   weights   // [S]
template <class T>  // float, Bfloat16 or Half
void sketch_and_sum(double* out, double* squares, float* sum, const T* const* rows, int64_t S,
                    int64_t d, const double* weights, int64_t k, uint64_t seed, int64_t begin,
                    const Parallel& parallel);

}  // namespace fastagg::cpu
