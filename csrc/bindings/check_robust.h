// SPDX-License-Identifier: Apache-2.0
// Checks the arguments of the ops of robust rules, for all devices. Each function returns what the
// op needs of what was read for the check: the number of rows, which rows change, or the buckets.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <vector>

#include "../kernels/common.h"
#include "check_rows.h"
#include "checks.h"

namespace fastagg {

// Checks a Gram matrix, float64 [n, n], which need not be contiguous. Returns n.
inline int64_t check_gram(const at::Tensor& gram) {
  check_dense(gram, "gram");
  TORCH_CHECK_TYPE(gram.scalar_type() == at::kDouble, "gram: expected dtype Double, got ",
                   gram.scalar_type());
  TORCH_CHECK_VALUE(gram.dim() == 2 && gram.size(0) == gram.size(1),
                    "gram: expected a square matrix, got shape ", gram.sizes());
  check_memory(gram, "gram");
  return gram.size(0);
}

// A call cannot be interrupted.
constexpr int64_t kMostIterations = 100'000;

inline void check_iterations(int64_t iterations) {
  TORCH_CHECK_VALUE(iterations >= 0 && iterations <= kMostIterations, "iterations: expected 0 to ",
                    kMostIterations, ", got ", iterations);
}

// Returns n.
inline int64_t check_weiszfeld(const at::Tensor& gram, const at::Tensor& weights,
                               const at::Tensor& start, int64_t iterations) {
  const int64_t n = check_gram(gram);
  check_tensor(weights, "weights", at::kDouble, {n});
  check_tensor(start, "start", at::kDouble, {n});
  check_iterations(iterations);
  return n;
}

// Returns n, for a Gram matrix of n + 1 rows.
inline int64_t check_clip_towards(const at::Tensor& gram, const at::Tensor& weights,
                                  int64_t iterations) {
  const int64_t n = check_gram(gram) - 1;
  TORCH_CHECK_VALUE(n >= 1, "gram: expected at least two rows, got ", n + 1);
  check_tensor(weights, "weights", at::kDouble, {n});
  check_iterations(iterations);
  return n;
}

// Returns n.
inline int64_t check_krum(const at::Tensor& gram, int64_t num_byzantine) {
  const int64_t n = check_gram(gram);
  TORCH_CHECK_VALUE(num_byzantine >= 0, "num_byzantine: expected at least 0, got ", num_byzantine);
  return n;
}
inline int64_t check_krum(const at::Tensor& gram, int64_t num_byzantine, int64_t count) {
  const int64_t n = check_krum(gram, num_byzantine);
  TORCH_CHECK_VALUE(count >= 0 && count <= n, "count: expected 0 to ", n, ", got ", count);
  return n;
}

// Returns n, the number of rows in means.
inline int64_t check_nearest_means(const at::Tensor& gram, const at::Tensor& weights,
                                   int64_t count) {
  const int64_t size = check_gram(gram), n = weights.numel();
  check_tensor(weights, "weights", at::kDouble, {n});
  TORCH_CHECK_VALUE(n <= size, "weights: expected at most ", size, " numbers, got ", n);
  TORCH_CHECK_VALUE((count >= 1 && count <= n) || n == 0, "count: expected 1 to ", n, ", got ",
                    count);
  return n;
}

// Returns, for each row of the result, which of `rows` replaces it, or -1.
inline std::vector<int64_t> check_replace_rows(const at::Tensor& gram, const at::Tensor& changed,
                                               const at::Tensor& rows) {
  const int64_t m = check_gram(gram), C = changed.numel();
  check_tensor(rows, "rows", at::kDouble, {C, kAny});
  const int64_t n = rows.size(1);
  TORCH_CHECK_VALUE(n >= m, "rows: expected at least ", m, " columns, got ", n);
  const std::vector<int64_t> positions = check_positions(changed, n);
  std::vector<int64_t> fresh(n, -1);
  for (int64_t c = 0; c < C; ++c) fresh[positions[c]] = c;
  for (int64_t i = m; i < n; ++i)
    TORCH_CHECK_VALUE(fresh[i] >= 0, "changed: expected all positions from ", m, " on, ", i,
                      " is missing");
  return fresh;
}

// The buckets of n rows, of which the first `members` are in buckets of several rows.
struct BucketsOfRows {
  int64_t members;
  int64_t count;                // buckets of these
  int64_t size;                 // all buckets
  std::vector<int64_t> bucket;  // of each row
};

// Every bucket_size rows of `order` are a bucket, and buckets are numbered by their lowest row.
// Each row beyond `order` is a bucket of one row.
inline BucketsOfRows check_bucketed_gram(const at::Tensor& gram, const at::Tensor& order,
                                         const at::Tensor& weights, int64_t bucket_size) {
  const int64_t n = check_gram(gram), members = order.numel();
  check_tensor(order, "order", at::kLong, {members});
  check_tensor(weights, "weights", at::kDouble, {members});
  TORCH_CHECK_VALUE(members <= n, "order: expected at most ", n, " rows, got ", members);
  TORCH_CHECK_VALUE(bucket_size >= 1, "bucket_size: expected at least 1, got ", bucket_size);
  bucket_size = std::min(bucket_size, std::max<int64_t>(members, 1));  // ceil_div must not overflow
  const int64_t count = ceil_div(members, bucket_size);
  BucketsOfRows buckets{members, count, count + n - members, std::vector<int64_t>(n, -1)};
  const at::Tensor own = order.cpu();
  const auto* row = own.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < members; ++i) {
    TORCH_CHECK_VALUE(row[i] >= 0 && row[i] < members && buckets.bucket[row[i]] < 0,
                      "order: expected a permutation of [0, ", members, "), got ", row[i],
                      " at position ", i);
    buckets.bucket[row[i]] = i / bucket_size;
  }
  std::vector<int64_t> number(count, -1);
  int64_t next = 0;
  for (int64_t i = 0; i < members; ++i) {
    int64_t& bucket = buckets.bucket[i];
    if (number[bucket] < 0) number[bucket] = next++;
    bucket = number[bucket];
  }
  for (int64_t i = members; i < n; ++i) buckets.bucket[i] = count + i - members;
  return buckets;
}

}  // namespace fastagg
