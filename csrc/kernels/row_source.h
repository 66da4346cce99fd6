// SPDX-License-Identifier: Apache-2.0
// Rows that a kernel computes from others, block by block, while it reads them.
#pragma once

#include <cstdint>

namespace fastagg::cpu {

class RowSource {
 public:
  virtual ~RowSource() = default;
  // Writes columns [column, column + n) of rows [first, last) to `to`, row s at
  // (s - first) * stride. Called by several threads at a time.
  virtual void read(int64_t first, int64_t last, int64_t column, int64_t n, float* to,
                    int64_t stride) const = 0;
  // For prefetching: pointers p, one for each row, so that `read` reads floats from p[s] + column
  // on, n of them; nullptr if it reads anything else.
  virtual const float* const* ahead(int64_t column, int64_t n) const = 0;
};

}  // namespace fastagg::cpu
