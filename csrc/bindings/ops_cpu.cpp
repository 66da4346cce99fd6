// SPDX-License-Identifier: Apache-2.0
// The CPU bindings: check arguments, allocate results, and call fastagg::cpu with raw pointers and
// threads.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>

#include "../kernels/abs_max.h"
#include "../kernels/cpu/pool.h"
#include "../kernels/differences.h"
#include "../kernels/friends.h"
#include "../kernels/gram.h"
#include "../kernels/int8_rows.h"
#include "../kernels/memory.h"
#include "../kernels/mimic.h"
#include "../kernels/models.h"
#include "../kernels/moments.h"
#include "../kernels/most_similar.h"
#include "../kernels/pair_gram.h"
#include "../kernels/scaffold.h"
#include "../kernels/scores.h"
#include "../kernels/sketch.h"
#include "../kernels/sorted_columns.h"
#include "../kernels/weighted_sum.h"
#include "changed_memory.h"
#include "check_apply.h"
#include "check_differences.h"
#include "check_int8_rows.h"
#include "check_models.h"
#include "check_most_similar.h"
#include "check_paired.h"
#include "check_rows.h"
#include "check_sketch.h"
#include "check_sorted_columns.h"
#include "check_step.h"
#include "checks.h"

namespace fastagg {
namespace {

// As many threads as torch uses (torch.set_num_threads); one in a parallel region of torch.
cpu::Parallel threads() {
  return cpu::pool_threads(at::in_parallel_region() ? 1 : at::get_num_threads());
}

// Whether `when` is given and false.
bool called_off(const std::optional<at::Tensor>& when, const at::Device& device) {
  const uint8_t* flag = check_when(when, device);
  return flag && !*flag;
}

// `precision` is checked and ignored: float32 products are as precise as either value requires.
at::Tensor gram(at::TensorList updates, const std::optional<at::Tensor>& pairs,
                c10::string_view precision, std::optional<int64_t> segment) {
  check_precision(precision);
  const at::Device device = device_of(updates, "updates");
  const Rows rows = check_rows(updates, "updates", kAny, device);
  const int64_t S = rows.size(), columns = check_segment(segment, rows.d);
  const uint8_t* flags = check_pairs(pairs, S, device);
  auto x = pointers<const float>(rows.addresses);
  const auto next = [&](int64_t d) {  // that of the next d columns
    at::Tensor out = at::empty({S, S}, at::TensorOptions().dtype(at::kDouble));
    auto* data = out.mutable_data_ptr<double>();
    if (flags)
      cpu::pair_gram(x.data(), S, d, flags, data, threads());
    else
      cpu::gram(x.data(), S, d, nullptr, data, threads());
    for (const float*& row : x) row += d;
    return out;
  };
  const at::Tensor out = next(std::min(columns, rows.d));
  for (int64_t begin = columns; begin < rows.d; begin += columns)
    out.add_(next(std::min(columns, rows.d - begin)));
  return out;
}

at::Tensor gram_rows(at::TensorList updates, const at::Tensor& changed,
                     c10::string_view precision) {
  check_precision(precision);
  const Rows rows = check_rows(updates, "updates", kAny, device_of(updates, "updates"));
  const std::vector<int64_t> positions = check_positions(changed, rows.size());
  const auto C = static_cast<int64_t>(positions.size());
  at::Tensor out = at::empty({C, rows.size()}, at::TensorOptions().dtype(at::kDouble));
  cpu::gram_rows(pointers<const float>(rows.addresses).data(), rows.size(), rows.d,
                 positions.data(), C, out.mutable_data_ptr<double>(), threads());
  return out;
}

at::Tensor abs_max(at::TensorList tensors) {
  const Rows rows = check_rows(tensors, "rows", kAny, device_of(tensors, "rows"));
  at::Tensor out = at::empty({rows.size()}, at::TensorOptions().dtype(at::kFloat));
  cpu::abs_max(pointers<const float>(rows.addresses).data(), rows.size(), rows.d,
               out.mutable_data_ptr<float>(), threads());
  return out;
}

void sketch_(const at::Tensor& out, const at::Tensor& squares, at::TensorList tensors, int64_t seed,
             int64_t begin) {
  const Rows rows = check_sketch(out, squares, tensors, begin);
  const at::Tensor sums = out.to(at::kDouble);  // out itself, or a copy
  with_element(rows.dtype, [&](auto element) {
    const auto x = pointers<const decltype(element)>(rows.addresses);
    cpu::sketch(sums.mutable_data_ptr<double>(), squares.mutable_data_ptr<double>(), x.data(),
                rows.size(), rows.d, out.size(1), static_cast<uint64_t>(seed), begin, threads());
  });
  if (!sums.is_same(out)) out.copy_(sums);
}

template <void (*kScores)(const double*, int64_t, double*, const cpu::Parallel&)>
at::Tensor scores_of(const at::Tensor& gram) {
  const int64_t S = gram.dim() == 2 ? gram.size(0) : 0;
  check_floating(gram, "gram", {S, S});
  const at::Tensor wide = gram.to(at::kDouble);
  at::Tensor out = at::empty({S, S}, wide.options());
  kScores(wide.const_data_ptr<double>(), S, out.mutable_data_ptr<double>(), threads());
  return out.to(gram.scalar_type());
}

void update_scores_(const at::Tensor& scores, const at::Tensor& counts,
                    const at::Tensor& round_scores, const at::Tensor& clients,
                    const std::optional<at::Tensor>& pairs, const std::optional<at::Tensor>& when) {
  const int64_t K = check_scores(scores, counts);
  const int64_t S = clients.numel();
  const int64_t* ids = check_clients(clients, S, K);
  check_floating(round_scores, "round_scores", {S, S});
  const uint8_t* flags = check_pairs(pairs, S, scores.device());
  changed_scores(scores, counts, round_scores, pairs).check(clients, "clients");
  if (called_off(when, scores.device())) return;
  const at::Tensor wide = round_scores.to(at::kDouble);
  const auto update = [&](auto* data) {
    cpu::update_scores(scores.mutable_data_ptr<float>(), data, K, wide.const_data_ptr<double>(),
                       ids, S, flags, threads());
  };
  if (counts.scalar_type() == at::kShort)
    update(counts.mutable_data_ptr<int16_t>());
  else
    update(counts.mutable_data_ptr<int32_t>());
}

at::Tensor select_friends(const at::Tensor& scores, const at::Tensor& counts,
                          const at::Tensor& active, const std::optional<at::Tensor>& candidates) {
  const int64_t K = check_scores(scores, counts);
  check_tensor(active, "active", at::kBool, {K});
  Flags flags{nullptr, false};
  if (candidates) {
    flags.packed = check_candidates(*candidates, K, scores.device());
    flags.data = static_cast<const uint8_t*>(candidates->const_data_ptr());
  }
  at::Tensor friends = at::empty({K}, at::TensorOptions().dtype(at::kLong));
  cpu::select_friends(scores.const_data_ptr<float>(), read_counts(counts),
                      reinterpret_cast<const uint8_t*>(active.const_data_ptr<bool>()), flags, K,
                      friends.mutable_data_ptr<int64_t>(), threads());
  return friends;
}

std::tuple<at::Tensor, at::Tensor> most_similar(const at::Tensor& queries, const at::Tensor& rows,
                                                const at::Tensor& factors,
                                                const std::optional<at::Tensor>& query_ids,
                                                const std::optional<at::Tensor>& row_ids,
                                                const std::optional<at::Tensor>& splits) {
  const SimilarSizes sizes = check_most_similar(queries, rows, factors, query_ids, row_ids, splits);
  at::Tensor best = at::empty({sizes.queries}, at::TensorOptions().dtype(at::kLong));
  at::Tensor similarity = at::empty({sizes.queries}, at::TensorOptions().dtype(at::kFloat));
  const auto ids = [](const std::optional<at::Tensor>& given) {
    return given ? given->const_data_ptr<int64_t>() : nullptr;
  };
  cpu::most_similar(queries.const_data_ptr<int8_t>(), ids(query_ids), rows.const_data_ptr<int8_t>(),
                    factors.const_data_ptr<float>(), ids(row_ids), sizes.splits.data(),
                    sizes.groups, sizes.k, best.mutable_data_ptr<int64_t>(),
                    similarity.mutable_data_ptr<float>(), threads());
  return {best, similarity};
}

void eliminate_(const at::Tensor& candidates, const at::Tensor& scores, const at::Tensor& counts,
                double threshold, const std::optional<at::Tensor>& when) {
  const int64_t K = check_scores(scores, counts);
  const bool packed = check_candidates(candidates, K, scores.device());
  check_threshold(threshold);
  changed_candidates(candidates, scores, counts);
  if (called_off(when, scores.device())) return;
  cpu::eliminate(static_cast<uint8_t*>(candidates.mutable_data_ptr()), packed,
                 scores.const_data_ptr<float>(), read_counts(counts), K, threshold, threads());
}

void weighted_sum_(const at::Tensor& out, at::TensorList tensors, const at::Tensor& weights,
                   double beta, const std::optional<at::Tensor>& when) {
  const int64_t d = out.numel();
  check_tensor(out, "out", at::kFloat, {d});
  const Rows rows = check_rows(tensors, "rows", d, out.device(), Elements::kAlsoShort);
  const std::vector<double> w = check_weights(weights, rows.size(), out.device());
  ChangedMemory changed;
  changed.add(out, "out");
  changed.check_rows(rows.addresses, rows.row_bytes(), "rows");
  if (called_off(when, out.device())) return;
  with_element(rows.dtype, [&](auto element) {
    const auto x = pointers<const decltype(element)>(rows.addresses);
    cpu::weighted_sum(out.mutable_data_ptr<float>(), x.data(), rows.size(), d, w.data(), beta,
                      threads());
  });
}

void apply_weighted_sum_(const at::Tensor& params, const at::Tensor& before,
                         const at::Tensor& applied, at::TensorList tensors,
                         const at::Tensor& weights, double lr, double largest, double limit) {
  const Rows rows = check_apply(params, before, applied, tensors);
  const std::vector<double> w = check_weights(weights, rows.size(), params.device());
  with_element(rows.dtype, [&](auto element) {
    const auto x = pointers<const decltype(element)>(rows.addresses);
    *applied.mutable_data_ptr<bool>() = cpu::apply_weighted_sum(
        params.mutable_data_ptr<float>(), before.mutable_data_ptr<float>(), x.data(), rows.size(),
        rows.d, w.data(), lr, {largest, limit}, threads());
  });
}

void difference_sum_(const at::Tensor& out, const at::Tensor& squares, at::TensorList tensors,
                     const at::Tensor& base, const at::Tensor& weights) {
  const Rows rows = check_differences(out, squares, tensors, base);
  const std::vector<double> w = check_weights(weights, rows.size(), out.device());
  with_element(rows.dtype, [&](auto element) {
    const auto x = pointers<const decltype(element)>(rows.addresses);
    cpu::difference_sum(out.mutable_data_ptr<float>(), squares.mutable_data_ptr<double>(), x.data(),
                        base.const_data_ptr<float>(), rows.size(), out.numel(), w.data(),
                        threads());
  });
}

void trimmed_mean_(const at::Tensor& out, const at::Tensor& peak, at::TensorList tensors,
                   int64_t trim, const std::optional<at::Tensor>& scales) {
  const Rows rows = check_trimmed_mean(out, peak, tensors, trim);
  const std::vector<float> factors = check_scales(scales, rows.size(), out.device());
  with_element(rows.dtype, [&](auto element) {
    const auto x = pointers<const decltype(element)>(rows.addresses);
    cpu::trimmed_mean(out.mutable_data_ptr<float>(), peak.mutable_data_ptr<float>(), x.data(),
                      rows.size(), rows.d, trim, scales ? factors.data() : nullptr, threads());
  });
}

void meamed_(const at::Tensor& out, const at::Tensor& peak, at::TensorList tensors, int64_t keep,
             const std::optional<at::Tensor>& scales) {
  const Rows rows = check_meamed(out, peak, tensors, keep);
  const std::vector<float> factors = check_scales(scales, rows.size(), out.device());
  with_element(rows.dtype, [&](auto element) {
    const auto x = pointers<const decltype(element)>(rows.addresses);
    cpu::meamed(out.mutable_data_ptr<float>(), peak.mutable_data_ptr<float>(), x.data(),
                rows.size(), rows.d, keep, scales ? factors.data() : nullptr, threads());
  });
}

void gram_and_sum_(const at::Tensor& out, const at::Tensor& gram, at::TensorList tensors,
                   const at::Tensor& weights, c10::string_view precision) {
  check_precision(precision);
  const int64_t d = out.numel();
  check_tensor(out, "out", at::kFloat, {d});
  const Rows rows = check_rows(tensors, "rows", d, out.device());
  const int64_t S = rows.size();
  check_tensor(gram, "gram", at::kDouble, {S, S});
  const std::vector<double> w = check_weights(weights, S, out.device());
  ChangedMemory changed;
  changed.add(out, "out");
  changed.add(gram, "gram");
  changed.check_rows(rows.addresses, rows.row_bytes(), "rows");
  cpu::gram_and_sum(pointers<const float>(rows.addresses).data(), S, d, w.data(),
                    gram.mutable_data_ptr<double>(), out.mutable_data_ptr<float>(), threads());
}

void sketch_and_sum_(const at::Tensor& sum, const at::Tensor& out, const at::Tensor& squares,
                     at::TensorList tensors, const at::Tensor& weights, int64_t seed,
                     int64_t begin) {
  const Rows rows = check_sketch_and_sum(sum, out, squares, tensors, begin);
  const std::vector<double> w = check_weights(weights, rows.size(), out.device());
  with_element(rows.dtype, [&](auto element) {
    const auto x = pointers<const decltype(element)>(rows.addresses);
    cpu::sketch_and_sum(out.mutable_data_ptr<double>(), squares.mutable_data_ptr<double>(),
                        sum.mutable_data_ptr<float>(), x.data(), rows.size(), sum.numel(), w.data(),
                        out.size(1), static_cast<uint64_t>(seed), begin, threads());
  });
}

void difference_gram_and_sum_(const at::Tensor& out, const at::Tensor& gram, at::TensorList models,
                              const at::Tensor& base, const at::Tensor& weights, int64_t begin) {
  check_dense(weights, "weights");
  const int64_t S = weights.numel(), d = out.numel();
  const auto parts = check_models(out, gram, models, base, S, begin);
  const std::vector<double> w = check_weights(weights, S, out.device());
  const cpu::ModelDifferences rows(parts, base.const_data_ptr<float>(), begin, d);
  cpu::gram_and_sum(rows, S, d, w.data(), gram.mutable_data_ptr<double>(),
                    out.mutable_data_ptr<float>(), threads());
}

void mimic_(const at::Tensor& params, at::TensorList tensors, at::TensorList corrections,
            const at::Tensor& clients, double lr) {
  const PairedRows rows = check_mimic(params, tensors, corrections, clients);
  with_element(rows.updates.dtype, [&](auto element) {
    cpu::mimic(params.mutable_data_ptr<float>(),
               pointers<const decltype(element)>(rows.updates.addresses).data(),
               pointers<float>(rows.own).data(), rows.size(), rows.d, lr, threads());
  });
}

void memory_update_(const at::Tensor& params, const at::Tensor& total, at::TensorList memory,
                    at::TensorList tensors, const at::Tensor& clients, const at::Tensor& weights,
                    double lr, double norm, bool models) {
  const PairedRows rows = check_memory_update(params, total, memory, tensors, clients, weights);
  with_element(rows.updates.dtype, [&](auto element) {
    cpu::memory_update(params.mutable_data_ptr<float>(), total.mutable_data_ptr<double>(),
                       pointers<const decltype(element)>(rows.updates.addresses).data(),
                       pointers<float>(rows.own).data(), rows.size(), rows.d, rows.weights.data(),
                       lr, norm, models, threads());
  });
}

// The items, or null if there are none.
template <class T>
const T* given(const std::vector<T>& items) {
  return items.empty() ? nullptr : items.data();
}

// peaks[s] = the peak of row s; `ordered` are the peaks in ascending order of client ids.
void write_peaks(const at::Tensor& peaks, const std::vector<float>& ordered,
                 const std::vector<int64_t>& order) {
  auto* out = peaks.mutable_data_ptr<float>();
  for (std::size_t position = 0; position < order.size(); ++position)
    out[order[position]] = ordered[position];
}

void mimic_mean_(const at::Tensor& out, const at::Tensor& rounded, const at::Tensor& peaks,
                 at::TensorList tensors, at::TensorList corrections, const at::Tensor& clients,
                 const c10::List<std::optional<at::Tensor>>& references, at::TensorList kept,
                 bool copies, const std::optional<at::Tensor>& weights,
                 const std::optional<at::Tensor>& scales) {
  const PairedRows rows = check_mimic_mean(out, rounded, peaks, tensors, corrections, clients,
                                           references, kept, weights, scales);
  const auto kept_rows = pointers<float>(rows.kept);
  std::vector<float> largest(rows.size());
  with_element(rows.updates.dtype, [&](auto element) {
    using T = decltype(element);
    cpu::mimic_mean(out.mutable_data_ptr<double>(), rounded.mutable_data_ptr<float>(),
                    largest.data(), pointers<const T>(rows.updates.addresses).data(),
                    pointers<const T>(rows.own).data(), rows.references.data(), given(rows.weights),
                    given(kept_rows), copies, given(rows.scales), rows.size(), rows.d, threads());
  });
  write_peaks(peaks, largest, rows.order);
}

void memory_total_(const at::Tensor& out, const at::Tensor& peaks, const at::Tensor& total,
                   at::TensorList memory, at::TensorList tensors, const at::Tensor& clients,
                   const at::Tensor& weights,
                   const c10::List<std::optional<at::Tensor>>& references,
                   const std::optional<at::Tensor>& params, at::TensorList kept,
                   const std::optional<at::Tensor>& scales, const std::optional<at::Tensor>& faded,
                   const std::optional<at::Tensor>& faded_weights, double fading) {
  const PairedRows rows =
      check_memory_total(out, peaks, total, memory, tensors, clients, weights, references, params,
                         kept, scales, faded, faded_weights, Rounded::kYes);
  const FadedTotal other = faded_total(faded, rows.faded_weights.data(), fading);
  std::vector<float> largest(rows.size());
  if (rows.rounds()) {
    const auto kept_rows = pointers<Bfloat16>(rows.kept);
    cpu::rounded_total(out.mutable_data_ptr<double>(), largest.data(),
                       total.const_data_ptr<double>(),
                       pointers<const float>(rows.updates.addresses).data(),
                       pointers<const Bfloat16>(rows.own).data(), rows.size(), rows.d,
                       rows.weights.data(), given(kept_rows), given(rows.scales), other, threads());
    return write_peaks(peaks, largest, rows.order);
  }
  const auto kept_rows = pointers<float>(rows.kept);
  with_element(rows.updates.dtype, [&](auto element) {
    using T = decltype(element);
    cpu::memory_total(
        out.mutable_data_ptr<double>(), largest.data(), total.const_data_ptr<double>(),
        pointers<const T>(rows.updates.addresses).data(), pointers<const T>(rows.own).data(),
        rows.references.data(), rows.size(), rows.d, rows.weights.data(),
        params ? params->const_data_ptr<float>() : nullptr, given(kept_rows), given(rows.scales),
        other, threads());
  });
  write_peaks(peaks, largest, rows.order);
}

void scaffold_mean_(const at::Tensor& out, const at::Tensor& next, const at::Tensor& peaks,
                    const at::Tensor& mean, at::TensorList tensors, at::TensorList controls,
                    const at::Tensor& clients, const at::Tensor& weights, const at::Tensor& steps,
                    double part, at::TensorList kept) {
  const PairedRows rows =
      check_scaffold_mean(out, next, peaks, mean, tensors, controls, clients, weights, steps, kept);
  std::vector<float> largest(rows.size());
  cpu::scaffold_mean(out.mutable_data_ptr<double>(), next.mutable_data_ptr<float>(), largest.data(),
                     mean.const_data_ptr<float>(),
                     pointers<const float>(rows.updates.addresses).data(),
                     pointers<const float>(rows.own).data(), rows.weights.data(), rows.steps.data(),
                     part, pointers<float>(rows.kept).data(), rows.size(), rows.d, threads());
  write_peaks(peaks, largest, rows.order);
}

void lerp_total_(const at::Tensor& total, const at::Tensor& end, double weight) {
  check_lerp_total(total, end);
  cpu::lerp_total(total.mutable_data_ptr<double>(), end.const_data_ptr<double>(), total.numel(),
                  weight, threads());
}

void add_total_(const at::Tensor& params, const at::Tensor& total, double lr, double norm,
                bool models) {
  check_add_total(params, total);
  cpu::add_total(params.mutable_data_ptr<float>(), total.const_data_ptr<double>(), params.numel(),
                 lr, norm, models, threads());
}

// The parameters are read twice, the second time from a cache if they fit one.
void apply_aggregate_(const at::Tensor& params, const at::Tensor& applied,
                      const at::Tensor& aggregate, double lr, double norm, double peak,
                      double limit) {
  const bool wide = check_apply_aggregate(params, applied, aggregate, norm);
  const int64_t d = params.numel();
  auto* moved = params.mutable_data_ptr<float>();
  const float* const row = wide ? nullptr : aggregate.const_data_ptr<float>();
  const float* const vectors[] = {moved, row};
  float peaks[2] = {0.0f, 0.0f};
  cpu::abs_max(vectors, wide ? 1 : 2, d, peaks, threads());
  const bool fits = cpu::fits_into(peaks[0], wide ? peak : peaks[1], lr, {peak, limit});
  *applied.mutable_data_ptr<bool>() = fits;
  if (!fits) return;
  if (wide)
    cpu::add_total(moved, aggregate.const_data_ptr<double>(), d, lr, norm, false, threads());
  else
    cpu::weighted_sum(moved, &row, 1, d, &lr, 1.0, threads());
}

// --- rows of int8 numbers ------------------------------------------------------------------------

void quantize_(at::TensorList numbers, const at::Tensor& scales, at::TensorList tensors) {
  const QuantizeRows given = check_quantize(numbers, scales, tensors);
  cpu::quantize(given.numbers.data(), given.scales.data(), given.rows.data(), given.size(), given.d,
                threads());
}

void dequantize_(at::TensorList out, at::TensorList numbers, at::TensorList scales) {
  const DequantizeRows given = check_dequantize(out, numbers, scales);
  cpu::dequantize(given.out.data(), given.numbers.data(), given.scales.data(), given.size(),
                  given.d, threads());
}

void quantized_total_(const at::Tensor& out, const at::Tensor& peaks, const at::Tensor& total,
                      at::TensorList memory, at::TensorList memory_scales, at::TensorList tensors,
                      const at::Tensor& clients, const at::Tensor& weights, at::TensorList kept,
                      const at::Tensor& kept_scales, const std::optional<at::Tensor>& faded,
                      const std::optional<at::Tensor>& faded_weights, double fading) {
  const QuantizedTotal given =
      check_quantized_total(out, peaks, total, memory, memory_scales, tensors, clients, weights,
                            kept, kept_scales, faded, faded_weights);
  std::vector<float> largest(given.size());
  cpu::quantized_total(out.mutable_data_ptr<double>(), largest.data(),
                       total.const_data_ptr<double>(), given.updates.data(), given.memory.data(),
                       given.memory_scales.data(), given.size(), given.d, given.weights.data(),
                       given.kept.data(), given.kept_scales.data(),
                       faded_total(faded, given.faded_weights.data(), fading), threads());
  write_peaks(peaks, largest, given.order);
}

void add_momentum_(const at::Tensor& params, const at::Tensor& m, const at::Tensor& aggregate,
                   double lr, double beta_1, bool nesterov, double norm, bool models) {
  const bool wide = check_moments(params, m, std::nullopt, aggregate);
  const auto add = [&](const auto* v) {
    cpu::add_momentum(params.mutable_data_ptr<float>(), m.mutable_data_ptr<float>(), v,
                      params.numel(), lr, beta_1, nesterov, norm, models, threads());
  };
  wide ? add(aggregate.const_data_ptr<double>()) : add(aggregate.const_data_ptr<float>());
}

void add_adaptive_(const at::Tensor& params, const at::Tensor& m, const at::Tensor& s,
                   const at::Tensor& aggregate, c10::string_view kind, double lr, double beta_1,
                   double beta_2, double tau, double norm, bool models) {
  const SecondMoment second = check_second_moment(kind);
  const bool wide = check_moments(params, m, s, aggregate);
  const auto add = [&](const auto* v) {
    cpu::add_adaptive(params.mutable_data_ptr<float>(), m.mutable_data_ptr<float>(),
                      s.mutable_data_ptr<float>(), v, params.numel(), second, lr, beta_1, beta_2,
                      tau, norm, models, threads());
  };
  wide ? add(aggregate.const_data_ptr<double>()) : add(aggregate.const_data_ptr<float>());
}

constexpr auto cosine_scores = scores_of<cpu::cosine_scores>;
constexpr auto distance_scores = scores_of<cpu::distance_scores>;

}  // namespace

TORCH_LIBRARY_IMPL(fastagg, CPU, m) {
#define FASTAGG_OP(name, cpu, cuda, any, schema) FASTAGG_IF_##cpu(m.impl(#name, name);)
#include "op_table.h"
}

}  // namespace fastagg
