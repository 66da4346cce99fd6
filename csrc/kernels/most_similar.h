// SPDX-License-Identifier: Apache-2.0
// most_similar: for each query, the row with the largest scaled inner product.
#pragma once

#include <cstdint>

#include "common.h"

namespace fastagg {

// The inner product of two vectors of this many int8 numbers is at most 2^24. float32 holds all
// whole numbers up to there, so that products can be added in float32 in any order.
constexpr int64_t kMostSketchColumns = 1024;

namespace cpu {

// Queries and rows are divided into groups. Group g compares the queries query_ids[i] for i in
// [splits[2 g], splits[2 g + 2]) with the rows row_ids[j] for j in [splits[2 g + 1],
// splits[2 g + 3]).
//
// For each i, best[i] is the position j of the row in its group with the largest
//   factors[row_ids[j]] * (queries[query_ids[i]] @ rows[row_ids[j]]),
// rounded to float32; the lowest j on ties. similarity[i] is that number. Without rows in the group
// they are -1 and -infinity.
//   queries      // [any, k]
//   query_ids    // [Q], or null: query i is row i of `queries`
//   rows         // [any, k]
//   factors      // [any], finite
//   row_ids      // [R], or null: j is row j of `rows`
//   splits       // [groups + 1, 2], ascending in both columns
//   k            // at most kMostSketchColumns
//   best, similarity   // [Q]
void most_similar(const int8_t* queries, const int64_t* query_ids, const int8_t* rows,
                  const float* factors, const int64_t* row_ids, const int64_t* splits,
                  int64_t groups, int64_t k, int64_t* best, float* similarity,
                  const Parallel& parallel);

}  // namespace cpu
}  // namespace fastagg
