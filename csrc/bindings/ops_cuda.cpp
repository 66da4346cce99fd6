// SPDX-License-Identifier: Apache-2.0
// The CUDA bindings: check arguments, copy small tables to the device, and call fastagg::cuda with
// raw pointers and the current stream. This file is plain C++: nvcc compiles no torch header, and
// this file includes no kernel.
//
// Tensors of rows, [d], [S, S] and [K, K] are on one GPU. Client ids, weights, steps and scales of
// rows may be on the CPU or on that GPU. Ids are checked, and rows are tabulated with what belongs
// to them, on the CPU. So if these are on a GPU, they are fetched first, and that waits for them;
// only weighted_sum_, and the ops that call it, read weights in place. Nothing else here waits.
// Memory comes from torch's caching allocator, which makes no system call after the first call with
// these sizes.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <cmath>

#include "../kernels/cuda/similar_layout.h"
#include "../kernels/cuda/sort_layout.h"
#include "check_apply.h"
#include "check_differences.h"
#include "check_int8_rows.h"
#include "check_models.h"
#include "check_most_similar.h"
#include "check_paired.h"
#include "check_sketch.h"
#include "check_sorted_columns.h"
#include "check_step.h"
#include "cuda_launch.h"
#include "robust_on_cuda.h"
#include "sort_by_torch.h"

namespace fastagg {
namespace {

// A Gram matrix whose workspace is allocated, so that its launch cannot run out of memory.
class GramLaunch {
 public:
  GramLaunch(const OnDevice& on, const Rows& rows, c10::string_view precision,
             const std::optional<int64_t>& segment)
      : S_(rows.size()),
        d_(rows.d),
        segment_(check_segment(segment, d_)),
        precision_(check_precision(precision)) {
    rows_at_ = tables_.add(rows.addresses);
    tables_.upload(on);
    width_.add(rows.addresses);
    int64_t bytes = 0;
    check_launch(cuda::gram_workspace(S_, d_, segment_, &bytes), "gram", "updates [", S_, ", ", d_,
                 "]");
    workspace_ = on.empty({bytes}, at::kByte);
  }
  // out [S, S] = the Gram matrix of the rows.
  void run(const OnDevice& on, const uint8_t* flags, const at::Tensor& out) const {
    check_launch(cuda::gram(tables_.at<const float*>(rows_at_), S_, d_, segment_, flags,
                            out.mutable_data_ptr<double>(), precision_,
                            workspace_.mutable_data_ptr(), width_.value(), on.stream()),
                 "gram", "updates [", S_, ", ", d_, "]");
  }

 private:
  int64_t S_, d_, segment_;
  Precision precision_;
  Tables tables_;
  int64_t rows_at_;
  Width width_;
  at::Tensor workspace_;
};

at::Tensor gram(at::TensorList updates, const std::optional<at::Tensor>& pairs,
                c10::string_view precision, std::optional<int64_t> segment) {
  const OnDevice on(device_of(updates, "updates"), "updates");
  const Rows rows = check_rows(updates, "updates", kAny, on.device());
  const int64_t S = rows.size();
  const uint8_t* flags = check_flags(pairs, "pairs", S, on.device());
  at::Tensor out = on.empty({S, S}, at::kDouble);
  GramLaunch(on, rows, precision, segment).run(on, flags, out);
  return out;
}

// gram of the pairs that have a changed row. The changed rows are placed first, so that these pairs
// fill whole tiles of the kernel, and tiles without a wanted pair end at once.
at::Tensor gram_rows(at::TensorList updates, const at::Tensor& changed,
                     c10::string_view precision) {
  const OnDevice on(device_of(updates, "updates"), "updates");
  Rows rows = check_rows(updates, "updates", kAny, on.device());
  const int64_t S = rows.size(), C = changed.numel();
  std::vector<int64_t> order = check_positions(changed, S), places(S, -1);
  for (int64_t c = 0; c < C; ++c) places[order[c]] = c;
  for (int64_t s = 0; s < S; ++s) {
    if (places[s] >= 0) continue;
    places[s] = static_cast<int64_t>(order.size());
    order.push_back(s);
  }
  rows.addresses = reorder(rows.addresses, order);
  const at::Tensor pairs = on.empty({S, S}, at::kBool), whole = on.empty({S, S}, at::kDouble);
  auto* flags = reinterpret_cast<uint8_t*>(pairs.mutable_data_ptr<bool>());
  Tables tables;
  const int64_t places_at = tables.add(places);
  tables.upload(on);
  at::Tensor out = on.empty({C, S}, at::kDouble);
  const GramLaunch launch(on, rows, precision, std::nullopt);
  if (C == 0) return out;
  check_launch(cuda::first_pairs(S, C, flags, on.stream()), "gram_rows", S, " rows");
  launch.run(on, flags, whole);
  check_launch(
      cuda::take_columns(whole.const_data_ptr<double>(), S, C, tables.at<int64_t>(places_at),
                         out.mutable_data_ptr<double>(), on.stream()),
      "gram_rows", S, " rows");
  return out;
}

at::Tensor abs_max(at::TensorList tensors) {
  const OnDevice on(device_of(tensors, "rows"), "rows");
  const Rows rows = check_rows(tensors, "rows", kAny, on.device());
  const int64_t S = rows.size();
  Tables tables;
  const int64_t rows_at = tables.add(rows.addresses);
  tables.upload(on);
  Width width;
  width.add(rows.addresses);
  at::Tensor out = on.empty({S}, at::kFloat);
  check_launch(cuda::abs_max(tables.at<const float*>(rows_at), S, rows.d,
                             out.mutable_data_ptr<float>(), width.value(), on.stream()),
               "abs_max", "rows [", S, ", ", rows.d, "]");
  return out;
}

// Checks and memory of sketch_. After the constructor, only a launch can fail.
class SketchLaunch {
 public:
  SketchLaunch(const OnDevice& on, const Rows& rows, const at::Tensor& out,
               const at::Tensor& squares, int64_t begin)
      : rows_(rows),
        begin_(begin),
        out_(out),
        sums_(out.to(at::kDouble)),  // out itself, or a copy
        squares_(squares),
        rows_at_(tables_.add(rows.addresses)) {
    tables_.upload(on);
    workspace_ =
        on.empty({cuda::sketch_workspace(rows.size(), rows.d, out.size(1), begin)}, at::kByte);
  }

