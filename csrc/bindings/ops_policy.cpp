// SPDX-License-Identifier: Apache-2.0
// Ops for tensors on any device without kernels of its own: gram_rows calls `gram`, those of
// differences call `weighted_sum_` and `gram_and_sum_`, those that sort columns call torch's sort,
// and those of the robust rules compute with S x S numbers on the CPU, wherever the rows are.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dot.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "../kernels/common.h"
#include "../kernels/cpu/fixed_sum.h"
#include "../kernels/nearest_rows.h"
#include "check_apply.h"
#include "check_differences.h"
#include "check_models.h"
#include "check_most_similar.h"
#include "check_robust.h"
#include "check_rows.h"
#include "checks.h"
#include "sort_by_torch.h"

namespace fastagg::policy {
namespace {

at::Tensor gram_of(const std::vector<at::Tensor>& rows, const at::Tensor& pairs,
                   c10::string_view precision) {
  using Gram = at::Tensor(at::TensorList, const std::optional<at::Tensor>&, c10::string_view,
                          std::optional<int64_t>);
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("fastagg::gram", "").typed<Gram>();
  return op.call(rows, pairs, precision, std::nullopt);
}

// Computes the sum first, so parameters change only if it may be applied.
void apply_weighted_sum_(const at::Tensor& params, const at::Tensor& before,
                         const at::Tensor& applied, at::TensorList tensors,
                         const at::Tensor& weights, double lr, double largest, double limit) {
  using Sum = void(const at::Tensor&, at::TensorList, const at::Tensor&, double,
                   const std::optional<at::Tensor>&);
  using Peaks = at::Tensor(at::TensorList);
  static const auto weighted_sum =
      c10::Dispatcher::singleton().findSchemaOrThrow("fastagg::weighted_sum_", "").typed<Sum>();
  static const auto abs_max =
      c10::Dispatcher::singleton().findSchemaOrThrow("fastagg::abs_max", "").typed<Peaks>();
  check_apply(params, before, applied, tensors);
  const at::Tensor sum = at::empty(params.sizes(), params.options());
  weighted_sum.call(sum, tensors, weights, 0.0, std::nullopt);
  const at::Tensor peaks = abs_max.call({params, sum}).cpu();
  const double known = peaks.const_data_ptr<float>()[0], added = peaks.const_data_ptr<float>()[1];
  const bool fits = std::isfinite(known) && std::isfinite(added) && added <= largest &&
                    known + lr * added <= limit;
  const at::Tensor rate = at::full({1}, lr, at::TensorOptions().dtype(at::kDouble));
  before.copy_(params);
  applied.fill_(fits);
  if (fits) weighted_sum.call(params, {sum}, rate, 1.0, std::nullopt);
}

// Computes all differences first: it needs memory for them.
void difference_sum_(const at::Tensor& out, const at::Tensor& squares, at::TensorList tensors,
                     const at::Tensor& base, const at::Tensor& weights) {
  using Sum = void(const at::Tensor&, at::TensorList, const at::Tensor&, double,
                   const std::optional<at::Tensor>&);
  static const auto weighted_sum =
      c10::Dispatcher::singleton().findSchemaOrThrow("fastagg::weighted_sum_", "").typed<Sum>();
  check_differences(out, squares, tensors, base);
  check_floating(weights, "weights", {squares.numel()});
  std::vector<at::Tensor> differences;
  for (const at::Tensor& row : one_by_one(tensors))
    differences.push_back(at::sub(row.to(at::kFloat), base));
  weighted_sum.call(out, differences, weights, 0.0, std::nullopt);
  for (std::size_t s = 0; s < differences.size(); ++s) {
    const at::Tensor wide = differences[s].to(at::kDouble);
    squares.select(0, static_cast<int64_t>(s)).copy_(at::dot(wide, wide));
  }
}

// Computes all differences first, as well.
void difference_gram_and_sum_(const at::Tensor& out, const at::Tensor& gram, at::TensorList models,
                              const at::Tensor& base, const at::Tensor& weights, int64_t begin) {
  using Both = void(const at::Tensor&, const at::Tensor&, at::TensorList, const at::Tensor&,
                    c10::string_view);
  static const auto gram_and_sum =
      c10::Dispatcher::singleton().findSchemaOrThrow("fastagg::gram_and_sum_", "").typed<Both>();
  check_dense(weights, "weights");
  const int64_t S = weights.numel(), end = begin + out.numel();
  const std::size_t L = check_models(out, gram, models, base, S, begin).size();
  check_floating(weights, "weights", {S});
  std::vector<at::Tensor> differences;
  for (int64_t s = 0; s < S; ++s) {
    std::vector<at::Tensor> parts;
    for (const at::Tensor& part : models.slice(s * L, L)) parts.push_back(part.to(at::kFloat));
    differences.push_back(at::sub(at::cat(parts).slice(0, begin, end), base.slice(0, begin, end)));
  }
  gram_and_sum.call(out, gram, differences, weights, "highest");
}

void trimmed_mean_(const at::Tensor& out, const at::Tensor& peak, at::TensorList tensors,
                   int64_t trim, const std::optional<at::Tensor>& scales) {
  trimmed_mean_by_torch(out, peak, tensors, trim, scales);
}

void meamed_(const at::Tensor& out, const at::Tensor& peak, at::TensorList tensors, int64_t keep,
             const std::optional<at::Tensor>& scales) {
  meamed_by_torch(out, peak, tensors, keep, scales);
}

at::Tensor gram_rows(at::TensorList tensors, const at::Tensor& changed,
                     c10::string_view precision) {
  const at::Device device = device_of(tensors, "updates");
  check_rows(tensors, "updates", kAny, device);
  const std::vector<at::Tensor> rows = one_by_one(tensors);
  const auto S = static_cast<int64_t>(rows.size());
  // The changed rows are placed first, so that the needed pairs fill whole tiles of the kernel.
  std::vector<int64_t> order = check_positions(changed, S);
  const auto C = static_cast<int64_t>(order.size());
  std::vector<uint8_t> is_first(S, 0);
  for (int64_t s : order) is_first[s] = 1;
  for (int64_t s = 0; s < S; ++s)
    if (!is_first[s]) order.push_back(s);
  const at::Tensor pairs = at::zeros({S, S}, at::TensorOptions().dtype(at::kBool));
  pairs.slice(0, 0, C).fill_(true);
  pairs.slice(1, 0, C).fill_(true);
  const at::Tensor gram = gram_of(reorder(rows, order), pairs.to(device), precision);
  const at::Tensor place = at::empty({S}, at::TensorOptions().dtype(at::kLong));
  for (int64_t p = 0; p < S; ++p) place.mutable_data_ptr<int64_t>()[order[p]] = p;
  return at::index_select(gram.slice(0, 0, C), 1, place.to(device));
}

// Queries by pieces, so that only some of the products are in memory.
std::tuple<at::Tensor, at::Tensor> most_similar(const at::Tensor& queries, const at::Tensor& rows,
                                                const at::Tensor& factors,
                                                const std::optional<at::Tensor>& query_ids,
                                                const std::optional<at::Tensor>& row_ids,
                                                const std::optional<at::Tensor>& splits) {
  constexpr int64_t kProducts = int64_t{1} << 24;
  const SimilarSizes sizes = check_most_similar(queries, rows, factors, query_ids, row_ids, splits);
  const at::Tensor best =
      at::full({sizes.queries}, -1, at::TensorOptions().dtype(at::kLong).device(queries.device()));
  const at::Tensor similarity = at::full({sizes.queries}, -INFINITY, factors.options());
  const auto some = [](const at::Tensor& all, const std::optional<at::Tensor>& ids, int64_t begin,
                       int64_t end) {
    return ids ? at::index_select(all, 0, ids->slice(0, begin, end).to(all.device()))
               : all.slice(0, begin, end);
  };
  for (int64_t g = 0; g < sizes.groups; ++g) {
    const int64_t* split = sizes.splits.data() + 2 * g;
    const int64_t first = split[1], last = split[3];
    if (first == last) continue;
    const at::Tensor with = some(rows, row_ids, first, last).to(at::kFloat).t();
    const at::Tensor scale = some(factors, row_ids, first, last);
    const at::Tensor places = at::arange(first, last, best.options());
    const int64_t step = std::max<int64_t>(1, kProducts / (last - first));
    for (int64_t begin = split[0]; begin < split[2]; begin += step) {
      const int64_t end = std::min(begin + step, split[2]);
      const at::Tensor piece = some(queries, query_ids, begin, end).to(at::kFloat);
      const at::Tensor values = at::mul(at::mm(piece, with), scale);
      const at::Tensor largest = at::amax(values, 1, /*keepdim=*/true);
      const at::Tensor found =
          at::where(at::eq(values, largest), places, at::full_like(places, last));
      best.slice(0, begin, end).copy_(at::amin(found, 1));
      similarity.slice(0, begin, end).copy_(largest.squeeze(1));
    }
  }
  return {best, similarity};
}

// The distances |x_i - z| of n rows to a linear combination z of them, from their Gram matrix.
class Distances {
 public:
  explicit Distances(const at::Tensor& gram)
      : n_(gram.size(0)), matrix_(gram.contiguous()), products_(n_) {}

