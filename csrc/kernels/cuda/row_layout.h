// SPDX-License-Identifier: Apache-2.0
// How the one-pass row operations are laid out on a GPU.
#pragma once

#include "../host_device.h"

namespace fastagg::cuda {

// Rows of a batch: a thread loads them together, 128 bytes in 16-byte accesses, and adds them in
// float32. Everything else is added in float64.
constexpr int kHeldRows = 8;
constexpr int kBlockThreads = 512;  // threads of a thread block, at most

// The shape of a thread block. It takes `vectors` neighbouring vectors of columns, and `splits`
// threads share the rows of each: thread (x, y) takes rows y, y + splits, ... of vector x.
struct RowBlock {
  int vectors, splits;
};

// As few splits as let a thread hold all its rows in registers (up to 512 rows), so that a kernel
// that needs them twice reads memory once; and at least 8 vectors, 128 bytes of each row. The shape
// depends on S alone, and so does the order of sums.
FASTAGG_HD constexpr RowBlock row_block(int64_t S) {
  int splits = 1;
  while (splits < 64 && splits * kHeldRows < S) splits *= 2;
  return {splits < 32 ? 256 / splits : 8, splits};
}

// The j-th row of batch b of split y; may be S or more.
FASTAGG_HD constexpr int64_t row_of(int splits, int y, int64_t batch, int j) {
  return (batch * kHeldRows + j) * splits + y;
}

FASTAGG_HD constexpr int64_t row_batches(int64_t S, int splits) {
  return ceil_div(S, int64_t{splits} * kHeldRows);
}

// The columns of int8 rows that a lane has in a scale block of 256 columns: neighbouring lanes have
// neighbouring columns.
constexpr int kLaneColumns = 8;
FASTAGG_HD constexpr int64_t scale_column(int64_t block, int lane, int j) {
  return (block * kLaneColumns + j) * 32 + lane;
}

// The number of elements of `bytes` bytes each, at most 8, that accesses of up to 16 bytes may take
// from addresses whose bitwise or is `bits`.
FASTAGG_HD constexpr int vector_width(std::uintptr_t bits, int bytes) {
  if (bits % 16 == 0) return 8;
  return bits % 8 == 0 ? 8 / bytes : bits % 4 == 0 ? 4 / bytes : 1;
}

}  // namespace fastagg::cuda
