// SPDX-License-Identifier: Apache-2.0
#include "gram_memory.h"

#include "../gram.h"
#include "tile_map.h"

namespace fastagg::cpu {
namespace {

template <int W>
int64_t bytes_of_all_pairs(int64_t S, int64_t d, const Parallel& parallel) {
  const int64_t strips = ceil_div(S, Shape<W>::R);
  const GramColumns cut(d);
  const int64_t tiles = all_tiles(S, Shape<W>::R, Shape<W>::C);
  const int workers = gram_threads<W>(parallel, S, tiles, d).workers;
  return GramMemory<W>(tiles, strips, cut.chunks, workers).bytes();
}

}  // namespace

int64_t gram_scratch(int64_t S, int64_t d, int threads) {
  if (S <= 0) return 0;
  const Parallel parallel{threads, nullptr};
  return with_lanes(current_isa(), [&](auto W) { return bytes_of_all_pairs<W>(S, d, parallel); });
}

}  // namespace fastagg::cpu
