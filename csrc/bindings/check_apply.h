// SPDX-License-Identifier: Apache-2.0
// The arguments of apply_weighted_sum_, for all devices.
#pragma once

#include <ATen/core/Tensor.h>

#include "changed_memory.h"
#include "check_rows.h"
#include "checks.h"

namespace fastagg {

// Checks them and returns the rows.
inline Rows check_apply(const at::Tensor& params, const at::Tensor& before,
                        const at::Tensor& applied, at::TensorList tensors) {
  const int64_t d = params.numel();
  check_tensor(params, "params", at::kFloat, {d});
  check_tensor(before, "before", at::kFloat, {d});
  check_same_device(before, "before", params.device());
  check_tensor(applied, "applied", at::kBool, {});
  check_same_device(applied, "applied", params.device());
  const Rows rows = check_rows(tensors, "rows", d, params.device(), Elements::kAlsoShort);
  ChangedMemory changed;
  changed.add(params, "params");
  changed.add(before, "before");
  changed.add(applied, "applied");
  changed.check_rows(rows.addresses, rows.row_bytes(), "rows");
  return rows;
}

}  // namespace fastagg
