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

// For operations that need each row once: fewer splits, because adding them up takes as long as a
// few batches of rows. A thread has up to kSummedRows rows (S <= 2048), in several batches.
constexpr int kSummedRows = 64;
constexpr int kSumThreads = 256;  // of a thread block
FASTAGG_HD constexpr RowBlock sum_block(int64_t S) {
  int splits = 1;
  while (splits < 32 && splits * kSummedRows < S) splits *= 2;
  return {kSumThreads / splits, splits};
}

// The j-th row of batch b of split y; may be S or more.
FASTAGG_HD constexpr int row_of(int splits, int y, int batch, int j) {
  return (batch * kHeldRows + j) * splits + y;
}

FASTAGG_HD constexpr int row_batches(int S, int splits) {
  return static_cast<int>(ceil_div(S, splits * kHeldRows));
}

// Rows of which a thread block copies its tables (addresses, weights) to shared memory, at most.
// The tables of more rows are read from memory.
constexpr int64_t kStagedRows = 1024;

// Bytes of dynamic shared memory that a kernel has without asking for them.
constexpr int64_t kUnaskedShared = 48 << 10;

// The shared memory of a thread block, in bytes from its beginning. The sums of splits have two
// places, which tasks take in turn, so that no thread has to wait before it writes.
struct RowShared {
  int place;   // of sums: [splits, columns of the thread block] double
  int means;   // [columns of the thread block] float
  int tables;  // [tables, S] of 8 bytes
  int bytes;
};
FASTAGG_HD constexpr RowShared row_shared(RowBlock block, int width, int64_t S, int tables) {
  RowShared at{};
  const int columns = block.vectors * width;
  if (block.splits > 1) {
    at.place = block.splits * columns * 8;
    at.means = 2 * at.place;
    at.tables = at.means + columns * 4;
  }
  at.bytes = at.tables + (S <= kStagedRows ? tables * static_cast<int>(S) * 8 : 0);
  return at;
}

// How the threads of a thread block add up the sums of its splits. A tree adds sums that are half
// of the splits apart, then a quarter, ...: a thread reads `leaves` sums of a column and adds them
// in registers; `parts` neighbouring threads then add theirs by shuffles.
struct SplitTree {
  int leaves, parts;
};
FASTAGG_HD constexpr SplitTree split_tree(int splits, int width) {
  const int leaves = width < 2 ? 2 : width;  // as many as it has written
  return splits < leaves ? SplitTree{splits, 1} : SplitTree{leaves, splits / leaves};
}

// The columns of a task whose sums thread t of a thread block has in the end: V neighbours, its
// own, if nothing is split; else those of its part of the tree, of which part 0 has them.
struct Share {
  int64_t begin;
  int stride;
  int count;  // columns begin, begin + stride, ... below begin + count, which may be negative

  FASTAGG_HD constexpr int64_t column(int n) const { return begin + n * stride; }
  FASTAGG_HD constexpr bool has(int n) const { return n * stride < count; }
};
FASTAGG_HD constexpr Share share_of(RowBlock block, int width, int64_t task, int64_t d, int t) {
  const int64_t columns = int64_t{block.vectors} * width, first = task * columns;
  const int there = static_cast<int>(at_most(columns, d - first));
  if (block.splits == 1) return {first + int64_t{t} * width, 1, there - t * width};
  const int parts = split_tree(block.splits, width).parts, own = t / parts;
  return {first + own, block.vectors * block.splits / parts, t % parts == 0 ? there - own : 0};
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
