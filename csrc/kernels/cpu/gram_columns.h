// SPDX-License-Identifier: Apache-2.0
// How `gram` cuts d, on which its bits depend: into chunks (parallel tasks, whose sums are added in
// float64 and in order) of blocks (summed in float32).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../common.h"

namespace fastagg::cpu {

// Columns summed in float32 at most. Of 768, five rows are 15 KB: two strips and what is prefetched
// for the next fit a 48 KB L1 cache, and adding up a tile's lanes costs a tenth of its time.
constexpr int64_t kMaxBlock = 768;
// A chunk has at least so many blocks, since adding up its partial sums costs as much as a
// tenth of a block,
// and there are at most so many chunks: enough for the threads of a server, few enough to add up.
constexpr int64_t kChunkBlocks = 8;
constexpr int64_t kMaxChunks = 64;

struct GramColumns {
  int64_t block, chunk, chunks;  // columns, columns, number of chunks

  // Errors of blocks of n columns are independent: those of adding up n / 16 products a lane leave
  // n / sqrt(d) in the result, those of adding up the lanes sqrt(n / d). With n below 1.5 sqrt(d)
  // and d / 200, all cosines that we have looked at were within 1e-8 from d = 10,000 on.
  explicit GramColumns(int64_t d) {
    constexpr int64_t kLanes = 16;
    const int64_t most = std::min<int64_t>(d / 200, std::llround(1.5 * std::sqrt(d)));
    block = std::clamp<int64_t>(most / kLanes * kLanes, kLanes, kMaxBlock);
    chunk = std::max(kChunkBlocks, ceil_div(ceil_div(d, block), kMaxChunks)) * block;
    chunks = std::max<int64_t>(ceil_div(d, chunk), 1);
  }
};

}  // namespace fastagg::cpu
