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
#include "check_paired.h"
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

// Tables of paired rows on the device. A pointer is null if its argument is not given.
class PairedTables {
 public:
  PairedTables(const OnDevice& on, const PairedRows& rows) : S_(rows.size()) {
    width_.add(rows.updates.addresses, rows.updates.element_bytes());
    width_.add(rows.own, static_cast<int64_t>(c10::elementSize(rows.own_dtype)));
    width_.add(rows.references);
    width_.add(rows.kept);
    updates_at_ = tables_.add(rows.updates.addresses);
    own_at_ = tables_.add(rows.own);
    order_at_ = tables_.add(rows.order);
    weights_at_ = add(rows.weights);
    steps_at_ = add(rows.steps);
    faded_weights_at_ = add(rows.faded_weights);
    kept_at_ = add(rows.kept);
    const auto given = [](const float* row) { return row != nullptr; };
    if (std::any_of(rows.references.begin(), rows.references.end(), given))
      references_at_ = tables_.add(rows.references);
    tables_.upload(on);
  }

  Width& width() { return width_; }
  template <class T>
  const T* const* updates() const {
    return at<const T*>(updates_at_);
  }
  template <class T>
  T* const* own() const {
    return at<T*>(own_at_);
  }
  const float* const* references() const { return at<const float*>(references_at_); }
  float* const* kept() const { return at<float*>(kept_at_); }
  const double* weights() const { return at<double>(weights_at_); }
  const double* steps() const { return at<double>(steps_at_); }
  const double* faded_weights() const { return at<double>(faded_weights_at_); }

  // peaks[s] = the peak of row s, from peaks in ascending order of client ids.
  void write_peaks(const at::Tensor& peaks, const at::Tensor& ordered) const {
    peaks.index_copy_(0, tables_.ids(order_at_, S_), ordered);
  }

 private:
  static constexpr int64_t kNone = -1;

  template <class T>
  int64_t add(const std::vector<T>& items) {
    return items.empty() ? kNone : tables_.add(items);
  }
  template <class T>
  T* at(int64_t begin) const {
    return begin == kNone ? nullptr : tables_.at<T>(begin);
  }

  int64_t S_;
  Width width_;
  Tables tables_;
  int64_t updates_at_, own_at_, order_at_, weights_at_, steps_at_, faded_weights_at_, kept_at_;
  int64_t references_at_ = kNone;
};

}  // namespace fastagg
