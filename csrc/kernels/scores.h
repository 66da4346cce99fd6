// SPDX-License-Identifier: Apache-2.0
// scores: similarities of rows, from their Gram matrix, and their running means over rounds.
#pragma once

#include <cstdint>

#include "common.h"

namespace fastagg::cpu {

// out[i][j] = (cos(x_i, x_j) + 1) / 2, in [0, 1] (FL-FDMS eq. 14); 0.5 where a row is zero.
//   gram, out   // [S, S]
void cosine_scores(const double* gram, int64_t S, double* out, const Parallel& parallel);

// out[i][j] = -|x_i - x_j|
//   gram, out   // [S, S]
void distance_scores(const double* gram, int64_t S, double* out, const Parallel& parallel);

// The running means of FL-FDMS eq. 15, for the pairs i != j of this round's cohort (only those in
// `pairs`, if given):
//   counts[a][b] += 1;  scores[a][b] += (round_scores[i][j] - scores[a][b]) / counts[a][b]
// A count stops at the largest value of its type, c; later scores then have the weight 1 / c.
//   scores, counts   // [K, K], changed
//   round_scores     // [S, S]
//   clients          // [S] distinct ids in [0, K): a = clients[i], b = clients[j]
//   pairs            // [S, S] 0/1 flags or nullptr: all
template <class Count>  // int16_t or int32_t
void update_scores(float* scores, Count* counts, int64_t K, const double* round_scores,
                   const int64_t* clients, int64_t S, const uint8_t* pairs,
                   const Parallel& parallel);

}  // namespace fastagg::cpu
