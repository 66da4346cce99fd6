// SPDX-License-Identifier: Apache-2.0
// How a sketch is divided among thread blocks: a thread block has a unit of buckets of one row, and
// a part of the columns.
#pragma once

#include "../host_device.h"
#include "../sketch_hash.h"

namespace fastagg::cuda {

constexpr int kSketchThreads = 128;
constexpr int kOwnBuckets = kUnitBuckets / kSketchThreads;  // of a thread, in one unit

// The j-th bucket of a thread in a unit. All of them have signs in one word.
FASTAGG_HD constexpr int64_t bucket_of(int64_t unit, int thread, int j) {
  return unit * kUnitBuckets + int64_t{j} * kSketchThreads + thread;
}

// Parts of the columns [begin, begin + d). They end at the same columns in every call with this d.
struct SketchParts {
  int64_t first, end;  // blocks
  int64_t blocks;      // of a part
  int64_t count;

  FASTAGG_HD constexpr int64_t part_begin(int64_t part) const {
    return at_least((first / blocks + part) * blocks, first);
  }
  FASTAGG_HD constexpr int64_t part_end(int64_t part) const {
    return at_most((first / blocks + part + 1) * blocks, end);
  }
};

// Parts have 2^15 columns, or more if there would be more than 256 of them. d >= 1.
FASTAGG_HD constexpr SketchParts sketch_parts(int64_t begin, int64_t d, int64_t k) {
  int64_t columns = int64_t{1} << 15;
  while (d / columns > 256) columns *= 2;
  const int64_t first = begin / k, end = ceil_div(begin + d, k), blocks = columns / k;
  return {first, end, blocks, ceil_div(end, blocks) - first / blocks};
}

// Numbers of the workspace for one row, and rows that are handled together.
FASTAGG_HD constexpr int64_t sketch_numbers(const SketchParts& parts, int64_t k) {
  return parts.count * (k + sketch_units(k));
}
FASTAGG_HD constexpr int64_t sketch_rows(const SketchParts& parts, int64_t k, int64_t S) {
  constexpr int64_t kNumbers = int64_t{8} << 20;  // 64 MB
  return at_most(S, at_least(kNumbers / sketch_numbers(parts, k), 1));
}

}  // namespace fastagg::cuda
