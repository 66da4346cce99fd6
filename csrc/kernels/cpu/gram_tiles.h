// SPDX-License-Identifier: Apache-2.0
// The tiles of `gram`: the dot products of a strip's rows with other rows over one block of
// columns, in registers.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "gram_columns.h"
#include "lane_sums.h"
#include "simd.h"

namespace fastagg::cpu {

template <int W>
struct Shape {
  // Rows of a strip, and of a tile beside it: the R * C sums and C + 1 operands of a tile fill the
  // registers. The baseline of x86-64 needs a register for a product, because it has no
  // multiply-add.
  static constexpr int R = kRegisters<W> >= 32 ? 5 : W == 8 ? 4 : 3;
  static constexpr int C = kRegisters<W> >= 32 ? 5 : 3;
  static_assert(R * C + C + 1 <= kRegisters<W>);
  // Whether the last tiles of a strip prefetch into L1 what the next strip reads first. Tiles of
  // 4 x 3 are so short that this takes more time than it saves.
  static constexpr bool kPrefetchStrip = kRegisters<W> >= 32;
  // The sums of an off-diagonal tile, `rows` x `others`, and of a diagonal tile, the lower triangle
  // of `rows` x `rows`.
  template <int rows, int others>
  using OffSums = LaneSums<W, rows * others>;
  template <int rows>
  using DiagonalSums = LaneSums<W, rows*(rows + 1) / 2>;
  static constexpr int kSlots = OffSums<R, C>::kSlots;  // float64 sums kept for every tile
  static_assert(DiagonalSums<R>::kSlots <= kSlots);
  static constexpr int64_t kPanel = R * kMaxBlock;  // floats of a packed strip, at most
};

// Where a panel has vector k of row i: a vector of each row in turn, or `block` columns of one row
// after another where a tile reads parts of two panels.
template <int W>
FASTAGG_INLINE int64_t packed_at(int64_t block, int64_t k, int i) {
  constexpr int R = Shape<W>::R;
  if constexpr (R == Shape<W>::C) return (k * R + i) * W;
  return i * block + k * W;
}

// Rows of panels, the first of them at `data` ...
template <int W>
struct Packed {
  const float* data;
  int64_t block;
  FASTAGG_INLINE Vec<float, W> at(int64_t k, int i) const {
    return load<W>(data + packed_at<W>(block, k, i));
  }
};
// ... or rows in place.
template <int W, int rows>
struct InPlace {
  const float* row[rows];
  FASTAGG_INLINE InPlace(const float* const* first, int64_t column) {
    unroll<rows>([&](auto i) FASTAGG_INLINE_LAMBDA { row[i] = first[i] + column; });
  }
  FASTAGG_INLINE Vec<float, W> at(int64_t k, int i) const { return load<W>(row[i] + k * W); }
};

// Makes the compiler hold v in a register here. Otherwise GCC reorders unrolled multiply-adds until
// an accumulator has no register left, which takes twice as long. Clang does not, and refuses wide
// vectors as operands of assembly in a function that gets its target by inlining.
template <class V>
FASTAGG_INLINE void hold(V& v) {
#if defined(__clang__)
  (void)v;
#elif defined(__x86_64__)
  asm("" : "+v"(v));
#elif defined(__aarch64__)
  asm("" : "+w"(v));
#else
  (void)v;
#endif
}

// Calls body(k) for k in [0, steps), and fetch(k) before each iteration. With 16 registers, an
// iteration is a cache line of 16 floats, so that few multiply-adds do not need as many
// instructions for addresses and prefetching. With 32, it is one vector: 25 multiply-adds need
// fewer, and GCC would move operands of the next vector into registers that sums need.
template <int W, class Fetch, class Body>
FASTAGG_INLINE void for_vectors(int64_t steps, const Fetch& fetch, const Body& body) {
  constexpr int kVectors = kRegisters<W> >= 32 ? 1 : 16 / W;
  int64_t k = 0;
  for (; k + kVectors <= steps; k += kVectors) {
    fetch(k);
    unroll<kVectors>([&](auto v) FASTAGG_INLINE_LAMBDA { body(k + v); });
  }
  if constexpr (kVectors > 1)
    for (; k < steps; ++k) body(k);
}

// What a tile prefetches while it computes: one cache line of each of these rows for every line of
// its own, of the first `to_l1` into L1. Rows of the next block go to L2 only; in an L1 cache of
// 32 KB they evicted what the tiles of this block read (20 x 1M took 1.2 times as long).
template <int to_l1, int to_l2>
struct Prefetch {
  std::array<const float*, to_l1 + to_l2> rows;
  FASTAGG_INLINE void at(int64_t k) const {
    unroll<to_l1>([&](auto i) FASTAGG_INLINE_LAMBDA { prefetch(rows[i] + k); });
    unroll<to_l2>([&](auto i) FASTAGG_INLINE_LAMBDA { prefetch_l2(rows[to_l1 + i] + k); });
  }
};

// What there is to prefetch for a tile: a row that the next strip reads first, and up to two rows
// of the next block. A pointer that equals `idle` stands for nothing; it is safe to prefetch.
struct Upcoming {
  const float *first_of_strip, *of_block, *of_block_too, *idle;
};

// Calls run(the Prefetch of a tile) with no more than it needs, because the instructions take time
// even if the line is in cache.
template <int W, class Run>
FASTAGG_INLINE void with_prefetch(const Upcoming& next, const Run& run) {
  const auto [first, one, two, idle] = next;
  if constexpr (Shape<W>::kPrefetchStrip) {
    if (two != idle) return run(Prefetch<1, 2>{{first, one, two}});
    if (first != idle) return run(Prefetch<1, 1>{{first, one}});
  } else {
    if (two != idle) return run(Prefetch<0, 2>{{one, two}});
  }
  if (one != idle) return run(Prefetch<0, 1>{{one}});
  run(Prefetch<0, 0>());
}

// At its start, a tile prefetches the sums to which it will add: the sums of many tiles do not stay
// in L2.
template <int W>
FASTAGG_INLINE void prefetch_sums(double* sums) {
  for (int k = 0; k < Shape<W>::kSlots; k += 8) __builtin_prefetch(sums + k, 1, 3);
}

// sums += the products of `rows` rows a with `others` rows b over `steps` vectors.
template <int W, int rows, int others, class A, class B, class Next>
FASTAGG_INLINE void off_diagonal_tile(const A& a, const B& b, int64_t steps, double* sums,
                                      const Next& next) {
  prefetch_sums<W>(sums);
  Vec<float, W> sum[rows * others] = {};
  const auto fetch = [&](int64_t k) FASTAGG_INLINE_LAMBDA { next.at(k * W); };
  for_vectors<W>(steps, fetch, [&](int64_t k) FASTAGG_INLINE_LAMBDA {
    Vec<float, W> y[others];
    unroll<others>([&](auto j) FASTAGG_INLINE_LAMBDA { y[j] = b.at(k, j); });
    unroll<rows>([&](auto i) FASTAGG_INLINE_LAMBDA {
      const Vec<float, W> x = a.at(k, i);
      unroll<others>([&](auto j) FASTAGG_INLINE_LAMBDA { sum[i * others + j] += x * y[j]; });
    });
    unroll<rows * others>([&](auto n) FASTAGG_INLINE_LAMBDA { hold(sum[n]); });
  });
  Shape<W>::template OffSums<rows, others>::add(sum, sums);
}

template <int W, int rows>
FASTAGG_INLINE void add_triangle(const Vec<float, W>* x, Vec<float, W>* sum) {
  unroll<rows>([&](auto i) FASTAGG_INLINE_LAMBDA {
    unroll<i + 1>([&](auto j) FASTAGG_INLINE_LAMBDA { sum[i * (i + 1) / 2 + j] += x[i] * x[j]; });
  });
  unroll<rows*(rows + 1) / 2>([&](auto n) FASTAGG_INLINE_LAMBDA { hold(sum[n]); });
}

// sums += the products of a strip with itself over `steps` vectors: the lower triangle.
template <int W, int rows, class Next>
FASTAGG_INLINE void diagonal_tile(const InPlace<W, rows>& a, int64_t steps, double* sums,
                                  const Next& next) {
  Vec<float, W> sum[rows * (rows + 1) / 2] = {};
  const auto fetch = [&](int64_t k) FASTAGG_INLINE_LAMBDA { next.at(k * W); };
  for_vectors<W>(steps, fetch, [&](int64_t k) FASTAGG_INLINE_LAMBDA {
    Vec<float, W> x[rows];
    unroll<rows>([&](auto i) FASTAGG_INLINE_LAMBDA { x[i] = a.at(k, i); });
    add_triangle<W, rows>(x, sum);
  });
  Shape<W>::template DiagonalSums<rows>::add(sum, sums);
}

// diagonal_tile for any number of columns, which also packs the rows, each times its scale, into
// `panel`, with zeros up to a whole vector.
template <int W, int rows, class Next>
FASTAGG_INLINE void packing_tile(const InPlace<W, rows>& a, const float* scales, int64_t block,
                                 int64_t columns, float* panel, double* sums, const Next& next) {
  Vec<float, W> sum[rows * (rows + 1) / 2] = {};
  // Vector k of the panel, from vector `from` of `source`.
  const auto add = [&](int64_t k, const auto& source, int64_t from) FASTAGG_INLINE_LAMBDA {
    Vec<float, W> x[rows];
    unroll<rows>([&](auto i) FASTAGG_INLINE_LAMBDA {
      x[i] = source.at(from, i) * scales[i];
      store<W>(panel + packed_at<W>(block, k, i), x[i]);
    });
    add_triangle<W, rows>(x, sum);
  };
  const int64_t k = columns / W;
  const auto fetch = [&](int64_t k) FASTAGG_INLINE_LAMBDA { next.at(k * W); };
  for_vectors<W>(k, fetch, [&](int64_t k) FASTAGG_INLINE_LAMBDA { add(k, a, k); });
  if (k * W < columns) {
    float tail[rows][W] = {};
    const float* ends[rows];
    for (int i = 0; i < rows; ++i) {
      std::copy(a.row[i] + k * W, a.row[i] + columns, tail[i]);
      ends[i] = tail[i];
    }
    add(k, InPlace<W, rows>(ends, 0), 0);
  }
  Shape<W>::template DiagonalSums<rows>::add(sum, sums);
}

// Tiles as functions of their own (`call`): if several are inlined into one function, GCC 12 loads
// operands of a 4 x 3 tile from memory again and again, and stores sums of a 5 x 5 tile there.
template <int rows, int others>
struct PackedTile {
  template <int W, class Next>
  FASTAGG_INLINE static void run(const float* a, const float* b, int64_t block, int64_t steps,
                                 double* sums, Next next) {
    off_diagonal_tile<W, rows, others>(Packed<W>{a, block}, Packed<W>{b, block}, steps, sums, next);
  }
};
template <int rows, int others>
struct TileInPlace {
  template <int W, class Next>
  FASTAGG_INLINE static void run(const float* const* a, const float* const* b, int64_t column,
                                 int64_t steps, double* sums, Next next) {
    off_diagonal_tile<W, rows, others>(InPlace<W, rows>(a, column), InPlace<W, others>(b, column),
                                       steps, sums, next);
  }
};
template <int rows>
struct DiagonalTile {
  template <int W, class Next>
  FASTAGG_INLINE static void run(const float* const* a, int64_t column, int64_t steps, double* sums,
                                 Next next) {
    diagonal_tile<W, rows>(InPlace<W, rows>(a, column), steps, sums, next);
  }
};
template <int rows>
struct PackingTile {
  template <int W, class Next>
  FASTAGG_INLINE static void run(const float* const* a, int64_t column, const float* scales,
                                 int64_t block, int64_t columns, float* panel, double* sums,
                                 Next next) {
    packing_tile<W, rows>(InPlace<W, rows>(a, column), scales, block, columns, panel, sums, next);
  }
};

}  // namespace fastagg::cpu
