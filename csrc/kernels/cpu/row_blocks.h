// SPDX-License-Identifier: Apache-2.0
// How the one-pass row operations go through memory: in blocks of columns, a group of rows at a
// time.
//
// There is no software prefetch here, on purpose. A group is a handful of streams that run for many
// KB each, which is what hardware prefetchers are made for; prefetch instructions on top of them
// only made these loops slower, at any distance and in any order that we tried.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "../common.h"
#include "../elements.h"
#include "simd.h"

namespace fastagg::cpu {

// Columns of a block at most: 64 KB of each row in one go, 128 KB of float64 sums, which stay in
// L2. Streams of 16 KB were 5 % slower, of 128 KB no faster.
constexpr int64_t kRowColumns = 16384;

// Rows that are added in float32; groups are added in float64. A sum over any number of rows has
// the error of a sum of kGroup numbers, at the cost of float32 arithmetic.
constexpr int kGroup = 8;

constexpr int64_t kStep = 64;  // floats of a row that are handled in one unrolled step

// Columns of a block where nothing else limits it: at least 32 blocks, if each gets 4 KB of a row.
inline int64_t block_columns(int64_t d) {
  return std::clamp<int64_t>(ceil_div(d, 32 * kStep) * kStep, 1024, kRowColumns);
}

// Calls body(column, n, worker) for blocks of up to `columns` columns [column, column + n) of d.
template <class Body>
void for_blocks(int64_t d, int64_t columns, const Parallel& parallel, const Body& body) {
  parallel.for_each(ceil_div(d, columns), [&](int64_t task, int worker) {
    const int64_t column = task * columns;
    body(column, std::min(columns, d - column), worker);
  });
}

// Calls body(begin, count) for the steps of [0, n): a constant count, which the compiler unrolls,
// and one remainder.
template <class Body>
FASTAGG_INLINE void for_steps(int64_t n, const Body& body) {
  int64_t begin = 0;
  for (; begin + kStep <= n; begin += kStep) body(begin, std::integral_constant<int64_t, kStep>());
  body(begin, n - begin);
}

// A row's element as arithmetic takes it: rows of float are used where they are, const or not.
template <class T>
using Widened = std::conditional_t<std::is_same_v<T, float>, float, const float>;

// x[g] = `count` elements of row g from `begin` as floats: a copy in room[g] if they are shorter.
template <int G, class T, class Count>
FASTAGG_INLINE void widen_step(Widened<T>* (&x)[G], T* const (&rows)[G], int64_t begin, Count count,
                               float (&room)[G][kStep]) {
  for (int g = 0; g < G; ++g) {
    if constexpr (std::is_same_v<std::remove_const_t<T>, float>) {
      x[g] = rows[g] + begin;
    } else {
      for (int64_t k = 0; k < count; ++k) room[g][k] = widened(rows[g][begin + k]);
      x[g] = room[g];
    }
  }
}

}  // namespace fastagg::cpu
