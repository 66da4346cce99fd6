// SPDX-License-Identifier: Apache-2.0
// friends: which active client substitutes for an inactive one, and candidate elimination.
#pragma once

#include <cstdint>

#include "common.h"
#include "pair_state.h"

namespace fastagg::cpu {

// The friend of each client (FL-FDMS sec. 5.1):
//   friends[k] = k if k is active;
//   else the active i of highest scores[k][i] with counts[k][i] > 0, and candidates[k][i] if given;
//   the lowest such i on ties; -1 if there is none.
//   scores       // [K, K]
//   active       // [K] 0/1 flags
//   candidates   // rows k, or no data: all pairs
//   friends      // [K]
void select_friends(const float* scores, Counts counts, const uint8_t* active, Flags candidates,
                    int64_t K, int64_t* friends, const Parallel& parallel);

// Candidate elimination (FL-FDMS sec. 5.3). For each client k, let `best` be the largest
// scores[k][i] over its candidates i != k with counts[k][i] > 0. Every such candidate with
// best - scores[k][i] >= threshold is removed (candidates[k][i] = 0), except the best one itself
// (the lowest i on ties). Candidates that were never scored with k stay.
//   candidates   // changed
//   scores       // [K, K]
void eliminate(uint8_t* candidates, bool packed, const float* scores, Counts counts, int64_t K,
               double threshold, const Parallel& parallel);

}  // namespace fastagg::cpu
