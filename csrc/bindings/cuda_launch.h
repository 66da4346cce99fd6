// SPDX-License-Identifier: Apache-2.0
// Shared by the CUDA bindings: the choice of device and stream, small tables, and errors.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "../kernels/cuda/kernels.h"
#include "../kernels/cuda/row_layout.h"
#include "changed_memory.h"
#include "check_rows.h"
#include "checks.h"

namespace fastagg {

// The device of an op's main argument. It is the current device for the lifetime of this object,
// and the work is enqueued on its current stream.
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

// Tables of 64-bit words (addresses, doubles, ids), which are copied to the device together.
class Tables {
 public:
  // Adds a table; returns where it begins.
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
  // The table at `begin`, on the device.
  template <class T>
  T* at(int64_t begin) const {
    return reinterpret_cast<T*>(memory_.mutable_data_ptr<int64_t>() + begin);
  }
  at::Tensor ids(int64_t begin, int64_t count) const { return memory_.narrow(0, begin, count); }

 private:
  std::vector<uint64_t> words_;
  at::Tensor memory_;
};

// The number of elements that one access may take, given the alignment of all addresses added.
class Width {
 public:
  void add(const void* address, int64_t element_bytes = sizeof(float)) {
    (element_bytes == sizeof(float) ? floats_ : shorts_) |=
        reinterpret_cast<std::uintptr_t>(address);
  }
  template <class T>
  void add(const std::vector<T*>& addresses, int64_t element_bytes = sizeof(float)) {
    for (T* address : addresses) add(address, element_bytes);
  }
  int value() const {
    return std::min(cuda::vector_width(floats_, sizeof(float)),
                    cuda::vector_width(shorts_, sizeof(Half)));
  }

 private:
  std::uintptr_t floats_ = 0, shorts_ = 0;
};

// Updates, their memory rows, weights and references, all in ascending order of client ids, on the
// device.
//   own_dtype   // of the memory rows; none: the dtype of the updates
class OrderedRows {
 public:
  OrderedRows(const OnDevice& on, at::TensorList tensors, at::TensorList remembered,
              const char* name, const at::Tensor& clients, int64_t d,
              std::optional<at::ScalarType> own_dtype)
      : d_(d),
        ids_(clients.to(at::kCPU)),
        updates_(check_rows(tensors, "updates", d, on.device(), Elements::kAlsoShort)),
        own_dtype_(own_dtype.value_or(updates_.dtype)),
        own_(
            check_client_rows(remembered, name, ids_, updates_.size(), d, own_dtype_, on.device())),
        order_(order_by_client(own_.ids, updates_.size())) {
    width_.add(updates_.addresses, updates_.element_bytes());
    width_.add(own_.addresses, static_cast<int64_t>(c10::elementSize(own_dtype_)));
    updates_at_ = tables_.add(reorder(updates_.addresses, order_));
    own_at_ = tables_.add(reorder(own_.addresses, order_));
    order_at_ = tables_.add(order_);
  }
  void add_weights(const at::Tensor& weights) {
    const at::Tensor here = weights.to(at::kCPU);
    weights_at_ = tables_.add(reorder(check_weights(here, S(), here.device()), order_));
  }
  void add_steps(const at::Tensor& steps) {
    const at::Tensor here = steps.to(at::kCPU);
    steps_at_ = tables_.add(reorder(check_weights(here, S(), here.device(), "steps"), order_));
  }
  void add_references(const c10::List<std::optional<at::Tensor>>& references,
                      const at::Device& device) {
    given_references_ = check_references(references, S(), d_, device);
    width_.add(given_references_);
    if (!references.empty()) references_at_ = tables_.add(reorder(given_references_, order_));
  }
  void add_kept(at::TensorList kept, const at::Device& device) {
    given_kept_ = check_kept(kept, S(), d_, device);
    width_.add(given_kept_);
    if (!kept.empty()) kept_at_ = tables_.add(reorder(given_kept_, order_));
  }
  void upload(const OnDevice& on) { tables_.upload(on); }

  int64_t S() const { return updates_.size(); }
  const Rows& given_updates() const { return updates_; }
  const std::vector<char*>& given_own() const { return own_.addresses; }
  const std::vector<const float*>& given_references() const { return given_references_; }
  const std::vector<char*>& given_kept() const { return given_kept_; }
  Width& width() { return width_; }
  template <class T>
  const T* const* updates() const {
    return tables_.at<const T*>(updates_at_);
  }
  template <class T>
  T* const* own() const {
    return tables_.at<T*>(own_at_);
  }
  const float* const* references() const {
    return references_at_ < 0 ? nullptr : tables_.at<const float*>(references_at_);
  }
  float* const* kept() const { return kept_at_ < 0 ? nullptr : tables_.at<float*>(kept_at_); }
  const double* weights() const { return tables_.at<double>(weights_at_); }
  const double* steps() const { return tables_.at<double>(steps_at_); }

  // peaks[s] = the peak of row s, from peaks in ascending order of client ids.
  void write_peaks(const at::Tensor& peaks, const at::Tensor& ordered) const {
    peaks.index_copy_(0, tables_.ids(order_at_, S()), ordered);
  }

 private:
  int64_t d_;
  at::Tensor ids_;
  Rows updates_;
  at::ScalarType own_dtype_;
  ClientRows own_;
  std::vector<int64_t> order_;
  std::vector<const float*> given_references_;
  std::vector<char*> given_kept_;
  Width width_;
  Tables tables_;
  int64_t updates_at_ = 0, own_at_ = 0, order_at_ = 0, weights_at_ = 0, references_at_ = -1;
  int64_t kept_at_ = -1, steps_at_ = 0;
};

}  // namespace fastagg
