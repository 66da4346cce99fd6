// SPDX-License-Identifier: Apache-2.0
// CUDA implementations: check, put small tables on the device, and hand raw pointers and the
// current stream to fastagg::cuda. Plain C++: nvcc never sees torch, and this file never a kernel.
//
// Large tensors, and those of [S, S] and [K, K], live on one GPU. Client ids, and weights of rows,
// may be on the CPU or there. Row addresses are made on the CPU, so ids on a GPU have to be
// fetched, which waits for them, where they choose or order rows. Nothing else here waits; memory
// comes from torch's caching allocator, which makes no system call once it has seen these sizes.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cmath>
#include <cstring>

#include "../kernels/cuda_kernels.h"
#include "../kernels/row_layout.h"
#include "checks.h"

namespace fastagg {
namespace {

// The device of an operator's main argument: it becomes the current one, and the work goes to its
// current stream.
class OnDevice {
 public:
  OnDevice(const at::Tensor& tensor, const char* name) : OnDevice(tensor.device(), name) {}
  OnDevice(const at::Device& device, const char* name)
      : device_(checked(device, name)), guard_(device) {}

  const at::Device& device() const { return device_; }
  cudaStream_t stream() const { return c10::cuda::getCurrentCUDAStream(device_.index()).stream(); }
  at::Tensor empty(at::IntArrayRef shape, at::ScalarType dtype) const {
    return at::empty(shape, at::TensorOptions().dtype(dtype).device(device_));
  }

 private:
  static at::Device checked(const at::Device& device, const char* name) {
    TORCH_CHECK_VALUE(device.is_cuda(), name,
                      ": expected a CUDA tensor, as other arguments are, got one on ", device);
    return device;
  }
  at::Device device_;
  c10::cuda::CUDAGuard guard_;
};

template <class... Sizes>
void check_launch(cudaError_t error, const char* op, const Sizes&... sizes) {
  TORCH_CHECK(error == cudaSuccess, "fastagg::", op, " on ", sizes..., ": ",
              cudaGetErrorString(error));
}

// Tables of 64-bit words (addresses, doubles, ids) that go to the device together.
class Tables {
 public:
  template <class T>
  int64_t add(const std::vector<T>& items) {
    static_assert(sizeof(T) == sizeof(uint64_t));
    const auto begin = static_cast<int64_t>(words_.size());
    words_.resize(words_.size() + items.size());
    if (!items.empty()) std::memcpy(&words_[begin], items.data(), items.size() * sizeof(T));
    return begin;
  }
  void upload(const OnDevice& on) {
    const auto n = static_cast<int64_t>(words_.size());
    memory_ = on.empty({n}, at::kLong);
    auto* to = reinterpret_cast<uint64_t*>(memory_.mutable_data_ptr<int64_t>());
    check_launch(cuda::store_words(words_.data(), n, to, on.stream()), "store_words", n, " words");
  }
  // The table that began at `begin`, on the device.
  template <class T>
  T* at(int64_t begin) const {
    return reinterpret_cast<T*>(memory_.mutable_data_ptr<int64_t>() + begin);
  }
  at::Tensor ids(int64_t begin, int64_t count) const { return memory_.narrow(0, begin, count); }

 private:
  std::vector<uint64_t> words_;
  at::Tensor memory_;
};

// The widest access that all the addresses given allow.
class Width {
 public:
  void add(const void* address) { bits_ |= reinterpret_cast<std::uintptr_t>(address); }
  template <class T>
  void add(const std::vector<T*>& addresses) {
    for (T* address : addresses) add(address);
  }
  int value() const { return cuda::vector_width(bits_); }

