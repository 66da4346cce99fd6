// SPDX-License-Identifier: Apache-2.0
// The arguments of trimmed_mean_ and meamed_, for all devices.
#pragma once

#include <ATen/core/Tensor.h>

#include "changed_memory.h"
#include "check_rows.h"
#include "checks.h"

namespace fastagg {

inline Rows check_sorted_columns(const at::Tensor& out, const at::Tensor& peak,
                                 at::TensorList tensors) {
  check_tensor(out, "out", at::kFloat, {out.numel()});
  check_tensor(peak, "peak", at::kFloat, {1});
  check_same_device(peak, "peak", out.device());
  const Rows rows = check_rows(tensors, "rows", out.numel(), out.device(), Elements::kAlsoShort);
  TORCH_CHECK_VALUE(rows.size() > 0, "rows: expected at least one row, got none");
  ChangedMemory changed;
  changed.add(out, "out");
  changed.add(peak, "peak");
  changed.check_rows(rows.addresses, rows.row_bytes(), "rows");
  return rows;
}

inline Rows check_trimmed_mean(const at::Tensor& out, const at::Tensor& peak,
                               at::TensorList tensors, int64_t trim) {
  Rows rows = check_sorted_columns(out, peak, tensors);
  TORCH_CHECK_VALUE(trim >= 0 && trim <= (rows.size() - 1) / 2, "trim: expected a number in [0, ",
                    (rows.size() - 1) / 2, "] for ", rows.size(), " rows, got ", trim);
  return rows;
}

inline Rows check_meamed(const at::Tensor& out, const at::Tensor& peak, at::TensorList tensors,
                         int64_t keep) {
  Rows rows = check_sorted_columns(out, peak, tensors);
  TORCH_CHECK_VALUE(keep >= 1 && keep <= rows.size(), "keep: expected a number in [1, ",
                    rows.size(), "], the number of rows, got ", keep);
  return rows;
}

}  // namespace fastagg