  // out[i] = |x_i - sum_j factors[j] x_j|; both [n].
  void operator()(const double* factors, double* out) {
    const auto* gram = matrix_.const_data_ptr<double>();
    for (int64_t i = 0; i < n_; ++i) {
      const double* row = gram + i * n_;
      products_[i] = cpu::fixed_sum(n_, [&](int64_t j) { return row[j] * factors[j]; });
    }
    const double square = cpu::fixed_sum(n_, [&](int64_t i) { return factors[i] * products_[i]; });
    for (int64_t i = 0; i < n_; ++i) {
      const double distance2 = gram[i * n_ + i] - 2.0 * products_[i] + square;
      out[i] = std::sqrt(distance2 < 0.0 ? 0.0 : distance2);  // a NaN stays NaN
    }
  }

 private:
  int64_t n_;
  at::Tensor matrix_;
  std::vector<double> products_;
};

at::Tensor weiszfeld(const at::Tensor& gram, const at::Tensor& weights, const at::Tensor& start,
                     double nu, int64_t iterations) {
  const int64_t n = check_weiszfeld(gram, weights, start, iterations);
  const at::Tensor known = gram.cpu();
  const at::Tensor own = weights.cpu();
  const auto* w = own.const_data_ptr<double>();
  Distances distances(known);
  const at::Tensor result = start.cpu().clone();
  auto* factors = result.mutable_data_ptr<double>();
  std::vector<double> distance(n);
  for (int64_t iteration = 0; iteration < iterations; ++iteration) {
    distances(factors, distance.data());
    for (int64_t i = 0; i < n; ++i) factors[i] = w[i] / (distance[i] < nu ? nu : distance[i]);
    const double sum = cpu::fixed_sum(n, [&](int64_t i) { return factors[i]; });
    for (int64_t i = 0; i < n; ++i) factors[i] /= sum;
  }
  return result.to(gram.device());
}

at::Tensor clip_towards(const at::Tensor& gram, const at::Tensor& weights, double tau,
                        int64_t iterations) {
  const int64_t n = check_clip_towards(gram, weights, iterations);
  const at::Tensor known = gram.cpu();
  const at::Tensor own = weights.cpu();
  const auto* w = own.const_data_ptr<double>();
  Distances distances(known);
  const at::Tensor result = at::zeros({n + 1}, known.options());
  auto* factors = result.mutable_data_ptr<double>();
  factors[n] = 1.0;
  std::vector<double> clipped(n + 1);
  for (int64_t iteration = 0; iteration < iterations; ++iteration) {
    distances(factors, clipped.data());
    for (int64_t i = 0; i < n; ++i) {
      const double ratio = tau / clipped[i];
      clipped[i] = ratio > 1.0 ? 1.0 : ratio;
    }
    // The factor of the last row is computed in a form that is exactly 0 if all ratios are 1.
    const double rest = cpu::fixed_sum(n, [&](int64_t i) { return w[i] * (1.0 - clipped[i]); });
    for (int64_t i = 0; i <= n; ++i) factors[i] *= rest;
    for (int64_t i = 0; i < n; ++i) factors[i] += w[i] * clipped[i];
  }
  return result.to(gram.device());
}

at::Tensor krum_scores(const at::Tensor& gram, int64_t num_byzantine) {
  const int64_t n = check_krum(gram, num_byzantine);
  const at::Tensor known = gram.cpu().contiguous();
  const at::Tensor scores = at::empty({n}, known.options());
  cpu::krum_scores(known.const_data_ptr<double>(), n, num_byzantine,
                   scores.mutable_data_ptr<double>());
  return scores.to(gram.device());
}

at::Tensor krum_selection(const at::Tensor& gram, int64_t num_byzantine, int64_t count) {
  const int64_t n = check_krum(gram, num_byzantine, count);
  const at::Tensor known = gram.cpu().contiguous();
  const at::Tensor chosen = at::empty({count}, at::TensorOptions().dtype(at::kLong));
  cpu::krum_selection(known.const_data_ptr<double>(), n, num_byzantine, count,
                      chosen.mutable_data_ptr<int64_t>());
  return chosen.to(gram.device());
}

std::tuple<at::Tensor, at::Tensor> nearest_means(const at::Tensor& gram, const at::Tensor& weights,
                                                 int64_t count) {
  const int64_t n = check_nearest_means(gram, weights, count);
  const at::Tensor known = gram.cpu().contiguous();
  const int64_t size = known.size(0);
  const at::Tensor own = weights.cpu();
  const at::Tensor mixed = at::empty({size, size}, known.options());
  const at::Tensor mixing = at::empty({size, size}, known.options());
  cpu::nearest_means(known.const_data_ptr<double>(), size, n, own.const_data_ptr<double>(), count,
                     mixing.mutable_data_ptr<double>(), mixed.mutable_data_ptr<double>());
  return {mixed.to(gram.device()), mixing.to(gram.device())};
}

// `gram` with the rows and columns `changed` replaced by `rows`. If `rows` are longer than those of
// `gram`, the result is larger, and `changed` must have all positions that `gram` lacks.
at::Tensor replace_rows(const at::Tensor& gram, const at::Tensor& changed, const at::Tensor& rows) {
  const std::vector<int64_t> fresh = check_replace_rows(gram, changed, rows);
  const at::Tensor known = gram.cpu().contiguous(), own = rows.cpu();
  const int64_t m = known.size(0), n = rows.size(1), C = rows.size(0);
  const auto* positions = changed.const_data_ptr<int64_t>();
  const at::Tensor out = at::empty({n, n}, known.options());
  auto* data = out.mutable_data_ptr<double>();
  const auto* before = known.const_data_ptr<double>();
  const auto* given = own.const_data_ptr<double>();
  for (int64_t i = 0; i < n; ++i) {
    double* row = data + i * n;
    if (fresh[i] >= 0) {
      std::copy_n(given + fresh[i] * n, n, row);
      continue;
    }
    std::copy_n(before + i * m, m, row);
    for (int64_t c = 0; c < C; ++c) row[positions[c]] = given[c * n + i];
  }
  return out.to(gram.device());
}

// The Gram matrix of the weighted means of buckets. Each row beyond `order` is a bucket of one row.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> bucketed_gram(const at::Tensor& gram,
                                                                         const at::Tensor& order,
                                                                         const at::Tensor& weights,
                                                                         int64_t bucket_size) {
  const auto [members, count, m, bucket] = check_bucketed_gram(gram, order, weights, bucket_size);
  const at::Tensor known = gram.cpu().contiguous(), own_weights = weights.cpu();
  const int64_t n = known.size(0);
  const auto* given = own_weights.const_data_ptr<double>();
  const at::Tensor buckets = at::empty({n}, at::TensorOptions().dtype(at::kLong));
  std::copy(bucket.begin(), bucket.end(), buckets.mutable_data_ptr<int64_t>());

  const at::Tensor sums = at::zeros({count}, known.options());
  const at::Tensor shares = at::empty({n}, known.options());
  auto* sum = sums.mutable_data_ptr<double>();
  auto* share = shares.mutable_data_ptr<double>();
  for (int64_t i = 0; i < members; ++i) sum[bucket[i]] += given[i];
  for (int64_t i = 0; i < n; ++i) share[i] = i < members ? given[i] / sum[bucket[i]] : 1.0;

  const auto* g = known.const_data_ptr<double>();
  std::vector<double> half(m * n, 0.0);  // means of rows of the Gram matrix
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < n; ++j) half[bucket[i] * n + j] += share[i] * g[i * n + j];
  // Not at::zeros, which starts threads of PyTorch for 32,768 numbers.
  const at::Tensor whole = at::empty({m, m}, known.options());
  auto* w = whole.mutable_data_ptr<double>();
  std::fill_n(w, m * m, 0.0);
  for (int64_t a = 0; a < m; ++a)
    for (int64_t j = 0; j < n; ++j) w[a * m + bucket[j]] += share[j] * half[a * n + j];
  for (int64_t a = 0; a < m; ++a)
    for (int64_t b = 0; b < a; ++b)
      w[a * m + b] = w[b * m + a] = (w[a * m + b] + w[b * m + a]) / 2.0;
  const auto back = [&](const at::Tensor& t) { return t.to(gram.device()); };
  return {back(whole), back(buckets), back(shares), back(sums)};
}

}  // namespace

TORCH_LIBRARY_IMPL(fastagg, CompositeExplicitAutograd, m) {
#define FASTAGG_OP(name, cpu, cuda, any, schema) FASTAGG_IF_##any(m.impl(#name, name);)
#include "op_table.h"
}

}  // namespace fastagg::policy