 private:
  std::uintptr_t bits_ = 0;
};

// out [S, S] = the Gram matrix of the rows.
void launch_gram(const OnDevice& on, const Rows& rows, const uint8_t* flags,
                 const at::Tensor& out) {
  const int64_t S = rows.size();
  Tables tables;
  const int64_t pointers = tables.add(rows.pointers);
  tables.upload(on);
  Width width;
  width.add(rows.pointers);
  at::Tensor workspace = on.empty({cuda::gram_workspace(S, rows.d)}, at::kByte);
  check_launch(cuda::gram(tables.at<const float*>(pointers), S, rows.d, flags,
                          out.mutable_data_ptr<double>(), workspace.mutable_data_ptr(),
                          width.value(), on.stream()),
               "gram", "updates [", S, ", ", rows.d, "]");
}

at::Tensor gram(at::TensorList updates, const std::optional<at::Tensor>& pairs) {
  const OnDevice on(device_of(updates, "updates"), "updates");
  const Rows rows = check_rows(updates, "updates", kAny, on.device());
  const int64_t S = rows.size();
  const uint8_t* flags = check_flags(pairs, "pairs", S, on.device());
  at::Tensor out = on.empty({S, S}, at::kDouble);
  launch_gram(on, rows, flags, out);
  return out;
}

at::Tensor abs_max(at::TensorList tensors) {
  const OnDevice on(device_of(tensors, "rows"), "rows");
  const Rows rows = check_rows(tensors, "rows", kAny, on.device());
  const int64_t S = rows.size();
  Tables tables;
  const int64_t pointers = tables.add(rows.pointers);
  tables.upload(on);
  Width width;
  width.add(rows.pointers);
  at::Tensor out = on.empty({S}, at::kFloat);
  check_launch(cuda::abs_max(tables.at<const float*>(pointers), S, rows.d,
                             out.mutable_data_ptr<float>(), width.value(), on.stream()),
               "abs_max", "rows [", S, ", ", rows.d, "]");
  return out;
}

template <cudaError_t (*kScores)(const double*, int64_t, double*, cudaStream_t)>
at::Tensor scores_of(const at::Tensor& gram) {
  const OnDevice on(gram, "gram");
  TORCH_CHECK_TYPE(gram.scalar_type() == at::kFloat || gram.scalar_type() == at::kDouble,
                   "gram: expected dtype Float or Double, got ", gram.scalar_type());
  const int64_t S = gram.dim() == 2 ? gram.size(0) : 0;
  check_tensor(gram, "gram", gram.scalar_type(), {S, S});
  const at::Tensor wide = gram.to(at::kDouble);
  at::Tensor out = on.empty({S, S}, at::kDouble);
  check_launch(
      kScores(wide.const_data_ptr<double>(), S, out.mutable_data_ptr<double>(), on.stream()),
      "scores", "gram [", S, ", ", S, "]");
  return out.to(gram.scalar_type());
}

void update_scores_(const at::Tensor& scores, const at::Tensor& counts,
                    const at::Tensor& round_scores, const at::Tensor& clients,
                    const std::optional<at::Tensor>& pairs) {
  const OnDevice on(scores, "scores");
  const int64_t K = check_scores(scores, counts);
  const int64_t S = clients.numel();
  TORCH_CHECK_TYPE(
      round_scores.scalar_type() == at::kFloat || round_scores.scalar_type() == at::kDouble,
      "round_scores: expected dtype Float or Double, got ", round_scores.scalar_type());
  check_tensor(round_scores, "round_scores", round_scores.scalar_type(), {S, S});
  check_same_device(round_scores, "round_scores", on.device());
  const uint8_t* flags = check_flags(pairs, "pairs", S, on.device());
  Tables tables;
  const int64_t* ids = nullptr;
  if (clients.is_cuda()) {  // their values are the kernel's to check
    check_tensor(clients, "clients", at::kLong, {S});
    check_same_device(clients, "clients", on.device());
    ids = clients.const_data_ptr<int64_t>();
  } else {
    const int64_t* given = check_clients(clients, S, K);
    const int64_t begin = tables.add(std::vector<int64_t>(given, given + S));
    tables.upload(on);
    ids = tables.at<int64_t>(begin);
  }
  const at::Tensor wide = round_scores.to(at::kDouble);
  const auto update = [&](auto* data) {
    check_launch(cuda::update_scores(scores.mutable_data_ptr<float>(), data, K,
                                     wide.const_data_ptr<double>(), ids, S, flags, on.stream()),
                 "update_scores_", "scores [", K, ", ", K, "], clients [", S, "]");
  };
  if (counts.scalar_type() == at::kShort)
    update(counts.mutable_data_ptr<int16_t>());
  else
    update(counts.mutable_data_ptr<int32_t>());
}

at::Tensor select_friends(const at::Tensor& scores, const at::Tensor& counts,
                          const at::Tensor& active, const std::optional<at::Tensor>& candidates,
                          std::optional<double> threshold) {
  const OnDevice on(scores, "scores");
  const int64_t K = check_scores(scores, counts);
  check_tensor(active, "active", at::kBool, {K});
  check_same_device(active, "active", on.device());
  Flags flags{nullptr, false};
  if (candidates)
    flags = {static_cast<const uint8_t*>(candidates->const_data_ptr()),
             check_candidates(*candidates, K, on.device())};
  if (threshold) check_threshold(*threshold);
  at::Tensor friends = on.empty({K}, at::kLong);
  check_launch(cuda::select_friends(scores.const_data_ptr<float>(), read_counts(counts),
                                    reinterpret_cast<const uint8_t*>(active.const_data_ptr<bool>()),
                                    flags, K, threshold.value_or(INFINITY),
                                    friends.mutable_data_ptr<int64_t>(), on.stream()),
               "select_friends", "scores [", K, ", ", K, "]");
  return friends;
}

void eliminate_(const at::Tensor& candidates, const at::Tensor& scores, const at::Tensor& counts,
                double threshold) {
  const OnDevice on(scores, "scores");
  const int64_t K = check_scores(scores, counts);
  const bool packed = check_candidates(candidates, K, on.device());
  check_threshold(threshold);
  check_launch(cuda::eliminate(static_cast<uint8_t*>(candidates.mutable_data_ptr()), packed,
                               scores.const_data_ptr<float>(), read_counts(counts), K, threshold,
                               on.stream()),
               "eliminate_", "scores [", K, ", ", K, "]");
}

void weighted_sum_(const at::Tensor& out, at::TensorList tensors, const at::Tensor& weights,
                   double beta) {
  const OnDevice on(out, "out");
  const int64_t d = out.numel();
  check_tensor(out, "out", at::kFloat, {d});
  const Rows rows = check_rows(tensors, "rows", d, on.device());
  const int64_t S = rows.size();
  check_no_overlap(rows, "rows", out, "out");
  Tables tables;
  const int64_t pointers = tables.add(rows.pointers);
  at::Tensor wide;  // weights that are there already
  int64_t numbers = 0;
  if (weights.is_cuda()) {
    check_weight_shape(weights, S);
    check_same_device(weights, "weights", on.device());
    wide = weights.to(at::kDouble);
  } else {
    numbers = tables.add(check_weights(weights, S, weights.device()));
  }
  tables.upload(on);
  Width width;
  width.add(rows.pointers);
  width.add(out.const_data_ptr());
  check_launch(cuda::weighted_sum(
                   out.mutable_data_ptr<float>(), tables.at<const float*>(pointers), S, d,
                   wide.defined() ? wide.const_data_ptr<double>() : tables.at<double>(numbers),
                   beta, width.value(), on.stream()),
               "weighted_sum_", "rows [", S, ", ", d, "]");
}

// Two passes: one kernel for both would have to hold the columns of all rows.
void gram_and_sum_(const at::Tensor& out, const at::Tensor& gram, at::TensorList tensors,
                   const at::Tensor& weights) {
  const OnDevice on(out, "out");
  const Rows rows = check_rows(tensors, "rows", out.numel(), on.device());
  const int64_t S = rows.size();
  check_tensor(gram, "gram", at::kDouble, {S, S});
  check_same_device(gram, "gram", on.device());
  weighted_sum_(out, tensors, weights, 0.0);
  launch_gram(on, rows, nullptr, gram);
}

// Rows of clients in the order of their ids, and what belongs to each of them, on the device.
class OrderedRows {
 public:
  OrderedRows(const OnDevice& on, at::TensorList tensors, at::TensorList remembered,
              const char* name, const at::Tensor& clients, int64_t d)
      : d_(d),
        ids_(clients.to(at::kCPU)),
        updates_(check_rows(tensors, "updates", d, on.device())),
        own_(check_client_rows(remembered, name, ids_, updates_.size(), d, on.device())),
        order_(order_by_client(own_.ids, updates_.size())) {
    width_.add(updates_.pointers);
    width_.add(own_.pointers);
    updates_at_ = tables_.add(reorder(updates_.pointers, order_));
    own_at_ = tables_.add(reorder(own_.pointers, order_));
    order_at_ = tables_.add(order_);
  }
  void add_weights(const at::Tensor& weights) {
    const at::Tensor here = weights.to(at::kCPU);
    weights_at_ = tables_.add(reorder(check_weights(here, S(), here.device()), order_));
  }
  void add_references(const c10::List<std::optional<at::Tensor>>& references,
                      const at::Device& device) {
    const auto bases = check_references(references, S(), d_, device);
    width_.add(bases);
    if (!references.empty()) references_at_ = tables_.add(reorder(bases, order_));
  }
  void upload(const OnDevice& on) { tables_.upload(on); }

