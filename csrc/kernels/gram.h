// SPDX-License-Identifier: Apache-2.0
// gram: the inner products of S rows. All similarity-based rules start from them.
#pragma once

#include <cstdint>

#include "common.h"
#include "row_source.h"

namespace fastagg::cpu {

// out[i][j] = sum_k rows[i][k] * rows[j][k], in float64, exactly symmetric.
//
//   rows    // [S] pointers to d contiguous floats each, anywhere in memory
//   pairs   // [S, S] symmetric 0/1 flags: compute these entries and the diagonal, in tiles of a
//           // few rows, and set the others to 0. nullptr: compute all entries
//   out     // [S, S]
//
// Products and sums are float32 inside blocks of at most 768 columns and float64 across blocks. An
// entry depends on its two rows alone, bit for bit: not on their positions, the other rows, `pairs`
// or the number of threads. A row that holds a NaN or an infinity has a non-finite diagonal entry.
// Rows whose squares leave the range of float32 are rescaled by powers of two, so finite rows have
// finite and accurate entries.
void gram(const float* const* rows, int64_t S, int64_t d, const uint8_t* pairs, double* out,
          const Parallel& parallel);

// Some rows of `gram`, bit for bit: out[c][j] is entry (changed[c], j). Of the other entries, only
// the diagonal is computed.
//   changed   // [C] distinct positions in [0, S), in any order
//   out       // [C, S]
void gram_rows(const float* const* rows, int64_t S, int64_t d, const int64_t* changed, int64_t C,
               double* out, const Parallel& parallel);

// gram_rows for few changed rows, in one pass over the rows where they are, without rescaling.
// Returns false and does nothing if C is too large for this to be faster than tiles.
//   squares   // [S] the diagonal entries of all rows, by which the caller decides about rescaling
bool gram_rows_streamed(const float* const* rows, int64_t S, int64_t d, const int64_t* changed,
                        int64_t C, double* out, double* squares, const Parallel& parallel);

// `gram` of all pairs and `weighted_sum` with beta = 0 in one pass, bit for bit: each block of
// columns is summed while it is in cache, so the rows are read from memory once.
//   sum       // [d]
//   weights   // [S]
void gram_and_sum(const float* const* rows, int64_t S, int64_t d, const double* weights,
                  double* out, float* sum, const Parallel& parallel);

// The same for rows that are computed while they are read, block by block.
void gram_and_sum(const RowSource& rows, int64_t S, int64_t d, const double* weights, double* out,
                  float* sum, const Parallel& parallel);

// Bytes of scratch memory that `gram` of all pairs and `gram_and_sum` use for rows in memory, on
// the instruction set in use. `gram` of some pairs needs at most 18 S^2 bytes more; rows that are
// computed need the memory of their blocks beside it.
int64_t gram_scratch(int64_t S, int64_t d, int threads);

}  // namespace fastagg::cpu