  void run(const OnDevice& on, int64_t seed) const {
    const int64_t S = rows_.size(), d = rows_.d;
    with_element(rows_.dtype, [&](auto element) {
      using T = decltype(element);
      check_launch(cuda::sketch(sums_.mutable_data_ptr<double>(),
                                squares_.mutable_data_ptr<double>(), tables_.at<const T*>(rows_at_),
                                S, d, out_.size(1), static_cast<uint64_t>(seed), begin_,
                                workspace_.mutable_data_ptr(), on.stream()),
                   "sketch_", "rows [", S, ", ", d, "]");
    });
    if (!sums_.is_same(out_)) out_.copy_(sums_);
  }

 private:
  const Rows& rows_;
  int64_t begin_;
  at::Tensor out_, sums_, squares_;
  Tables tables_;
  int64_t rows_at_;
  at::Tensor workspace_;
};

void sketch_(const at::Tensor& out, const at::Tensor& squares, at::TensorList tensors, int64_t seed,
             int64_t begin) {
  const OnDevice on(out, "out");
  const Rows rows = check_sketch(out, squares, tensors, begin);
  SketchLaunch(on, rows, out, squares, begin).run(on, seed);
}

template <cudaError_t (*kScores)(const double*, int64_t, double*, cudaStream_t)>
at::Tensor scores_of(const at::Tensor& gram) {
  const OnDevice on(gram, "gram");
  const int64_t S = gram.dim() == 2 ? gram.size(0) : 0;
  check_floating(gram, "gram", {S, S});
  const at::Tensor wide = gram.to(at::kDouble);
  at::Tensor out = on.empty({S, S}, at::kDouble);
  check_launch(
      kScores(wide.const_data_ptr<double>(), S, out.mutable_data_ptr<double>(), on.stream()),
      "scores", "gram [", S, ", ", S, "]");
  return out.to(gram.scalar_type());
}

// Checks `when`, which kernels read in place.
const uint8_t* check_flag(const std::optional<at::Tensor>& when, const OnDevice& on,
                          const ChangedMemory& changed) {
  const uint8_t* flag = check_when(when, on.device());
  if (when) changed.check(*when, "when");
  return flag;
}

void update_scores_(const at::Tensor& scores, const at::Tensor& counts,
                    const at::Tensor& round_scores, const at::Tensor& clients,
                    const std::optional<at::Tensor>& pairs, const std::optional<at::Tensor>& when) {
  const OnDevice on(scores, "scores");
  const int64_t K = check_scores(scores, counts);
  const int64_t S = clients.numel();
  check_floating(round_scores, "round_scores", {S, S});
  check_same_device(round_scores, "round_scores", on.device());
  const uint8_t* flags = check_flags(pairs, "pairs", S, on.device());
  const ChangedMemory changed = changed_scores(scores, counts, round_scores, pairs);
  const uint8_t* flag = check_flag(when, on, changed);
  Tables tables;
  const int64_t* ids = nullptr;
  at::Tensor wrong;                 // scratch memory, if kernels check the ids
  if (when && clients.is_cuda()) {  // `when` is for calls that must not wait
    check_tensor(clients, "clients", at::kLong, {S});
    check_same_device(clients, "clients", on.device());
    changed.check(clients, "clients");  // they are read in place
    ids = clients.const_data_ptr<int64_t>();
    wrong = on.empty({1}, at::kInt);
  } else {
    const at::Tensor here = clients.is_cuda() ? clients.to(at::kCPU) : clients;
    const int64_t* given = check_clients(here, S, K);
    const int64_t begin = tables.add(std::vector<int64_t>(given, given + S));
    tables.upload(on);
    ids = tables.at<int64_t>(begin);
  }
  const at::Tensor wide = round_scores.to(at::kDouble);
  const auto update = [&](auto* data) {
    check_launch(cuda::update_scores(scores.mutable_data_ptr<float>(), data, K,
                                     wide.const_data_ptr<double>(), ids, S, flags, flag,
                                     wrong.defined() ? wrong.mutable_data_ptr<int32_t>() : nullptr,
                                     on.stream()),
                 "update_scores_", "scores [", K, ", ", K, "], clients [", S, "]");
  };
  if (counts.scalar_type() == at::kShort)
    update(counts.mutable_data_ptr<int16_t>());
  else
    update(counts.mutable_data_ptr<int32_t>());
}

at::Tensor select_friends(const at::Tensor& scores, const at::Tensor& counts,
                          const at::Tensor& active, const std::optional<at::Tensor>& candidates) {
  const OnDevice on(scores, "scores");
  const int64_t K = check_scores(scores, counts);
  check_tensor(active, "active", at::kBool, {K});
  check_same_device(active, "active", on.device());
  Flags flags{nullptr, false};
  if (candidates)
    flags = {static_cast<const uint8_t*>(candidates->const_data_ptr()),
             check_candidates(*candidates, K, on.device())};
  at::Tensor friends = on.empty({K}, at::kLong);
  check_launch(cuda::select_friends(scores.const_data_ptr<float>(), read_counts(counts),
                                    reinterpret_cast<const uint8_t*>(active.const_data_ptr<bool>()),
                                    flags, K, friends.mutable_data_ptr<int64_t>(), on.stream()),
               "select_friends", "scores [", K, ", ", K, "]");
  return friends;
}

std::tuple<at::Tensor, at::Tensor> most_similar(const at::Tensor& queries, const at::Tensor& rows,
                                                const at::Tensor& factors,
                                                const std::optional<at::Tensor>& query_ids,
                                                const std::optional<at::Tensor>& row_ids,
                                                const std::optional<at::Tensor>& splits) {
  const OnDevice on(queries, "queries");
  const SimilarSizes sizes = check_most_similar(queries, rows, factors, query_ids, row_ids, splits);
  std::vector<int64_t> spans;
  for (int64_t g = 0; g < sizes.groups; ++g) {
    const int64_t* split = sizes.splits.data() + 2 * g;
    for (int64_t begin = split[0]; begin < split[2]; begin += cuda::kSimilarTile) {
      const int64_t end = std::min<int64_t>(begin + cuda::kSimilarTile, split[2]);
      spans.insert(spans.end(), {begin, end, split[1], split[3]});
    }
  }
  Tables tables;
  const int64_t spans_at = tables.add(spans);
  const auto add_ids = [&](const std::optional<at::Tensor>& given) {  // of ids on the CPU
    if (!given || given->is_cuda()) return int64_t{-1};
    const auto* id = given->const_data_ptr<int64_t>();
    return tables.add(std::vector<int64_t>(id, id + given->numel()));
  };
  const int64_t query_ids_at = add_ids(query_ids), row_ids_at = add_ids(row_ids);
  tables.upload(on);
  const auto ids = [&](const std::optional<at::Tensor>& given, int64_t begin) -> const int64_t* {
    if (!given) return nullptr;
    return begin < 0 ? given->const_data_ptr<int64_t>() : tables.at<int64_t>(begin);
  };
  at::Tensor best = on.empty({sizes.queries}, at::kLong);
  at::Tensor similarity = on.empty({sizes.queries}, at::kFloat);
  check_launch(cuda::most_similar(queries.const_data_ptr<int8_t>(), ids(query_ids, query_ids_at),
                                  rows.const_data_ptr<int8_t>(), factors.const_data_ptr<float>(),
                                  ids(row_ids, row_ids_at), tables.at<int64_t>(spans_at),
                                  static_cast<int64_t>(spans.size()) / 4, sizes.k,
                                  best.mutable_data_ptr<int64_t>(),
                                  similarity.mutable_data_ptr<float>(), on.stream()),
               "most_similar", "queries [", sizes.queries, ", ", sizes.k, "], rows [", sizes.rows,
               ", ", sizes.k, "]");
  return {best, similarity};
}

void eliminate_(const at::Tensor& candidates, const at::Tensor& scores, const at::Tensor& counts,
                double threshold, const std::optional<at::Tensor>& when) {
  const OnDevice on(scores, "scores");
  const int64_t K = check_scores(scores, counts);
  const bool packed = check_candidates(candidates, K, on.device());
  check_threshold(threshold);
  const ChangedMemory changed = changed_candidates(candidates, scores, counts);
  check_launch(cuda::eliminate(static_cast<uint8_t*>(candidates.mutable_data_ptr()), packed,
                               scores.const_data_ptr<float>(), read_counts(counts), K, threshold,
                               check_flag(when, on, changed), on.stream()),
               "eliminate_", "scores [", K, ", ", K, "]");
}

void weighted_sum_(const at::Tensor& out, at::TensorList tensors, const at::Tensor& weights,
                   double beta, const std::optional<at::Tensor>& when) {
  const OnDevice on(out, "out");
  const int64_t d = out.numel();
  check_tensor(out, "out", at::kFloat, {d});
  const Rows rows = check_rows(tensors, "rows", d, on.device(), Elements::kAlsoShort);
  const int64_t S = rows.size();
  ChangedMemory changed;
  changed.add(out, "out");
  changed.check_rows(rows.addresses, rows.row_bytes(), "rows");
  const uint8_t* flag = check_flag(when, on, changed);
  Tables tables;
  const int64_t rows_at = tables.add(rows.addresses);
  at::Tensor wide;  // weights that are on the device already
  int64_t numbers = 0;
  if (weights.is_cuda()) {
    check_floating(weights, "weights", {S});
    check_same_device(weights, "weights", on.device());
    changed.check(weights, "weights");  // float64 weights are read in place
    wide = weights.to(at::kDouble);
  } else {
    numbers = tables.add(check_weights(weights, S, weights.device()));
  }
  tables.upload(on);
  Width width;
  width.add(rows.addresses, rows.element_bytes());
  width.add(out.const_data_ptr());
  const double* factors =
      wide.defined() ? wide.const_data_ptr<double>() : tables.at<double>(numbers);
  with_element(rows.dtype, [&](auto element) {
    using T = decltype(element);
    check_launch(cuda::weighted_sum(out.mutable_data_ptr<float>(), tables.at<const T*>(rows_at), S,
                                    d, factors, beta, flag, width.value(), on.stream()),
                 "weighted_sum_", "rows [", S, ", ", d, "]");
  });
}

// The sum goes to scratch memory. Its peak and that of params are found on the device, and the
// kernel that moves params decides from them, so that nothing waits.
void apply_weighted_sum_(const at::Tensor& params, const at::Tensor& before,
                         const at::Tensor& applied, at::TensorList tensors,
                         const at::Tensor& weights, double lr, double largest, double limit) {
  const OnDevice on(params, "params");
  check_apply(params, before, applied, tensors);
  const at::Tensor sum = on.empty(params.sizes(), at::kFloat);
  weighted_sum_(sum, tensors, weights, 0.0, std::nullopt);
  const at::Tensor peaks = abs_max({params, sum});
  check_launch(cuda::apply_sum(params.mutable_data_ptr<float>(), before.mutable_data_ptr<float>(),
                               applied.mutable_data_ptr<bool>(), sum.const_data_ptr<float>(),
                               peaks.const_data_ptr<float>(), params.numel(), lr, largest, limit,
                               on.stream()),
               "apply_weighted_sum_", "params [", params.numel(), "]");
}

// Two passes over the rows, and no memory for the differences.
void difference_sum_(const at::Tensor& out, const at::Tensor& squares, at::TensorList tensors,
                     const at::Tensor& base, const at::Tensor& weights) {
  const OnDevice on(out, "out");
  const Rows rows = check_differences(out, squares, tensors, base);
  const int64_t S = rows.size(), d = rows.d;
  const at::Tensor here = weights.to(at::kCPU);
  Tables tables;
  const int64_t rows_at = tables.add(rows.addresses);
  const int64_t weights_at = tables.add(check_weights(here, S, here.device()));
  tables.upload(on);
  Width width;
  width.add(rows.addresses, rows.element_bytes());
  width.add(base.const_data_ptr());
  width.add(out.const_data_ptr());
  const at::Tensor parts = on.empty({cuda::squares_workspace(S, d)}, at::kByte);
  with_element(rows.dtype, [&](auto element) {
    using T = decltype(element);
    const auto* at = tables.at<const T*>(rows_at);
    const auto* from = base.const_data_ptr<float>();
    check_launch(
        cuda::weighted_difference(out.mutable_data_ptr<float>(), at, from, S, d,
                                  tables.at<double>(weights_at), width.value(), on.stream()),
        "difference_sum_", "rows [", S, ", ", d, "]");
    check_launch(
        cuda::difference_squares(squares.mutable_data_ptr<double>(), at, from, S, d,
                                 reinterpret_cast<double*>(parts.mutable_data_ptr<uint8_t>()),
                                 width.value(), on.stream()),
        "difference_sum_", "rows [", S, ", ", d, "]");
  });
}

// A kernel sorts the columns of at most kMostSorted rows. launch(out, peak, rows, scales, stream)
// calls it.
template <class Launch>
void sort_columns(const at::Tensor& out, const at::Tensor& peak, const Rows& rows,
                  const std::optional<at::Tensor>& scales, const char* name, const Launch& launch) {
  const std::vector<float> factors = check_scales_anywhere(scales, rows.size());
  const OnDevice on(out, "out");
  Tables tables;
  const int64_t rows_at = tables.add(rows.addresses);
  const int64_t scales_at = tables.add(std::vector<double>(factors.begin(), factors.end()));
  tables.upload(on);
  const double* const wide = scales ? tables.at<double>(scales_at) : nullptr;
  with_element(rows.dtype, [&](auto element) {
    using T = decltype(element);
    check_launch(launch(out.mutable_data_ptr<float>(), peak.mutable_data_ptr<float>(),
                        tables.at<const T*>(rows_at), wide, on.stream()),
                 name, "rows [", rows.size(), ", ", rows.d, "]");
  });
}

void trimmed_mean_(const at::Tensor& out, const at::Tensor& peak, at::TensorList tensors,
                   int64_t trim, const std::optional<at::Tensor>& scales) {
  const Rows rows = check_trimmed_mean(out, peak, tensors, trim);
  const int64_t S = rows.size(), d = rows.d;
  if (S > cuda::kMostSorted) return trimmed_mean_by_torch(out, peak, tensors, trim, scales);
  sort_columns(out, peak, rows, scales, "trimmed_mean_",
               [&](float* to, float* most, auto at, const double* by, auto stream) {
                 return cuda::trimmed_mean(to, most, at, S, d, trim, by, stream);
               });
}

void meamed_(const at::Tensor& out, const at::Tensor& peak, at::TensorList tensors, int64_t keep,
             const std::optional<at::Tensor>& scales) {
  const Rows rows = check_meamed(out, peak, tensors, keep);
  const int64_t S = rows.size(), d = rows.d;
  if (S > cuda::kMostSorted) return meamed_by_torch(out, peak, tensors, keep, scales);
  sort_columns(out, peak, rows, scales, "meamed_",
               [&](float* to, float* most, auto at, const double* by, auto stream) {
                 return cuda::meamed(to, most, at, S, d, keep, by, stream);
               });
}

// Two passes over the rows: one kernel for both results would have to hold the columns of all rows.
// Everything that can fail is done before the first kernel writes.
void gram_and_sum_(const at::Tensor& out, const at::Tensor& gram, at::TensorList tensors,
                   const at::Tensor& weights, c10::string_view precision) {
  const OnDevice on(out, "out");
  const Rows rows = check_rows(tensors, "rows", out.numel(), on.device());
  const int64_t S = rows.size();
  check_tensor(gram, "gram", at::kDouble, {S, S});
  check_same_device(gram, "gram", on.device());
  ChangedMemory changed;
  changed.add(out, "out");
  changed.add(gram, "gram");
  changed.check_rows(rows.addresses, rows.row_bytes(), "rows");
  changed.check(weights, "weights");
  const GramLaunch launch(on, rows, precision, std::nullopt);
  weighted_sum_(out, tensors, weights, 0.0, std::nullopt);
  launch.run(on, nullptr, gram);
}

at::ScalarType dtype_of(cpu::Element element) {
  return element == cpu::Element::kFloat      ? at::kFloat
         : element == cpu::Element::kBfloat16 ? at::kBFloat16
                                              : at::kHalf;
}

// The differences are written to scratch memory [S, d]: gram reads rows that are in one piece.
void difference_gram_and_sum_(const at::Tensor& out, const at::Tensor& gram, at::TensorList models,
                              const at::Tensor& base, const at::Tensor& weights, int64_t begin) {
  const OnDevice on(out, "out");
  check_dense(weights, "weights");
  const int64_t S = weights.numel(), d = out.numel(), end = begin + d;
  const std::vector<cpu::ModelPart> parts = check_models(out, gram, models, base, S, begin);
  check_floating(weights, "weights", {S});
  const at::Tensor rows = on.empty({S, d}, at::kFloat);
  for (const cpu::ModelPart& part : parts) {
    const int64_t first = std::max(begin, part.begin), last = std::min(end, part.begin + part.size);
    if (first >= last) continue;
    with_element(dtype_of(part.element), [&](auto element) {
      using T = decltype(element);
      std::vector<const T*> at;
      for (const void* row : part.rows)
        at.push_back(static_cast<const T*>(row) + (first - part.begin));
      Tables tables;
      const int64_t rows_at = tables.add(at);
      tables.upload(on);
      check_launch(
          cuda::differences(rows.mutable_data_ptr<float>() + (first - begin), d,
                            tables.at<const T*>(rows_at), base.const_data_ptr<float>() + first, S,
                            last - first, on.stream()),
          "difference_gram_and_sum_", "models [", S, ", ", d, "]");
    });
  }
  gram_and_sum_(out, gram, rows, weights, "highest");
}

// Two passes over the rows, as gram_and_sum_.
void sketch_and_sum_(const at::Tensor& sum, const at::Tensor& out, const at::Tensor& squares,
                     at::TensorList tensors, const at::Tensor& weights, int64_t seed,
                     int64_t begin) {
  const OnDevice on(out, "out");
  const Rows rows = check_sketch_and_sum(sum, out, squares, tensors, begin);
  check_floating(weights, "weights", {rows.size()});
  ChangedMemory changed;
  changed.add(sum, "sum");
  changed.add(out, "out");
  changed.add(squares, "squares");
  changed.check(weights, "weights");
  const SketchLaunch sketch(on, rows, out, squares, begin);
  weighted_sum_(sum, tensors, weights, 0.0, std::nullopt);
  sketch.run(on, seed);
}

void mimic_(const at::Tensor& params, at::TensorList tensors, at::TensorList corrections,
            const at::Tensor& clients, double lr) {
  const OnDevice on(params, "params");
  const PairedRows given = check_mimic(params, tensors, corrections, clients.to(at::kCPU));
  const int64_t S = given.size(), d = given.d;
  PairedTables rows(on, given);
  rows.width().add(params.const_data_ptr());
  with_element(given.updates.dtype, [&](auto element) {
    using T = decltype(element);
    check_launch(cuda::mimic(params.mutable_data_ptr<float>(), rows.updates<T>(), rows.own<float>(),
                             S, d, lr, rows.width().value(), on.stream()),
                 "mimic_", "updates [", S, ", ", d, "]");
  });
}

void memory_update_(const at::Tensor& params, const at::Tensor& total, at::TensorList memory,
                    at::TensorList tensors, const at::Tensor& clients, const at::Tensor& weights,
                    double lr, double norm, bool models) {
  const OnDevice on(params, "params");
  const PairedRows given = check_memory_update(params, total, memory, tensors, clients.to(at::kCPU),
                                               weights.to(at::kCPU));
  const int64_t S = given.size(), d = given.d;
  PairedTables rows(on, given);
  rows.width().add(params.const_data_ptr());
  with_element(given.updates.dtype, [&](auto element) {
    using T = decltype(element);
    check_launch(
        cuda::memory_update(params.mutable_data_ptr<float>(), total.mutable_data_ptr<double>(),
                            rows.updates<T>(), rows.own<float>(), S, d, rows.weights(), lr, norm,
                            models, rows.width().value(), on.stream()),
        "memory_update_", "updates [", S, ", ", d, "]");
  });
}

std::optional<at::Tensor> on_cpu(const std::optional<at::Tensor>& t) {
  return t ? std::optional<at::Tensor>(t->to(at::kCPU)) : std::nullopt;
}

// The kernels do not scale rows: if scales are given, `rows` has the addresses of scaled copies
// from here on. Returns the copies.
std::vector<at::Tensor> scale_updates(PairedRows& rows, at::TensorList tensors) {
  std::vector<at::Tensor> copies;
  if (rows.scales.empty()) return copies;
  TORCH_CHECK_TYPE(rows.updates.dtype == at::kFloat,
                   "updates: expected dtype Float with scales, got ", rows.updates.dtype);
  const std::vector<at::Tensor> given = one_by_one(tensors);
  for (int64_t s = 0; s < rows.size(); ++s) {
    copies.push_back(given[rows.order[s]].mul(rows.scales[s]));
    rows.updates.addresses[s] = static_cast<const char*>(copies[s].const_data_ptr());
  }
  return copies;
}

void mimic_mean_(const at::Tensor& out, const at::Tensor& rounded, const at::Tensor& peaks,
                 at::TensorList tensors, at::TensorList corrections, const at::Tensor& clients,
                 const c10::List<std::optional<at::Tensor>>& references, at::TensorList kept,
                 bool copies, const std::optional<at::Tensor>& weights,
                 const std::optional<at::Tensor>& scales) {
  const OnDevice on(out, "out");
  PairedRows given =
      check_mimic_mean(out, rounded, peaks, tensors, corrections, clients.to(at::kCPU), references,
                       kept, on_cpu(weights), on_cpu(scales));
  const int64_t S = given.size(), d = given.d;
  const std::vector<at::Tensor> scaled = scale_updates(given, tensors);
  PairedTables rows(on, given);
  rows.width().add(rounded.const_data_ptr());
  const at::Tensor largest = on.empty({S}, at::kFloat);
  with_element(given.updates.dtype, [&](auto element) {
    using T = decltype(element);
    check_launch(cuda::mimic_mean(out.mutable_data_ptr<double>(), rounded.mutable_data_ptr<float>(),
                                  largest.mutable_data_ptr<float>(), rows.updates<T>(),
                                  rows.own<const T>(), rows.references(), rows.weights(),
                                  rows.kept(), copies, S, d, rows.width().value(), on.stream()),
                 "mimic_mean_", "updates [", S, ", ", d, "]");
  });
  rows.write_peaks(peaks, largest);
}

void memory_total_(const at::Tensor& out, const at::Tensor& peaks, const at::Tensor& total,
                   at::TensorList memory, at::TensorList tensors, const at::Tensor& clients,
                   const at::Tensor& weights,
                   const c10::List<std::optional<at::Tensor>>& references,
                   const std::optional<at::Tensor>& params, at::TensorList kept,
                   const std::optional<at::Tensor>& scales, const std::optional<at::Tensor>& faded,
                   const std::optional<at::Tensor>& faded_weights, double fading) {
  const OnDevice on(out, "out");
  PairedRows given = check_memory_total(out, peaks, total, memory, tensors, clients.to(at::kCPU),
                                        weights.to(at::kCPU), references, params, kept,
                                        on_cpu(scales), faded, on_cpu(faded_weights), Rounded::kNo);
  const int64_t S = given.size(), d = given.d;
  const std::vector<at::Tensor> scaled = scale_updates(given, tensors);
  PairedTables rows(on, given);
  const float* base = params ? params->const_data_ptr<float>() : nullptr;
  rows.width().add(base);
  const at::Tensor largest = on.empty({S}, at::kFloat);
  with_element(given.updates.dtype, [&](auto element) {
    using T = decltype(element);
    check_launch(
        cuda::memory_total(out.mutable_data_ptr<double>(), largest.mutable_data_ptr<float>(),
                           total.const_data_ptr<double>(), rows.updates<T>(), rows.own<const T>(),
                           rows.references(), S, d, rows.weights(), base, rows.kept(),
                           faded_total(faded, rows.faded_weights(), fading), rows.width().value(),
                           on.stream()),
        "memory_total_", "updates [", S, ", ", d, "]");
  });
  rows.write_peaks(peaks, largest);
}

void scaffold_mean_(const at::Tensor& out, const at::Tensor& next, const at::Tensor& peaks,
                    const at::Tensor& mean, at::TensorList tensors, at::TensorList controls,
                    const at::Tensor& clients, const at::Tensor& weights, const at::Tensor& steps,
                    double part, at::TensorList kept) {
  const OnDevice on(out, "out");
  const PairedRows given =
      check_scaffold_mean(out, next, peaks, mean, tensors, controls, clients.to(at::kCPU),
                          weights.to(at::kCPU), steps.to(at::kCPU), kept);
  const int64_t S = given.size(), d = given.d;
  PairedTables rows(on, given);
  rows.width().add(next.const_data_ptr());
  rows.width().add(mean.const_data_ptr());
  const at::Tensor largest = on.empty({S}, at::kFloat);
  check_launch(
      cuda::scaffold_mean(out.mutable_data_ptr<double>(), next.mutable_data_ptr<float>(),
                          largest.mutable_data_ptr<float>(), mean.const_data_ptr<float>(),
                          rows.updates<float>(), rows.own<const float>(), rows.weights(),
                          rows.steps(), part, rows.kept(), S, d, rows.width().value(), on.stream()),
      "scaffold_mean_", "updates [", S, ", ", d, "]");
  rows.write_peaks(peaks, largest);
}

void lerp_total_(const at::Tensor& total, const at::Tensor& end, double weight) {
  const OnDevice on(total, "total");
  const int64_t d = total.numel();
  check_lerp_total(total, end);
  check_launch(cuda::lerp_total(total.mutable_data_ptr<double>(), end.const_data_ptr<double>(), d,
                                weight, on.stream()),
               "lerp_total_", "total [", d, "]");
}

void add_total_(const at::Tensor& params, const at::Tensor& total, double lr, double norm,
                bool models) {
  const OnDevice on(params, "params");
  const int64_t d = params.numel();
  check_add_total(params, total);
  check_launch(cuda::add_total(params.mutable_data_ptr<float>(), total.const_data_ptr<double>(), d,
                               lr, norm, models, on.stream()),
               "add_total_", "params [", d, "]");
}

// As apply_weighted_sum_: the kernel decides from peaks on the device.
void apply_aggregate_(const at::Tensor& params, const at::Tensor& applied,
                      const at::Tensor& aggregate, double lr, double norm, double peak,
                      double limit) {
  const OnDevice on(params, "params");
  const bool wide = check_apply_aggregate(params, applied, aggregate, norm);
  const int64_t d = params.numel();
  auto* moved = params.mutable_data_ptr<float>();
  auto* flag = applied.mutable_data_ptr<bool>();
  if (wide) {
    const at::Tensor known = abs_max({params});
    check_launch(
        cuda::apply_total(moved, flag, aggregate.const_data_ptr<double>(),
                          known.const_data_ptr<float>(), d, lr, norm, peak, limit, on.stream()),
        "apply_aggregate_", "params [", d, "]");
    return;
  }
  const at::Tensor peaks = abs_max({params, aggregate});
  check_launch(cuda::apply_sum(moved, nullptr, flag, aggregate.const_data_ptr<float>(),
                               peaks.const_data_ptr<float>(), d, lr, peak, limit, on.stream()),
               "apply_aggregate_", "params [", d, "]");
}

// Rows of int8 numbers. Scales and float rows are read and written one by one.

void quantize_(at::TensorList numbers, const at::Tensor& scales, at::TensorList tensors) {
  const OnDevice on(scales, "scales");
  const QuantizeRows given = check_quantize(numbers, scales, tensors);
  const int64_t S = given.size(), d = given.d;
  Tables tables;
  const int64_t numbers_at = tables.add(given.numbers), scales_at = tables.add(given.scales);
  const int64_t rows_at = tables.add(given.rows);
  tables.upload(on);
  check_launch(cuda::quantize(tables.at<int8_t*>(numbers_at), tables.at<float*>(scales_at),
                              tables.at<const float*>(rows_at), S, d, on.stream()),
               "quantize_", "rows [", S, ", ", d, "]");
}

void dequantize_(at::TensorList out, at::TensorList numbers, at::TensorList scales) {
  const DequantizeRows given = check_dequantize(out, numbers, scales);
  const int64_t S = given.size(), d = given.d;
  if (S == 0) return;
  const OnDevice on(out[0], "out");
  Tables tables;
  const int64_t out_at = tables.add(given.out), numbers_at = tables.add(given.numbers);
  const int64_t scales_at = tables.add(given.scales);
  tables.upload(on);
  check_launch(cuda::dequantize(tables.at<float*>(out_at), tables.at<const int8_t*>(numbers_at),
                                tables.at<const float*>(scales_at), S, d, on.stream()),
               "dequantize_", "out [", S, ", ", d, "]");
}

void quantized_total_(const at::Tensor& out, const at::Tensor& peaks, const at::Tensor& total,
                      at::TensorList memory, at::TensorList memory_scales, at::TensorList tensors,
                      const at::Tensor& clients, const at::Tensor& weights, at::TensorList kept,
                      const at::Tensor& kept_scales, const std::optional<at::Tensor>& faded,
                      const std::optional<at::Tensor>& faded_weights, double fading) {
  const OnDevice on(out, "out");
  const QuantizedTotal given =
      check_quantized_total(out, peaks, total, memory, memory_scales, tensors, clients.to(at::kCPU),
                            weights.to(at::kCPU), kept, kept_scales, faded, on_cpu(faded_weights));
  const int64_t S = given.size(), d = given.d;
  Tables tables;
  const int64_t updates_at = tables.add(given.updates), memory_at = tables.add(given.memory);
  const int64_t memory_scales_at = tables.add(given.memory_scales);
  const int64_t weights_at = tables.add(given.weights), kept_at = tables.add(given.kept);
  const int64_t faded_weights_at = tables.add(given.faded_weights);
  const int64_t kept_scales_at = tables.add(given.kept_scales), order_at = tables.add(given.order);
  tables.upload(on);
  std::uintptr_t numbers = 0;
  for (const int8_t* address : given.memory) numbers |= reinterpret_cast<std::uintptr_t>(address);
  for (const int8_t* address : given.kept) numbers |= reinterpret_cast<std::uintptr_t>(address);
  const at::Tensor largest = on.empty({S}, at::kFloat);
  check_launch(cuda::quantized_total(
                   out.mutable_data_ptr<double>(), largest.mutable_data_ptr<float>(),
                   total.const_data_ptr<double>(), tables.at<const float*>(updates_at),
                   tables.at<const int8_t*>(memory_at), tables.at<const float*>(memory_scales_at),
                   S, d, tables.at<double>(weights_at), tables.at<int8_t*>(kept_at),
                   tables.at<float*>(kept_scales_at),
                   faded_total(faded, tables.at<double>(faded_weights_at), fading),
                   cuda::vector_width(numbers, 1), on.stream()),
               "quantized_total_", "updates [", S, ", ", d, "]");
  peaks.index_copy_(0, tables.ids(order_at, S), largest);
}

void add_momentum_(const at::Tensor& params, const at::Tensor& m, const at::Tensor& aggregate,
                   double lr, double beta_1, bool nesterov, double norm, bool models) {
  const OnDevice on(params, "params");
  const int64_t d = params.numel();
  const bool wide = check_moments(params, m, std::nullopt, aggregate);
  const auto add = [&](const auto* v) {
    check_launch(cuda::add_momentum(params.mutable_data_ptr<float>(), m.mutable_data_ptr<float>(),
                                    v, d, lr, beta_1, nesterov, norm, models, on.stream()),
                 "add_momentum_", "params [", d, "]");
  };
  wide ? add(aggregate.const_data_ptr<double>()) : add(aggregate.const_data_ptr<float>());
}

void add_adaptive_(const at::Tensor& params, const at::Tensor& m, const at::Tensor& s,
                   const at::Tensor& aggregate, c10::string_view kind, double lr, double beta_1,
                   double beta_2, double tau, double norm, bool models) {
  const OnDevice on(params, "params");
  const int64_t d = params.numel();
  const SecondMoment second = check_second_moment(kind);
  const bool wide = check_moments(params, m, s, aggregate);
  const auto add = [&](const auto* v) {
    check_launch(cuda::add_adaptive(params.mutable_data_ptr<float>(), m.mutable_data_ptr<float>(),
                                    s.mutable_data_ptr<float>(), v, d, second, lr, beta_1, beta_2,
                                    tau, norm, models, on.stream()),
                 "add_adaptive_", "params [", d, "]");
  };
  wide ? add(aggregate.const_data_ptr<double>()) : add(aggregate.const_data_ptr<float>());
}

constexpr auto cosine_scores = scores_of<cuda::cosine_scores>;
constexpr auto distance_scores = scores_of<cuda::distance_scores>;

}  // namespace

TORCH_LIBRARY_IMPL(fastagg, CUDA, m) {
#define FASTAGG_OP(name, cpu, cuda, any, schema) FASTAGG_IF_##cuda(m.impl(#name, name);)
#include "op_table.h"
}

}  // namespace fastagg
