// SPDX-License-Identifier: Apache-2.0
// The arguments of the second sum of memory_total_ and quantized_total_.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "../kernels/faded_total.h"
#include "check_rows.h"
#include "checks.h"

namespace fastagg {

// Returns the weights, which must be on the CPU; none without `faded`.
inline std::vector<double> check_faded(const std::optional<at::Tensor>& faded,
                                       const std::optional<at::Tensor>& weights, int64_t S,
                                       int64_t d, const at::Device& device) {
  TORCH_CHECK_VALUE(faded.has_value() == weights.has_value(),
                    "faded_weights: expected with faded, and only then");
  if (!faded) return {};
  check_vector(*faded, "faded", at::kDouble, d, device);
  return check_weights(*weights, S, at::kCPU, "faded_weights");
}

// The sum, with checked arguments.
//   weights   // [S], in the order of the rows, on the device
inline FadedTotal faded_total(const std::optional<at::Tensor>& faded, const double* weights,
                              double fading) {
  if (!faded) return {};
  return {faded->mutable_data_ptr<double>(), weights, fading};
}

}  // namespace fastagg
