// SPDX-License-Identifier: Apache-2.0
// How the one-pass row operations read memory: one block of columns at a time, and in it one group
// of rows at a time.
//
// A group is a few streams of many KB each, which the hardware prefetchers of AMD's processors
// handle well. Additional prefetch instructions made these loops slower there, at every distance
// and in every order that was tried. On Intel's they make loops with many streams faster
// (fetch_step).
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "../common.h"
#include "../elements.h"
#include "cache.h"
#include "simd.h"

namespace fastagg::cpu {

// Columns of a block, at most: streams of 64 KB of each row, and 128 KB of float64 sums (256 KB
// with a FadedTotal), which stay in L2. Streams of 16 KB were 5 % slower; streams of 128 KB were no
// faster.
constexpr int64_t kRowColumns = 16384;

// Rows of a group, which are added in float32; groups are added in float64. So a sum over any
// number of rows has the error of a sum of kGroup numbers, at the cost of float32 arithmetic.
constexpr int kGroup = 8;

constexpr int64_t kStep = 64;  // elements of a row in one unrolled step

// Columns of a block if nothing else limits it: at least four blocks for each worker, unless they
// would have less than 4 KB of a row.
inline int64_t block_columns(int64_t d, int workers) {
  return std::clamp<int64_t>(ceil_div(d, 4 * workers * kStep) * kStep, 1024, kRowColumns);
}

// Calls body(column, n, worker) for each block [column, column + n) of at most `columns` of d
// columns.
template <class Body>
void for_blocks(int64_t d, int64_t columns, const Parallel& parallel, const Body& body) {
  parallel.for_each(ceil_div(d, columns), [&](int64_t task, int worker) {
    const int64_t column = task * columns;
    body(column, std::min(columns, d - column), worker);
  });
}

// Calls body(begin, count) for the steps of [0, n): with a constant count, so that the compiler
// unrolls the loop in body, and once for the remainder.
template <class Body>
FASTAGG_INLINE void for_steps(int64_t n, const Body& body) {
  int64_t begin = 0;
  for (; begin + kStep <= n; begin += kStep) {
    body(begin, std::integral_constant<int64_t, kStep>());
#if defined(__clang__)
    // Otherwise LLVM merges the end of this loop with that of the loop in body, and loses what
    // FASTAGG_WHOLE_VECTORS says of it.
    asm volatile("");
#endif
  }
  body(begin, n - begin);
}

// for_steps, for a body whose result does not depend on where steps end. After the steps of kStep
// columns come steps of one vector, and then of one column. So every count is a constant. A body
// with a variable count took the compiler longer than one with a constant count.
template <int W, class Body>
FASTAGG_INLINE void for_even_steps(int64_t n, const Body& body) {
  int64_t begin = 0;
  for (; begin + kStep <= n; begin += kStep) {
    body(begin, std::integral_constant<int64_t, kStep>());
    asm volatile("");  // see for_steps
  }
  for (; begin + W <= n; begin += W) {
    body(begin, std::integral_constant<int64_t, W>());
    asm volatile("");
  }
  for (; begin < n; ++begin) {
    body(begin, std::integral_constant<int64_t, 1>());
    asm volatile("");  // otherwise this would be vectorized, as a loop over columns
  }
}

// Whether a call that moves `bytes` bytes should fetch rows of T ahead (fetch_step). If the last
// cache holds them, fetching took more time than it saved. Rows that are converted part by part
// (for_widened) are not fetched.
template <class T>
bool should_fetch(int64_t bytes) {
  return std::is_same_v<T, float> && kFetchRows && bytes > own_l3_bytes();
}

// How a call moves rows.
struct Transfer {
  bool fetched = false;   // rows are fetched ahead
  bool streamed = false;  // rows that are kept are stored past the caches (streaming.h)
};

// Fetches into L2 what the step of kStep columns after the next one reads of G rows, if that step
// is whole; the current step begins at `begin`. Nearer or farther, or into L1, was no faster.
template <int G, class T, class Count>
FASTAGG_INLINE void fetch_step(T* const (&rows)[G], int64_t begin, Count count) {
  if (count < kStep) return;
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int g = 0; g < G; ++g)
    for (int64_t k = 0; k < kStep; k += kLine) prefetch_l2(rows[g], begin + 2 * kStep + k);
}

// The float elements of a row of T: rows of float are used in place, const or not.
template <class T>
using Widened = std::conditional_t<std::is_same_v<T, float>, float, const float>;

