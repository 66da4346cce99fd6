// SPDX-License-Identifier: Apache-2.0
// How `gram` cuts d columns into chunks and blocks. Its bits depend on it: a block is summed in
// float32, blocks and chunks are added in float64, chunks in ascending order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../common.h"

namespace fastagg::cpu {

// Columns of a block, at most. Five rows of 768 columns are 15 KB: two strips, and what is
// prefetched for the next, fit a 48 KB L1 cache. Adding up a tile's lanes costs a tenth of its
// time.
constexpr int64_t kMaxBlock = 768;
// Blocks of a chunk, at least: adding the partial sums of a chunk costs a tenth of a block.
constexpr int64_t kChunkBlocks = 8;
// Chunks, at most: enough tasks for the threads of a server, and few partial sums to add.
constexpr int64_t kMaxChunks = 64;

struct GramColumns {
  int64_t block, chunk, chunks;  // columns, columns, number of chunks

  // The rounding errors of blocks of n columns are independent, unless all numbers of a row have
  // one magnitude. Adding n / 16 products in each lane (more if there are fewer lanes) leaves an
  // error proportional to n / sqrt(d) in the result; adding the lanes leaves one proportional to
  // sqrt(n / d). With n below 1.5 sqrt(d) and d / 200, all measured cosines were exact to 1e-8 from
  // d = 10,000 on.
  explicit GramColumns(int64_t d) {
    constexpr int64_t kLanes = 16;
    const int64_t most = std::min<int64_t>(d / 200, std::llround(1.5 * std::sqrt(d)));
    block = std::clamp<int64_t>(most / kLanes * kLanes, kLanes, kMaxBlock);
    chunk = std::max(kChunkBlocks, ceil_div(ceil_div(d, block), kMaxChunks)) * block;
    chunks = std::max<int64_t>(ceil_div(d, chunk), 1);
  }
};

}  // namespace fastagg::cpu
