// SPDX-License-Identifier: Apache-2.0
// Argument checks shared by the bindings. Each error names the argument, what was expected and what
// came: TypeError for dtypes, IndexError for client ids and positions, ValueError for the rest.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/string_view.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "../kernels/pair_state.h"
#include "../kernels/precision.h"

namespace fastagg {

// A size that is not checked.
constexpr int64_t kAny = -1;

// Refuses tensors whose sizes, strides or numbers raise errors of PyTorch. The dispatcher refuses
// most of them earlier, but not None, and not a sparse tensor beside one on device meta.
inline void check_dense(const at::Tensor& t, const char* name) {
  TORCH_CHECK_TYPE(t.defined(), name, ": expected a tensor, got None");
  TORCH_CHECK_TYPE(!t.is_nested(), name, ": expected a dense tensor, got a nested tensor");
  TORCH_CHECK_TYPE(t.layout() == at::kStrided, name, ": expected a dense tensor, got layout ",
                   t.layout());
  TORCH_CHECK_VALUE(!t.is_meta(), name, ": expected a tensor with data, got one on device meta");
}

// Whether a dense tensor lies within its storage, which may have been resized.
inline bool within_storage(const at::Tensor& t) {
  if (t.numel() == 0) return true;
  int64_t last = t.storage_offset();  // the element with the highest address
  for (int64_t dim = 0; dim < t.dim(); ++dim) {
    int64_t reach = 0;
    if (__builtin_mul_overflow(t.size(dim) - 1, t.stride(dim), &reach) ||
        __builtin_add_overflow(last, reach, &last))
      return false;
  }
  const auto bytes = static_cast<int64_t>(t.storage().nbytes());
  return last < bytes / static_cast<int64_t>(t.element_size());
}

// Refuses tensors whose numbers are not the bytes of their storage: views with a lazy conjugation
// or negation, tensors without memory, and views that reach beyond their storage (after it was
// resized). `t` is dense.
inline void check_memory(const at::Tensor& t, const char* name) {
  TORCH_CHECK_VALUE(
      !t.is_neg() && !t.is_conj(), name,
      ": expected a tensor without a lazy negation or conjugation; call resolve_neg() "
      "and resolve_conj(), or clone()");
  TORCH_CHECK_VALUE(!t._is_zerotensor(), name, ": expected a tensor with memory; call clone()");
  TORCH_CHECK_VALUE(within_storage(t), name,
                    ": expected a tensor within its storage, got one that reaches beyond its ",
                    t.storage().nbytes(), " bytes");
}

inline void check_tensor(const at::Tensor& t, const char* name, at::ScalarType dtype,
                         std::initializer_list<int64_t> shape) {
  check_dense(t, name);
  TORCH_CHECK_TYPE(t.scalar_type() == dtype, name, ": expected dtype ", dtype, ", got ",
                   t.scalar_type());
  bool fits = t.dim() == static_cast<int64_t>(shape.size());
  int64_t dim = 0;
  for (int64_t size : shape) {
    fits = fits && (size == kAny || t.size(dim) == size);
    ++dim;
  }
  TORCH_CHECK_VALUE(fits, name, ": expected shape ", at::IntArrayRef(shape),
                    " (-1 stands for any size), got ", t.sizes());
  TORCH_CHECK_VALUE(t.is_contiguous(), name, ": expected a contiguous tensor, got strides ",
                    t.strides(), " for shape ", t.sizes());
  check_memory(t, name);
}

inline void check_same_device(const at::Tensor& t, const char* name, const at::Device& device) {
  TORCH_CHECK_TYPE(t.defined(), name, ": expected a tensor, got None");
  TORCH_CHECK_VALUE(t.device() == device, name, ": expected device ", device, ", got ", t.device());
}

// Checks a tensor [n] on the device of the others.
inline void check_vector(const at::Tensor& t, const char* name, at::ScalarType dtype, int64_t n,
                         const at::Device& device) {
  check_tensor(t, name, dtype, {n});
  check_same_device(t, name, device);
}

// Checks a tensor of float32 or float64.
inline void check_floating(const at::Tensor& t, const char* name,
                           std::initializer_list<int64_t> shape) {
  check_dense(t, name);
  TORCH_CHECK_TYPE(t.scalar_type() == at::kDouble || t.scalar_type() == at::kFloat, name,
                   ": expected dtype Float or Double, got ", t.scalar_type());
  check_tensor(t, name, t.scalar_type(), shape);
}

inline at::Device device_of(at::TensorList tensors, const char* name) {
  TORCH_CHECK_VALUE(!tensors.empty(), name, ": expected at least one tensor, got an empty list");
  TORCH_CHECK_TYPE(tensors[0].defined(), name, ": expected tensors, got None");
  return tensors[0].device();
}

// Checks `weights`, float32 or float64 [S] in CPU memory, and returns a copy in float64.
inline std::vector<double> check_weights(const at::Tensor& weights, int64_t S,
                                         const at::Device& device, const char* name = "weights") {
  check_floating(weights, name, {S});
  check_same_device(weights, name, device);
  if (weights.scalar_type() == at::kDouble) {
    const auto* w = weights.const_data_ptr<double>();
    return {w, w + S};
  }
  const auto* w = weights.const_data_ptr<float>();
  return {w, w + S};
}

// Checks `scales`, which rows are multiplied by, and returns them rounded to float32; empty if they
// are not given.
inline std::vector<float> check_scales(const std::optional<at::Tensor>& scales, int64_t S,
                                       const at::Device& device) {
  std::vector<float> factors;
  if (!scales) return factors;
  for (double factor : check_weights(*scales, S, device, "scales"))
    factors.push_back(static_cast<float>(factor));
  return factors;
}

// The same for scales on any device.
inline std::vector<float> check_scales_anywhere(const std::optional<at::Tensor>& scales,
                                                int64_t S) {
  if (!scales) return {};
  const at::Tensor here = scales->to(at::kCPU);
  return check_scales(here, S, here.device());
}

// Checks an optional matrix of flags, bool [rows, rows].
inline const uint8_t* check_flags(const std::optional<at::Tensor>& flags, const char* name,
                                  int64_t rows, const at::Device& device) {
  if (!flags) return nullptr;
  check_tensor(*flags, name, at::kBool, {rows, rows});
  check_same_device(*flags, name, device);
  return reinterpret_cast<const uint8_t*>(flags->const_data_ptr<bool>());
}

// Checks scores, float32 [K, K], and counts, int32 or int16 [K, K]. Returns K.
inline int64_t check_scores(const at::Tensor& scores, const at::Tensor& counts) {
  const int64_t K = scores.dim() == 2 ? scores.size(0) : 0;
  check_tensor(scores, "scores", at::kFloat, {K, K});
  TORCH_CHECK_TYPE(counts.scalar_type() == at::kInt || counts.scalar_type() == at::kShort,
                   "counts: expected dtype Int or Short, got ", counts.scalar_type());
  check_tensor(counts, "counts", counts.scalar_type(), {K, K});
  check_same_device(counts, "counts", scores.device());
  return K;
}

inline Counts read_counts(const at::Tensor& counts) {
  return {counts.const_data_ptr(), counts.scalar_type() == at::kShort};
}

// Checks `candidates`: bool [K, K] or packed bits, uint8 [K, ceil(K / 8)]. Returns whether they are
// packed.
inline bool check_candidates(const at::Tensor& candidates, int64_t K, const at::Device& device) {
  check_same_device(candidates, "candidates", device);
  const bool packed = candidates.scalar_type() == at::kByte;
  TORCH_CHECK_TYPE(packed || candidates.scalar_type() == at::kBool,
                   "candidates: expected dtype Bool, or Byte for packed bits, got ",
                   candidates.scalar_type());
  check_tensor(candidates, "candidates", candidates.scalar_type(), {K, packed ? (K + 7) / 8 : K});
  return packed;
}

inline void check_threshold(double threshold) {
  TORCH_CHECK_VALUE(threshold == threshold, "threshold: expected a number, got NaN");
}

// Checks `when`, an optional bool []: if it is false, the op changes nothing. Returns its address,
// on a GPU a device address, or null.
inline const uint8_t* check_when(const std::optional<at::Tensor>& when, const at::Device& device) {
  if (!when) return nullptr;
  check_tensor(*when, "when", at::kBool, {});
  check_same_device(*when, "when", device);
  return reinterpret_cast<const uint8_t*>(when->const_data_ptr<bool>());
}

inline Precision check_precision(c10::string_view precision) {
  if (precision == "highest") return Precision::kHighest;
  if (precision == "high") return Precision::kHigh;
  TORCH_CHECK_VALUE(precision == "tf32",
                    "precision: expected \"highest\", \"high\" or \"tf32\", got \"", precision,
                    "\"");
  return Precision::kTf32;
}

// Checks the columns of a segment. Returns them; d, but at least 1, if all are in one segment.
inline int64_t check_segment(const std::optional<int64_t>& segment, int64_t d) {
  TORCH_CHECK_VALUE(!segment || *segment >= 1, "segment: expected at least one column, got ",
                    segment.value_or(0));
  return std::max<int64_t>(std::min(segment.value_or(d), d), 1);
}

// Checks `pairs` of gram in CPU memory: an optional symmetric bool [S, S].
inline const uint8_t* check_pairs(const std::optional<at::Tensor>& pairs, int64_t S,
                                  const at::Device& device) {
  const uint8_t* flags = check_flags(pairs, "pairs", S, device);
  if (flags)
    for (int64_t i = 0; i < S; ++i)
      for (int64_t j = 0; j < i; ++j)
        TORCH_CHECK_VALUE(!flags[i * S + j] == !flags[j * S + i],
                          "pairs: expected a symmetric matrix, got different values at [", i, ", ",
                          j, "] and [", j, ", ", i, "]");
  return flags;
}

}  // namespace fastagg