// x[g] = elements [begin, begin + count) of row g as floats: in place, or converted into room[g].
template <int G, class T, class Count>
FASTAGG_INLINE void widen_step(Widened<T>* (&x)[G], T* const (&rows)[G], int64_t begin, Count count,
                               float (&room)[G][kStep]) {
  unroll<G>([&](auto g) FASTAGG_INLINE_LAMBDA {  // written out for each row: see Widen
    if constexpr (std::is_same_v<std::remove_const_t<T>, float>) {
      x[g] = rows[g] + begin;
    } else {
      for (int64_t k = 0; k < count; ++k) room[g][k] = widened(rows[g][begin + k]);
      x[g] = room[g];
    }
  });
}

constexpr int64_t kPart = 256;  // columns that are widened together: 8 KB of eight rows, in L1

// room[g] = n elements of row g from `column` on, as floats.
//
// Written out for each row. A hardware prefetcher follows the addresses that one instruction reads:
// with one loop for all rows, these jump from row to row, and rows in memory were read at half the
// speed or less.
template <int G>
struct Widen {
  template <int W, class T>
  FASTAGG_INLINE static void run(float (*room)[kPart], const T* const* rows, int64_t column,
                                 int64_t n) {
    const auto widen = [&](auto count) FASTAGG_INLINE_LAMBDA {
      unroll<G>([&](auto g) FASTAGG_INLINE_LAMBDA {
        const T* const from = rows[g] + column;
        for (int64_t k = 0; k < count; ++k) room[g][k] = widened(from[k]);
      });
    };
    if (n == kPart) return widen(std::integral_constant<int64_t, kPart>());
    widen(n);
  }
};

// Calls take(x, from, begin, count) for parts [begin, begin + count) of n columns, which begin at
// `column` of the rows: x[g][from + k] is column begin + k of them, in row g, as float. Rows of
// float are one part, and x is `rows`. Others are converted part by part, so that the code that
// `take` calls is compiled for float only.
template <int W, int G, class T, class Take>
FASTAGG_INLINE void for_widened(const T* const* rows, int64_t column, int64_t n, const Take& take) {
  if constexpr (std::is_same_v<T, float>) {
    take(rows, column, 0, n);
  } else {
    alignas(64) float room[G][kPart];
    const float* x[G];
    for (int g = 0; g < G; ++g) x[g] = room[g];
    for (int64_t begin = 0; begin < n; begin += kPart) {
      const int64_t count = std::min(kPart, n - begin);
      call<W, Widen<G>>(&room[0], rows, column + begin, count);
      take(&x[0], 0, begin, count);
    }
  }
}

// widen_step, and multiplies rows by `scales` [G] in `room`, if they are given. Rows with scale 1
// are not copied. The products are rounded: the empty assembly keeps the compiler from fusing one
// with what the caller subtracts from it.
template <int G, class T, class Count>
FASTAGG_INLINE void widen_step(Widened<T>* (&x)[G], T* const (&rows)[G], int64_t begin, Count count,
                               float (&room)[G][kStep], const float* scales) {
  widen_step(x, rows, begin, count, room);
  if (!scales) return;
  for (int g = 0; g < G; ++g) {
    if (scales[g] == 1.0f) continue;
    for (int64_t k = 0; k < count; ++k) room[g][k] = x[g][k] * scales[g];
    asm("" : "+m"(room[g]));
    x[g] = room[g];
  }
}

// Calls take(k, sum) for k in [0, n), with sum = sum_g weights[g] * rows[g][column + k] in float32.
// Inside a dispatched kernel, the compiler vectorizes this plain loop for the kernel's instruction
// set.
template <int W, int G, class T, class Take>
FASTAGG_INLINE void sum_group(const T* const* rows, const float* weights, int64_t column, int64_t n,
                              const Take& take) {
  const T* row[G];
  float w[G];
  for (int g = 0; g < G; ++g) {
    row[g] = rows[g] + column;
    w[g] = weights[g];
  }
  for_steps(n, [&](int64_t begin, auto count) FASTAGG_INLINE_LAMBDA {
    const float* x[G];
    float room[G][kStep];
    widen_step(x, row, begin, count, room);
    FASTAGG_WHOLE_VECTORS
    for (int64_t k = 0; k < count; ++k) {
      const auto number = [&](int g) FASTAGG_INLINE_LAMBDA { return x[g][k]; };
      take(begin + k, sum_of_products<W, G>(w, number));
    }
  });
}

}  // namespace fastagg::cpu
