// SPDX-License-Identifier: Apache-2.0
// Sorts a tile of S rows and W columns of keys, each column by itself. Rows of a tile are vectors,
// so that an exchange of two rows is a minimum and a maximum.
//
// Runs of kRun rows are sorted in registers, by a network. Then neighbouring runs are merged, by
// the merger of Batcher's bitonic sort: the first stage compares positions from both ends, all
// later ones positions at a distance. Both put the smaller key first. So rows past the end, which
// hold kLastKey, stay where they are, and comparisons with them are left out. Up to four stages are
// done in registers by one pass over the tile: a pass of a single stage would wait for its stores.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../sort_keys.h"
#include "../sort_network.h"
#include "simd.h"

namespace fastagg::cpu {

constexpr int64_t kMostInRegisters = 32;  // rows that are sorted by one network

// Rows of a tile in memory, with those past the end: what the sort may touch.
inline int64_t tile_rows(int64_t S) {
  if (S <= kMostInRegisters) return S + S % 2;
  int64_t rows = 2 * kMostInRegisters;
  while (rows < S) rows *= 2;
  return rows;
}

// The keys of W floats with these bits, and the bits of the floats with these keys (sort_keys.h).
template <int W>
FASTAGG_INLINE Vec<int32_t, W> sort_keys(Vec<int32_t, W> bits) {
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

template <int W>
FASTAGG_INLINE void exchange(Vec<int32_t, W>& a, Vec<int32_t, W>& b) {
  const Vec<int32_t, W> low = a < b ? a : b, high = a < b ? b : a;
  a = low;
  b = high;
}

// Sorts N rows from `tile` on.
template <int W, int N>
FASTAGG_INLINE void sort_rows(int32_t* tile) {
  static constexpr SortNetwork<N> network;
  Vec<int32_t, W> x[N];
  unroll<N>([&](auto i) FASTAGG_INLINE_LAMBDA { x[i] = load<W>(tile + i * W); });
  unroll<network.count>(
      [&](auto i) FASTAGG_INLINE_LAMBDA { exchange<W>(x[network.low[i]], x[network.high[i]]); });
  unroll<N>([&](auto i) FASTAGG_INLINE_LAMBDA { store<W>(tile + i * W, x[i]); });
}

// Sorts n rows, 1 <= n <= kMost, and perhaps one more, which holds kLastKey. kMost is even.
template <int W, int kMost>
FASTAGG_INLINE void sort_few(int32_t* tile, int64_t n) {
  if constexpr (kMost > 2)
    if (n <= kMost - 2) return sort_few<W, kMost - 2>(tile, n);
  sort_rows<W, kMost>(tile);
}

// The stages of a merge with distances of 2^(kStages - 1) to 1, in units of k.
template <int W, int kStages>
FASTAGG_INLINE void halve(Vec<int32_t, W> (&x)[1 << kStages]) {
  unroll<kStages>([&](auto stage) FASTAGG_INLINE_LAMBDA {
    constexpr int kDistance = 1 << (kStages - 1 - stage);
    unroll<(1 << kStages) / 2>([&](auto i) FASTAGG_INLINE_LAMBDA {
      constexpr int kLow = i / kDistance * 2 * kDistance + i % kDistance;
      exchange<W>(x[kLow], x[kLow + kDistance]);
    });
  });
}

// A pass of kStages stages over rows [begin, end), whose number is `block` times an integer. Only
// the blocks that have rows in [first, last) are needed, and rows from S on hold kLastKey.
template <int W, int kStages>
FASTAGG_INLINE void halve_blocks(int32_t* tile, int64_t begin, int64_t end, int64_t block,
                                 int64_t S, int64_t first, int64_t last) {
  constexpr int kHeld = 1 << kStages;
  const int64_t distance = block / kHeld;
  for (int64_t base = begin; base < end; base += block) {
    if (base >= last || base + block <= first) continue;
    for (int64_t i = base; i < base + distance && i + distance < S; ++i) {
      Vec<int32_t, W> x[kHeld];
      int32_t* const from = tile + i * W;
      unroll<kHeld>([&](auto k) FASTAGG_INLINE_LAMBDA { x[k] = load<W>(from + k * distance * W); });
      halve<W, kStages>(x);
      unroll<kHeld>([&](auto k) FASTAGG_INLINE_LAMBDA { store<W>(from + k * distance * W, x[k]); });
    }
  }
}

// Merges the sorted runs [begin, begin + m) and [begin + m, begin + 2 m), m >= 2^(kStages - 1).
// Only rows [first, last) of the result are needed.
template <int W, int kStages>
FASTAGG_INLINE void merge_runs(int32_t* tile, int64_t begin, int64_t m, int64_t S, int64_t first,
                               int64_t last) {
  constexpr int kHeld = 1 << kStages, kHalf = kHeld / 2;
  const int64_t end = begin + 2 * m, distance = m / kHalf;
  for (int64_t i = 0; i < distance; ++i) {
    // Rows begin + i + k distance, and their partners end - 1 - i - k distance, ascending.
    int32_t* const a = tile + (begin + i) * W;
    const int64_t second = end - 1 - i - (kHalf - 1) * distance;
    if (second >= S) continue;  // all partners are past the end
    int32_t* const b = tile + second * W;
    Vec<int32_t, W> x[kHeld];
    unroll<kHalf>([&](auto k) FASTAGG_INLINE_LAMBDA {
      x[k] = load<W>(a + k * distance * W);
      x[kHalf + k] = load<W>(b + k * distance * W);
    });
    unroll<kHalf>([&](auto k) FASTAGG_INLINE_LAMBDA { exchange<W>(x[k], x[kHeld - 1 - k]); });
    Vec<int32_t, W> low[kHalf], high[kHalf];
    unroll<kHalf>([&](auto k) FASTAGG_INLINE_LAMBDA {
      low[k] = x[k];
      high[k] = x[kHalf + k];
    });
    halve<W, kStages - 1>(low);
    halve<W, kStages - 1>(high);
    unroll<kHalf>([&](auto k) FASTAGG_INLINE_LAMBDA {
      store<W>(a + k * distance * W, low[k]);
      store<W>(b + k * distance * W, high[k]);
    });
  }
  int64_t block = distance;
  for (; block >= kHeld; block /= kHeld)
    halve_blocks<W, kStages>(tile, begin, end, block, S, first, last);
  if (block >= 8) halve_blocks<W, 3>(tile, begin, end, block, S, first, last);
  if (block == 4) halve_blocks<W, 2>(tile, begin, end, block, S, first, last);
  if (block == 2) halve_blocks<W, 1>(tile, begin, end, block, S, first, last);
}

// Sorts the columns of a tile of S rows; only rows [first, last) of the result are defined.
//   tile   // [tile_rows(S), W]; rows from S on hold kLastKey
struct SortTile {
  template <int W>
  FASTAGG_INLINE static void run(int32_t* tile, int64_t S, int64_t first, int64_t last) {
    // Values of a run, and of a pass, that fit the registers together with temporary ones.
    constexpr int kRun = kRegisters<W> == 32 ? 32 : 16, kStages = kRegisters<W> == 32 ? 4 : 3;
    if (S <= kMostInRegisters) return sort_few<W, kMostInRegisters>(tile, S);
    const int64_t rows = tile_rows(S);
    // Merge as soon as two runs are there, because they are still in the L1 cache.
    for (int64_t begin = 0; begin < S; begin += kRun) {
      sort_few<W, kRun>(tile + begin * W, std::min<int64_t>(kRun, S - begin));
      const bool at_end = begin + kRun >= S;
      for (int64_t m = kRun; 2 * m <= rows; m *= 2) {
        const int64_t start = begin / (2 * m) * 2 * m;
        const bool complete = begin + kRun == start + 2 * m;
        if (!complete && !at_end) break;
        if (start + m >= S) continue;  // no second run
        const bool final = 2 * m == rows;
        merge_runs<W, kStages>(tile, start, m, S, final ? first : 0, final ? last : rows);
      }
    }
  }
};

}  // namespace fastagg::cpu
