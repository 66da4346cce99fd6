// SPDX-License-Identifier: Apache-2.0
// The ops of the robust rules on a GPU, as ops_cuda.cpp registers them. `order` and `changed` say
// which memory the kernels read, so they are checked on the CPU, and `order` is fetched if it is on
// a GPU. Nothing else waits.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/mm.h>

#include <numeric>
#include <tuple>
#include <vector>

#include "../kernels/nearest_rows.h"
#include "check_robust.h"
#include "cuda_launch.h"

namespace fastagg {
namespace {

// The numbers of a contiguous float64 tensor, in memory of the device. It may be on the CPU.
at::Tensor on_device(const OnDevice& on, const at::Tensor& numbers, const char* name) {
  if (numbers.is_cuda()) {
    check_same_device(numbers, name, on.device());
    return numbers;
  }
  const at::Tensor there = on.empty(numbers.sizes(), at::kDouble);
  check_launch(
      cuda::store_words(reinterpret_cast<const uint64_t*>(numbers.const_data_ptr<double>()),
                        numbers.numel(),
                        reinterpret_cast<uint64_t*>(there.mutable_data_ptr<double>()), on.stream()),
      "store_words", numbers.numel(), " words");
  return there;
}

// Scratch memory for the lists of n rows.
at::Tensor room_for_lists(const OnDevice& on, int64_t n) {
  return on.empty({n, n}, at::kDouble);
}

at::Tensor krum_scores(const at::Tensor& gram, int64_t num_byzantine) {
  const int64_t n = check_krum(gram, num_byzantine);
  const OnDevice on(gram, "gram");
  const at::Tensor own = gram.contiguous(), lists = room_for_lists(on, n);
  at::Tensor scores = on.empty({n}, at::kDouble);
  check_launch(
      cuda::krum_scores(own.const_data_ptr<double>(), n, cpu::krum_neighbours(n, num_byzantine),
                        scores.mutable_data_ptr<double>(), lists.mutable_data_ptr<double>(),
                        on.stream()),
      "krum_scores", "gram [", n, ", ", n, "]");
  return scores;
}

at::Tensor krum_selection(const at::Tensor& gram, int64_t num_byzantine, int64_t count) {
  const int64_t n = check_krum(gram, num_byzantine, count);
  const OnDevice on(gram, "gram");
  const at::Tensor own = gram.contiguous(), lists = room_for_lists(on, n);
  const at::Tensor scores = on.empty({n}, at::kDouble), is_out = on.empty({n}, at::kByte);
  at::Tensor chosen = on.empty({count}, at::kLong);
  check_launch(
      cuda::krum_selection(own.const_data_ptr<double>(), n, num_byzantine, count,
                           chosen.mutable_data_ptr<int64_t>(), lists.mutable_data_ptr<double>(),
                           scores.mutable_data_ptr<double>(), is_out.mutable_data_ptr<uint8_t>(),
                           on.stream()),
      "krum_selection", "gram [", n, ", ", n, "], ", count, " choices");
  return chosen;
}

// The two products are torch's: they are dense, and larger than all else here.
std::tuple<at::Tensor, at::Tensor> nearest_means(const at::Tensor& gram, const at::Tensor& weights,
                                                 int64_t count) {
  const int64_t n = check_nearest_means(gram, weights, count), size = gram.size(0);
  const OnDevice on(gram, "gram");
  const at::Tensor own = gram.contiguous(), lists = room_for_lists(on, n);
  const at::Tensor given = on_device(on, weights, "weights");
  const at::Tensor mixing = on.empty({size, size}, at::kDouble);
  check_launch(
      cuda::nearest_shares(own.const_data_ptr<double>(), size, n, given.const_data_ptr<double>(),
                           count, mixing.mutable_data_ptr<double>(),
                           lists.mutable_data_ptr<double>(), on.stream()),
      "nearest_means", "gram [", size, ", ", size, "]");
  const at::Tensor mixed = at::mm(at::mm(mixing, own), mixing.t()).contiguous();
  check_launch(cuda::make_symmetric(mixed.mutable_data_ptr<double>(), size, on.stream()),
               "nearest_means", "gram [", size, ", ", size, "]");
  return {mixed, mixing};
}

at::Tensor weiszfeld(const at::Tensor& gram, const at::Tensor& weights, const at::Tensor& start,
                     double nu, int64_t iterations) {
  const int64_t n = check_weiszfeld(gram, weights, start, iterations);
  const OnDevice on(gram, "gram");
  const at::Tensor own = gram.contiguous(), given = on_device(on, weights, "weights");
  const at::Tensor first = on_device(on, start, "start"), products = on.empty({n}, at::kDouble);
  at::Tensor factors = start.is_cuda() ? first.clone() : first;
  check_launch(cuda::weiszfeld(own.const_data_ptr<double>(), n, given.const_data_ptr<double>(), nu,
                               iterations, factors.mutable_data_ptr<double>(),
                               products.mutable_data_ptr<double>(), on.stream()),
               "weiszfeld", "gram [", n, ", ", n, "], ", iterations, " iterations");
  return factors;
}

at::Tensor clip_towards(const at::Tensor& gram, const at::Tensor& weights, double tau,
                        int64_t iterations) {
  const int64_t n = check_clip_towards(gram, weights, iterations);
  const OnDevice on(gram, "gram");
  const at::Tensor own = gram.contiguous(), given = on_device(on, weights, "weights");
  const at::Tensor products = on.empty({n + 1}, at::kDouble);
  at::Tensor factors = on.empty({n + 1}, at::kDouble);
  check_launch(cuda::clip_towards(own.const_data_ptr<double>(), n, given.const_data_ptr<double>(),
                                  tau, iterations, factors.mutable_data_ptr<double>(),
                                  products.mutable_data_ptr<double>(), on.stream()),
               "clip_towards", "gram [", n + 1, ", ", n + 1, "], ", iterations, " iterations");
  return factors;
}

at::Tensor replace_rows(const at::Tensor& gram, const at::Tensor& changed, const at::Tensor& rows) {
  const std::vector<int64_t> fresh = check_replace_rows(gram, changed, rows);
  const OnDevice on(gram, "gram");
  const at::Tensor own = gram.contiguous(), given = on_device(on, rows, "rows");
  const int64_t m = own.size(0), n = rows.size(1);
  Tables tables;
  const int64_t fresh_at = tables.add(fresh);
  tables.upload(on);
  at::Tensor out = on.empty({n, n}, at::kDouble);
  check_launch(cuda::replace_rows(own.const_data_ptr<double>(), m, given.const_data_ptr<double>(),
                                  tables.at<int64_t>(fresh_at), n, out.mutable_data_ptr<double>(),
                                  on.stream()),
               "replace_rows", "gram [", m, ", ", m, "], rows [", rows.size(0), ", ", n, "]");
  return out;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> bucketed_gram(const at::Tensor& gram,
                                                                         const at::Tensor& order,
                                                                         const at::Tensor& weights,
                                                                         int64_t bucket_size) {
  const auto [rows, count, m, bucket] = check_bucketed_gram(gram, order, weights, bucket_size);
  const OnDevice on(gram, "gram");
  const at::Tensor own = gram.contiguous(), given = on_device(on, weights, "weights");
  const int64_t n = own.size(0);
  std::vector<int64_t> begins(m + 1, 0), members(n);
  for (const int64_t b : bucket) ++begins[b + 1];
  std::partial_sum(begins.begin(), begins.end(), begins.begin());
  std::vector<int64_t> next(begins.begin(), begins.end() - 1);
  for (int64_t i = 0; i < n; ++i) members[next[bucket[i]]++] = i;
  Tables tables;
  const int64_t begins_at = tables.add(begins), members_at = tables.add(members);
  const int64_t buckets_at = tables.add(bucket);
  tables.upload(on);
  at::Tensor out = on.empty({m, m}, at::kDouble), shares = on.empty({n}, at::kDouble);
  at::Tensor sums = on.empty({count}, at::kDouble);
  const at::Tensor half = on.empty({m, n}, at::kDouble);
  check_launch(cuda::bucketed_gram(
                   own.const_data_ptr<double>(), n, tables.at<int64_t>(begins_at),
                   tables.at<int64_t>(members_at), count, m, given.const_data_ptr<double>(),
                   out.mutable_data_ptr<double>(), shares.mutable_data_ptr<double>(),
                   sums.mutable_data_ptr<double>(), half.mutable_data_ptr<double>(), on.stream()),
               "bucketed_gram", "gram [", n, ", ", n, "], ", count, " buckets");
  return {out, tables.ids(buckets_at, n).clone(), shares, sums};
}

}  // namespace
}  // namespace fastagg
