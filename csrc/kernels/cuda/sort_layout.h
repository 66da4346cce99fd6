// SPDX-License-Identifier: Apache-2.0
// How the columns of S rows are sorted on a GPU. A thread block has a tile of columns in shared
// memory, with the rows past the end in it (kLastKey in ../sort_keys.h). Runs of up to 32 rows of
// a column are sorted by one thread, in registers. Then neighbouring runs are merged, by the merger
// of Batcher's bitonic sort, as in cpu/sort_tile.h: its first stage compares positions from both
// ends, all later ones positions at a distance.
#pragma once

#include "../host_device.h"

namespace fastagg::cuda {

constexpr int kSortThreads = 256;
constexpr int kMostRun = 32;           // values that a thread sorts
constexpr int64_t kMostSorted = 1024;  // rows: of 8 columns, 32 bytes of each, as one access reads
constexpr int kTileKeys = 8192;        // 32 KB, so that an SM holds several thread blocks
constexpr int kMostStages = 4;         // of a merge, in one pass: 16 values of each thread

// The rows of a tile, and its columns; powers of two.
struct SortTile {
  int rows, columns;
};

// S <= kMostSorted. Up to 32 rows a thread has a whole column.
FASTAGG_HD constexpr SortTile sort_tile(int64_t S) {
  int rows = 8;
  while (rows < S) rows *= 2;
  return {rows, rows < kMostRun ? kSortThreads : kTileKeys / rows};
}

// Two positions in a column, low < high, of which the smaller key goes to the lower one.
struct SortPair {
  int low, high;
};

// The first stage of a merge of runs of m rows: pair i of rows / 2.
FASTAGG_HD constexpr SortPair mirrored(int i, int m) {
  const int begin = i / m * 2 * m, offset = i % m;
  return {begin + offset, begin + 2 * m - 1 - offset};
}

// A pass of later stages in blocks of `block` rows, with 2^stages values of each thread: the first
// position of thread i of rows / 2^stages. The others follow at a distance of block / 2^stages.
FASTAGG_HD constexpr int halved(int i, int block, int stages) {
  const int distance = block >> stages;
  return i / distance * block + i % distance;
}

// The stages of the next pass in blocks of `block` >= 2 rows; the blocks after it are smaller by
// 2^stages.
FASTAGG_HD constexpr int stages_of(int block) {
  int stages = 1;
  while (stages < kMostStages && (block >> stages) > 1) ++stages;
  return stages;
}

// Odd-even merge sort has stages k = p, p / 2, ..., 1 for p = 1, 2, 4, ...: the lower position of
// comparison i, which ascends with i. The higher one follows k later.
FASTAGG_HD constexpr int64_t odd_even_low(int64_t i, int64_t p, int64_t k) {
  return (i & -k) * 2 + (i & (k - 1)) + (k & (p - 1));
}

// Whether a stage compares these positions: not those of two blocks of 2p values.
FASTAGG_HD constexpr bool odd_even_compares(int64_t low, int64_t p, int64_t k) {
  return (low ^ (low + k)) < 2 * p;
}

}  // namespace fastagg::cuda
