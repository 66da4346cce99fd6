// SPDX-License-Identifier: Apache-2.0
// trimmed_mean_ and meamed_ by torch's sort, on any device. The bits are those of the kernels. On a
// GPU, this is for more rows than the kernels take.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "check_rows.h"
#include "check_sorted_columns.h"

namespace fastagg {

// Sorts the columns of S rows, a block of them at a time, and sets out = mean(x) for each block; x
// is float64 [S, n], ascending along dim 0, without negative zeros, so that equal values have equal
// bits. With `scales`, rows are multiplied by them in float32.
template <class Mean>
void for_sorted_blocks(const at::Tensor& out, const at::Tensor& peak, at::TensorList tensors,
                       const std::optional<at::Tensor>& scales, const Mean& mean) {
  constexpr int64_t kNumbers = int64_t{1} << 22;
  const std::vector<at::Tensor> rows = one_by_one(tensors);
  const std::vector<float> factors = check_scales_anywhere(scales, rows.size());
  const int64_t d = out.numel();
  const int64_t columns = std::max<int64_t>(1, kNumbers / static_cast<int64_t>(rows.size()));
  peak.zero_();
  for (int64_t begin = 0; begin < d; begin += columns) {
    const int64_t end = std::min(begin + columns, d);
    std::vector<at::Tensor> parts;
    for (std::size_t s = 0; s < rows.size(); ++s) {
      const at::Tensor part = rows[s].slice(0, begin, end);
      parts.push_back((scales ? part.to(at::kFloat).mul(factors[s]) : part).to(at::kDouble));
    }
    const at::Tensor x = at::stack(parts).add_(0.0);
    peak.copy_(at::maximum(peak, at::amax(x.abs()).to(at::kFloat)));
    out.slice(0, begin, end).copy_(mean(std::get<0>(x.sort(0))));
  }
}

// The mean of the rows of x, added one after the other.
inline at::Tensor mean_in_order(const at::Tensor& x, int64_t count) {
  const at::Tensor sum = at::zeros({x.size(1)}, x.options());
  for (int64_t s = 0; s < x.size(0); ++s) sum.add_(x.select(0, s));
  return sum.div_(static_cast<double>(count));
}

inline void trimmed_mean_by_torch(const at::Tensor& out, const at::Tensor& peak,
                                  at::TensorList tensors, int64_t trim,
                                  const std::optional<at::Tensor>& scales) {
  const int64_t S = check_trimmed_mean(out, peak, tensors, trim).size();
  for_sorted_blocks(out, peak, tensors, scales, [&](const at::Tensor& x) {
    return mean_in_order(x.slice(0, trim, S - trim), S - 2 * trim);
  });
}

// The window of `keep` values moves up as in kernels/cpu/sorted_columns.cpp.
inline void meamed_by_torch(const at::Tensor& out, const at::Tensor& peak, at::TensorList tensors,
                            int64_t keep, const std::optional<at::Tensor>& scales) {
  const int64_t S = check_meamed(out, peak, tensors, keep).size();
  for_sorted_blocks(out, peak, tensors, scales, [&](const at::Tensor& x) {
    const at::Tensor median = x.select(0, (S - 1) / 2).add(x.select(0, S / 2)).div_(2.0);
    const at::Tensor below = at::sub(median, x.slice(0, 0, S - keep));
    const at::Tensor begin = below.gt(at::sub(x.slice(0, keep, S), median)).sum(0);
    const at::Tensor position = at::sub(at::arange(S, begin.options()).unsqueeze(1), begin);
    const at::Tensor outside = position.lt(0).logical_or_(position.ge(keep));
    return mean_in_order(x.masked_fill(outside, 0.0), keep);
  });
}

}  // namespace fastagg
