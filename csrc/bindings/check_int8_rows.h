// SPDX-License-Identifier: Apache-2.0
// Checks of int8 rows: S tensors of d numbers, and their scales.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "../kernels/int8_rows.h"
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

}  // namespace fastagg
