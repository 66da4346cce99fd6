// SPDX-License-Identifier: Apache-2.0
// How most_similar is laid out on a GPU. A thread block compares a tile of queries with all rows of
// their group, a tile of rows at a time. Both are in shared memory, 64 columns at a time, as words
// of four numbers. A thread has 4 queries and 4 rows.
#pragma once

#include "../host_device.h"

namespace fastagg::cuda {

constexpr int kSimilarTile = 64;  // queries, and rows
constexpr int kSimilarThreads = 256;
constexpr int kSimilarSide = 16;   // threads that share queries: half of a warp
constexpr int kSimilarWords = 16;  // of a query or row in shared memory
// Words from one query or row to the next, odd, so that those at one place are in different banks.
constexpr int kSimilarStride = kSimilarWords + 1;

// The i-th query (of 4) of a thread in the tile: neighbouring threads share them.
FASTAGG_HD constexpr int similar_query(int thread, int i) {
  return i * kSimilarSide + thread / kSimilarSide;
}

// The j-th row (of 4) of a thread in the tile.
FASTAGG_HD constexpr int similar_row(int thread, int j) {
  return j * kSimilarSide + thread % kSimilarSide;
}

// The query or row that a thread copies to shared memory, and the first of its 4 words.
FASTAGG_HD constexpr int copied_row(int thread) {
  return thread / 4;
}
FASTAGG_HD constexpr int copied_word(int thread) {
  return thread % 4 * 4;
}

}  // namespace fastagg::cuda
