// SPDX-License-Identifier: Apache-2.0
// sketch: a sparse Johnson-Lindenstrauss transform of rows, with one nonzero for each column.
#pragma once

#include <cstdint>

#include "common.h"
#include "sketch_hash.h"

namespace fastagg::cpu {

// Adds the sketches and the squared norms of rows to `out` and `squares`:
//   out[s][bucket(j)] += sign(j) * rows[s][j - begin]    for columns j in [begin, begin + d)
//   squares[s]        += sum_j rows[s][j - begin]^2
// with bucket and sign as in sketch_hash.h. All sums are float64, in ascending order of columns in
// every bucket: calls for neighbouring ranges of columns, in ascending order, give the bits of one
// call, on every instruction set. A row with a NaN or an infinity makes its square NaN or infinite.
//   out       // [S, k]
//   squares   // [S]
//   rows      // [S] pointers to d contiguous elements each
//   k         // a power of two in [kLeastBuckets, kMostBuckets]
//   begin     // the first column, >= 0
template <class T>  // float, Bfloat16 or Half
void sketch(double* out, double* squares, const T* const* rows, int64_t S, int64_t d, int64_t k,
            uint64_t seed, int64_t begin, const Parallel& parallel);

}  // namespace fastagg::cpu
