// SPDX-License-Identifier: Apache-2.0
// Functions that run on a GPU and, for the tests on machines without one, on a CPU.
#pragma once

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define FASTAGG_HD __host__ __device__ __forceinline__
#else
#define FASTAGG_HD __attribute__((always_inline)) inline  // see simd.h
#endif

namespace fastagg::cuda {

FASTAGG_HD constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

FASTAGG_HD constexpr int64_t at_most(int64_t a, int64_t limit) {
  return a < limit ? a : limit;
}

FASTAGG_HD constexpr int64_t at_least(int64_t a, int64_t limit) {
  return a > limit ? a : limit;
}

// The index of entry (i, j) of the lower triangle, row by row: (0, 0), (1, 0), (1, 1), (2, 0), ...
FASTAGG_HD constexpr int64_t triangle_index(int64_t i, int64_t j) {
  return i * (i + 1) / 2 + j;
}

// Its row: the largest i with i (i + 1) / 2 <= index, exact for any index < 2^61.
FASTAGG_HD int64_t triangle_row(int64_t index) {
  auto row = static_cast<int64_t>((sqrt(8.0 * static_cast<double>(index) + 1.0) - 1.0) / 2.0);
  while (triangle_index(row, 0) > index) --row;
  while (triangle_index(row + 1, 0) <= index) ++row;
  return row;
}

}  // namespace fastagg::cuda
