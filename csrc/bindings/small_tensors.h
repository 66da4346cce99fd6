// SPDX-License-Identifier: Apache-2.0
// The small tensors of a step.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

namespace fastagg {

// A tensor in CPU memory, with undefined content, without the dispatcher of PyTorch.
at::Tensor new_tensor(at::IntArrayRef shape, at::ScalarType dtype);

// A copy of some rows of a float32 matrix in CPU memory.
at::Tensor take_rows(const at::Tensor& matrix, const std::vector<int64_t>& order);

// Adds the functions of small_tensors.cpp to the module.
void define_small_tensors(pybind11::module_& m);

}  // namespace fastagg
