// SPDX-License-Identifier: Apache-2.0
// The arguments of ops of int8 rows, for all devices: S tensors of d numbers, and their scales.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "../kernels/int8_rows.h"
#include "changed_memory.h"
#include "check_faded.h"
#include "check_rows.h"
#include "checks.h"

namespace fastagg {

// Checks S tensors [n] of one dtype and returns their addresses.
inline std::vector<char*> check_vectors(at::TensorList tensors, const char* name, int64_t S,
                                        int64_t n, at::ScalarType dtype, const at::Device& device) {
  const auto given = static_cast<int64_t>(tensors.size());
  TORCH_CHECK_VALUE(given == S, name, ": expected ", S, " tensors, one for each row, got ", given);
  std::vector<char*> addresses;
  addresses.reserve(S);
  for (const at::Tensor& row : tensors) {
    check_tensor(row, name, dtype, {n});
    check_same_device(row, name, device);
    addresses.push_back(static_cast<char*>(row.mutable_data_ptr()));
  }
  return addresses;
}

// The number of scales of a row of d numbers.
inline int64_t scales_of(int64_t d) {
  return ceil_div(d, kScaleBlock);
}

// Checks `scales`, float32 [S, ceil(d / 256)], which the call writes. Returns pointers to the rows.
inline std::vector<float*> check_new_scales(const at::Tensor& scales, const char* name, int64_t S,
                                            int64_t d, const at::Device& device) {
  check_tensor(scales, name, at::kFloat, {S, scales_of(d)});
  check_same_device(scales, name, device);
  std::vector<float*> rows;
  for (int64_t s = 0; s < S; ++s)
    rows.push_back(scales.mutable_data_ptr<float>() + s * scales_of(d));
  return rows;
}

struct QuantizeRows {
  std::vector<int8_t*> numbers;
  std::vector<float*> scales;
  std::vector<const float*> rows;
  int64_t d;
  int64_t size() const { return static_cast<int64_t>(rows.size()); }
};

inline QuantizeRows check_quantize(at::TensorList numbers, const at::Tensor& scales,
                                   at::TensorList tensors) {
  check_tensor(scales, "scales", at::kFloat, {kAny, kAny});
  const at::Device device = scales.device();
  const Rows rows = check_rows(tensors, "rows", kAny, device);
  const int64_t S = rows.size(), d = rows.d;
  const auto written = check_vectors(numbers, "numbers", S, d, at::kChar, device);
  if (S == 0) {
    check_tensor(scales, "scales", at::kFloat, {0, kAny});  // of any d
    return {{}, {}, {}, d};
  }
  const auto steps = check_new_scales(scales, "scales", S, d, device);
  ChangedMemory changed;
  changed.add(scales, "scales");
  changed.add_rows(written, d, "numbers");
  changed.check_rows(rows.addresses, rows.row_bytes(), "rows");
  return {pointers<int8_t>(written), steps, pointers<const float>(rows.addresses), d};
}

struct DequantizeRows {
  std::vector<float*> out;
  std::vector<const int8_t*> numbers;
  std::vector<const float*> scales;
  int64_t d;
  int64_t size() const { return static_cast<int64_t>(out.size()); }
};

inline DequantizeRows check_dequantize(at::TensorList out, at::TensorList numbers,
                                       at::TensorList scales) {
  if (out.empty()) {
    TORCH_CHECK_VALUE(numbers.empty() && scales.empty(), "out: expected ",
                      std::max(numbers.size(), scales.size()), " rows, got none");
    return {{}, {}, {}, 0};
  }
  const at::Device device = device_of(out, "out");
  const auto S = static_cast<int64_t>(out.size());
  const int64_t d = out[0].numel();
  const auto written = check_vectors(out, "out", S, d, at::kFloat, device);
  const auto own = check_vectors(numbers, "numbers", S, d, at::kChar, device);
  const auto steps = check_vectors(scales, "scales", S, scales_of(d), at::kFloat, device);
  ChangedMemory changed;
  changed.add_rows(written, d * int64_t{sizeof(float)}, "out");
  changed.check_rows(own, d, "numbers");
  changed.check_rows(steps, scales_of(d) * int64_t{sizeof(float)}, "scales");
  return {pointers<float>(written), pointers<const int8_t>(own), pointers<const float>(steps), d};
}

// The arguments of quantized_total_ in ascending order of client ids; `order` are the positions of
// the given rows.
struct QuantizedTotal {
  std::vector<int64_t> order;
  std::vector<const float*> updates;
  std::vector<const int8_t*> memory;
  std::vector<const float*> memory_scales;
  std::vector<double> weights, faded_weights;  // the latter may be empty
  std::vector<int8_t*> kept;
  std::vector<float*> kept_scales;
  int64_t d;
  int64_t size() const { return static_cast<int64_t>(order.size()); }
};

// Ids and weights must be on the CPU.
inline QuantizedTotal check_quantized_total(const at::Tensor& out, const at::Tensor& peaks,
                                            const at::Tensor& total, at::TensorList memory,
                                            at::TensorList memory_scales, at::TensorList tensors,
                                            const at::Tensor& clients, const at::Tensor& weights,
                                            at::TensorList kept, const at::Tensor& kept_scales,
                                            const std::optional<at::Tensor>& faded,
                                            const std::optional<at::Tensor>& faded_weights) {
  const int64_t d = out.numel();
  check_tensor(out, "out", at::kDouble, {d});
  const at::Device device = out.device();
  check_tensor(total, "total", at::kDouble, {d});
  check_same_device(total, "total", device);
  const Rows updates = check_rows(tensors, "updates", d, device);
  const int64_t S = updates.size();
  check_tensor(peaks, "peaks", at::kFloat, {S});
  check_same_device(peaks, "peaks", device);
  const int64_t* ids = check_clients(clients, S, kAny);
  const auto own = check_vectors(memory, "memory", S, d, at::kChar, device);
  const auto own_scales =
      check_vectors(memory_scales, "memory_scales", S, scales_of(d), at::kFloat, device);
  const std::vector<double> w = check_weights(weights, S, at::kCPU);
  const std::vector<double> faded_w = check_faded(faded, faded_weights, S, d, device);
  const auto written = check_vectors(kept, "kept", S, d, at::kChar, device);
  const auto new_scales = check_new_scales(kept_scales, "kept_scales", S, d, device);
  ChangedMemory changed;
  changed.add(out, "out");
  changed.add(peaks, "peaks");
  changed.add(kept_scales, "kept_scales");
  if (faded) changed.add(*faded, "faded");
  changed.add_rows(written, d, "kept");
  changed.check(total, "total");
  changed.check_rows(updates.addresses, updates.row_bytes(), "updates");
  changed.check_rows(own, d, "memory");
  changed.check_rows(own_scales, scales_of(d) * int64_t{sizeof(float)}, "memory_scales");
  const auto order = order_by_client(ids, S);
  return {order,
          pointers<const float>(reorder(updates.addresses, order)),
          pointers<const int8_t>(reorder(own, order)),
          pointers<const float>(reorder(own_scales, order)),
          reorder(w, order),
          faded ? reorder(faded_w, order) : faded_w,
          pointers<int8_t>(reorder(written, order)),
          reorder(new_scales, order),
          d};
}

}  // namespace fastagg