  int64_t S() const { return updates_.size(); }
  const Rows& given_updates() const { return updates_; }
  const std::vector<float*>& given_own() const { return own_.pointers; }
  Width& width() { return width_; }
  const float* const* updates() const { return tables_.at<const float*>(updates_at_); }
  float* const* own() const { return tables_.at<float*>(own_at_); }
  const float* const* references() const {
    return references_at_ < 0 ? nullptr : tables_.at<const float*>(references_at_);
  }
  const double* weights() const { return tables_.at<double>(weights_at_); }

  // Peaks come in the order of clients and are given in that of the rows.
  void write_peaks(const at::Tensor& peaks, const at::Tensor& ordered) const {
    peaks.index_copy_(0, tables_.ids(order_at_, S()), ordered);
  }

 private:
  int64_t d_;
  at::Tensor ids_;
  Rows updates_;
  ClientRows own_;
  std::vector<int64_t> order_;
  Width width_;
  Tables tables_;
  int64_t updates_at_ = 0, own_at_ = 0, order_at_ = 0, weights_at_ = 0, references_at_ = -1;
};

void mimic_(const at::Tensor& params, at::TensorList tensors, at::TensorList corrections,
            const at::Tensor& clients, double lr) {
  const OnDevice on(params, "params");
  const int64_t d = params.numel();
  check_tensor(params, "params", at::kFloat, {d});
  OrderedRows rows(on, tensors, corrections, "corrections", clients, d);
  check_no_overlap(rows.given_updates(), "updates", params, "params");
  check_no_overlap(rows.given_updates(), "updates", rows.given_own(), "corrections");
  rows.width().add(params.const_data_ptr());
  rows.upload(on);
  check_launch(cuda::mimic(params.mutable_data_ptr<float>(), rows.updates(), rows.own(), rows.S(),
                           d, lr, rows.width().value(), on.stream()),
               "mimic_", "updates [", rows.S(), ", ", d, "]");
}

void memory_update_(const at::Tensor& params, const at::Tensor& total, at::TensorList memory,
                    at::TensorList tensors, const at::Tensor& clients, const at::Tensor& weights,
                    double lr, double norm, bool models) {
  const OnDevice on(params, "params");
  const int64_t d = params.numel();
  check_tensor(params, "params", at::kFloat, {d});
  check_tensor(total, "total", at::kDouble, {d});
  check_same_device(total, "total", on.device());
  OrderedRows rows(on, tensors, memory, "memory", clients, d);
  rows.add_weights(weights);
  check_no_overlap(rows.given_updates(), "updates", params, "params");
  check_no_overlap(rows.given_updates(), "updates", rows.given_own(), "memory");
  rows.width().add(params.const_data_ptr());
  rows.upload(on);
  check_launch(
      cuda::memory_update(params.mutable_data_ptr<float>(), total.mutable_data_ptr<double>(),
                          rows.updates(), rows.own(), rows.S(), d, rows.weights(), lr, norm, models,
                          rows.width().value(), on.stream()),
      "memory_update_", "updates [", rows.S(), ", ", d, "]");
}

void mimic_mean_(const at::Tensor& out, const at::Tensor& rounded, const at::Tensor& peaks,
                 at::TensorList tensors, at::TensorList corrections, const at::Tensor& clients,
                 const c10::List<std::optional<at::Tensor>>& references) {
  const OnDevice on(out, "out");
  const int64_t d = out.numel();
  check_tensor(out, "out", at::kDouble, {d});
  check_tensor(rounded, "rounded", at::kFloat, {d});
  check_same_device(rounded, "rounded", on.device());
  OrderedRows rows(on, tensors, corrections, "corrections", clients, d);
  TORCH_CHECK_VALUE(rows.S() > 0, "updates: expected at least one row, got none");
  check_tensor(peaks, "peaks", at::kFloat, {rows.S()});
  check_same_device(peaks, "peaks", on.device());
  rows.add_references(references, on.device());
  check_no_overlap(rows.given_updates(), "updates", rounded, "rounded");
  rows.width().add(rounded.const_data_ptr());
  rows.upload(on);
  const at::Tensor largest = on.empty({rows.S()}, at::kFloat);
  check_launch(cuda::mimic_mean(out.mutable_data_ptr<double>(), rounded.mutable_data_ptr<float>(),
                                largest.mutable_data_ptr<float>(), rows.updates(), rows.own(),
                                rows.references(), rows.S(), d, rows.width().value(), on.stream()),
               "mimic_mean_", "updates [", rows.S(), ", ", d, "]");
  rows.write_peaks(peaks, largest);
}

void memory_total_(const at::Tensor& out, const at::Tensor& peaks, const at::Tensor& total,
                   at::TensorList memory, at::TensorList tensors, const at::Tensor& clients,
                   const at::Tensor& weights,
                   const c10::List<std::optional<at::Tensor>>& references,
                   const std::optional<at::Tensor>& params) {
  const OnDevice on(out, "out");
  const int64_t d = out.numel();
  check_tensor(out, "out", at::kDouble, {d});
  check_tensor(total, "total", at::kDouble, {d});
  check_same_device(total, "total", on.device());
  TORCH_CHECK_VALUE(!out.is_alias_of(total), "out: shares memory with total");
  OrderedRows rows(on, tensors, memory, "memory", clients, d);
  check_tensor(peaks, "peaks", at::kFloat, {rows.S()});
  check_same_device(peaks, "peaks", on.device());
  rows.add_weights(weights);
  rows.add_references(references, on.device());
  if (params) {
    check_tensor(*params, "params", at::kFloat, {d});
    check_same_device(*params, "params", on.device());
    rows.width().add(params->const_data_ptr());
  }
  rows.upload(on);
  const at::Tensor largest = on.empty({rows.S()}, at::kFloat);
  check_launch(cuda::memory_total(out.mutable_data_ptr<double>(), largest.mutable_data_ptr<float>(),
                                  total.const_data_ptr<double>(), rows.updates(), rows.own(),
                                  rows.references(), rows.S(), d, rows.weights(),
                                  params ? params->const_data_ptr<float>() : nullptr,
                                  rows.width().value(), on.stream()),
               "memory_total_", "updates [", rows.S(), ", ", d, "]");
  rows.write_peaks(peaks, largest);
}

void add_total_(const at::Tensor& params, const at::Tensor& total, double lr, double norm,
                bool models) {
  const OnDevice on(params, "params");
  const int64_t d = params.numel();
  check_tensor(params, "params", at::kFloat, {d});
  check_tensor(total, "total", at::kDouble, {d});
  check_same_device(total, "total", on.device());
  check_launch(cuda::add_total(params.mutable_data_ptr<float>(), total.const_data_ptr<double>(), d,
                               lr, norm, models, on.stream()),
               "add_total_", "params [", d, "]");
}

}  // namespace

TORCH_LIBRARY_IMPL(fastagg, CUDA, m) {
  m.impl("gram", gram);
  m.impl("abs_max", abs_max);
  m.impl("cosine_scores", scores_of<cuda::cosine_scores>);
  m.impl("distance_scores", scores_of<cuda::distance_scores>);
  m.impl("update_scores_", update_scores_);
  m.impl("select_friends", select_friends);
  m.impl("eliminate_", eliminate_);
  m.impl("weighted_sum_", weighted_sum_);
  m.impl("gram_and_sum_", gram_and_sum_);
  m.impl("mimic_", mimic_);
  m.impl("memory_update_", memory_update_);
  m.impl("mimic_mean_", mimic_mean_);
  m.impl("memory_total_", memory_total_);
  m.impl("add_total_", add_total_);
}

}  // namespace fastagg
