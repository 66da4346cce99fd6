// SPDX-License-Identifier: Apache-2.0
// The arguments of difference_sum_, for all devices.
#pragma once

#include <ATen/core/Tensor.h>

#include "changed_memory.h"
#include "check_rows.h"
#include "checks.h"

namespace fastagg {

// Checks them and returns the rows.
inline Rows check_differences(const at::Tensor& out, const at::Tensor& squares,
                              at::TensorList tensors, const at::Tensor& base) {
  const int64_t d = out.numel();
  check_tensor(out, "out", at::kFloat, {d});
  check_tensor(base, "base", at::kFloat, {d});
  const Rows rows = check_rows(tensors, "rows", d, out.device(), Elements::kAlsoShort);
  check_tensor(squares, "squares", at::kDouble, {rows.size()});
  TORCH_CHECK_VALUE(base.device() == out.device() && squares.device() == out.device(),
                    "base, squares: expected device ", out.device(), ", got ", base.device(),
                    " and ", squares.device());
  ChangedMemory changed;
  changed.add(out, "out");
  changed.add(squares, "squares");
  changed.check(base, "base");
  changed.check_rows(rows.addresses, rows.row_bytes(), "rows");
  return rows;
}

}  // namespace fastagg
