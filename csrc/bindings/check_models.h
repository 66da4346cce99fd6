// SPDX-License-Identifier: Apache-2.0
// The arguments of difference_gram_and_sum_, for all devices.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "../kernels/models.h"
#include "changed_memory.h"
#include "checks.h"

namespace fastagg {

// Checks S models, each in L parts, and returns the parts.
inline std::vector<cpu::ModelPart> check_models(const at::Tensor& out, const at::Tensor& gram,
                                                at::TensorList models, const at::Tensor& base,
                                                int64_t S, int64_t begin) {
  check_dense(out, "out");
  check_dense(base, "base");
  const int64_t count = static_cast<int64_t>(models.size()), all = base.numel();
  check_tensor(out, "out", at::kFloat, {out.numel()});
  const at::Device device = out.device();
  check_tensor(base, "base", at::kFloat, {all});
  check_tensor(gram, "gram", at::kDouble, {S, S});
  TORCH_CHECK_VALUE(base.device() == device && gram.device() == device,
                    "base, gram: expected device ", device, ", got ", base.device(), " and ",
                    gram.device());
  TORCH_CHECK_VALUE(begin >= 0 && begin <= all - out.numel(), "begin: expected columns [begin, ",
                    "begin + ", out.numel(), ") of ", all, ", got begin = ", begin);
  TORCH_CHECK_VALUE(S == 0 ? count == 0 : count % S == 0,
                    "models: expected as many parts of each of the ", S, " models, got ", count);
  ChangedMemory changed;
  changed.add(out, "out");
  changed.add(gram, "gram");
  changed.check(base, "base");
  const int64_t L = S == 0 ? 0 : count / S;
  std::vector<cpu::ModelPart> parts;
  int64_t end = 0;
  for (int64_t l = 0; l < L; ++l) {
    const at::Tensor& first = models[l];
    const at::ScalarType dtype = first.scalar_type();
    check_dense(first, "models");
    check_elements(first, "models", Elements::kAlsoShort);
    const auto element = dtype == at::kFloat      ? cpu::Element::kFloat
                         : dtype == at::kBFloat16 ? cpu::Element::kBfloat16
                                                  : cpu::Element::kHalf;
    parts.push_back({end, first.numel(), element, {}});
    for (int64_t s = 0; s < S; ++s) {
      const at::Tensor& part = models[s * L + l];
      check_tensor(part, "models", dtype, {first.numel()});
      TORCH_CHECK_VALUE(part.device() == device, "models: expected device ", device, ", got ",
                        part.device());
      parts.back().rows.push_back(part.const_data_ptr());
    }
    changed.check_rows(parts.back().rows, static_cast<int64_t>(first.nbytes()), "models");
    end += first.numel();
  }
  TORCH_CHECK_VALUE(end == (S == 0 ? 0 : all), "models: expected parts of ", all,
                    " elements in total, as in base, got ", end);
  return parts;
}

}  // namespace fastagg
