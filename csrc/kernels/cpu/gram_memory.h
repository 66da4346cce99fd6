// SPDX-License-Identifier: Apache-2.0
// How much scratch memory `gram` uses.
#pragma once

#include <algorithm>
#include <cstdint>

#include "gram_columns.h"
#include "gram_tiles.h"

namespace fastagg::cpu {

// Limit on the partial sums of the chunks in flight; one chunk may exceed it.
constexpr int64_t kPartialBytes = 64 << 20;

// The threads that `gram` uses for `tiles` tiles of R x C products over d columns.
template <int W>
Parallel gram_threads(const Parallel& parallel, int64_t S, int64_t tiles, int64_t d) {
  return parallel.for_work(4 * S * d, tiles * Shape<W>::R * Shape<W>::C * d);
}

// Scratch of `gram` with W lanes.
template <int W>
struct GramMemory {
  int64_t slots;   // float64 sums of all tiles
  int64_t window;  // chunks in flight, each with this many partial sums
  int64_t panels;  // floats of the packed strips of all workers

  GramMemory(int64_t tiles, int64_t strips, int64_t chunks, int workers)
      : slots(tiles * Shape<W>::kSlots),
        window(std::clamp<int64_t>(kPartialBytes / (slots * 8), 1,
                                   std::min(chunks, int64_t{2} * workers))),
        panels(workers * strips * Shape<W>::kPanel) {}

  int64_t bytes() const { return (1 + window) * slots * 8 + panels * 4; }
};

}  // namespace fastagg::cpu
