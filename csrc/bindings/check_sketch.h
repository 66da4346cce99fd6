// SPDX-License-Identifier: Apache-2.0
// The arguments of sketch_ and sketch_and_sum_, for all devices.
#pragma once

#include <ATen/core/Tensor.h>

#include "../kernels/sketch_hash.h"
#include "changed_memory.h"
#include "check_rows.h"
#include "checks.h"

namespace fastagg {

// Checks them and returns the rows.
inline Rows check_sketch(const at::Tensor& out, const at::Tensor& squares, at::TensorList tensors,
                         int64_t begin) {
  check_dense(out, "out");
  TORCH_CHECK_TYPE(out.scalar_type() == at::kDouble || out.scalar_type() == at::kFloat,
                   "out: expected dtype Double or Float, got ", out.scalar_type());
  check_tensor(out, "out", out.scalar_type(), {kAny, kAny});
  const int64_t S = out.size(0), k = out.size(1);
  TORCH_CHECK_VALUE(k >= kLeastBuckets && k <= kMostBuckets && (k & (k - 1)) == 0,
                    "out: expected shape [S, k] with k a power of two from ", kLeastBuckets, " to ",
                    kMostBuckets, ", got ", out.sizes());
  check_tensor(squares, "squares", at::kDouble, {S});
  check_same_device(squares, "squares", out.device());
  const Rows rows = check_rows(tensors, "rows", kAny, out.device(), Elements::kAlsoShort);
  TORCH_CHECK_VALUE(rows.size() == S, "rows: expected ", S, " rows, as in out, got ", rows.size());
  constexpr int64_t kLimit = int64_t{1} << 62;
  TORCH_CHECK_VALUE(begin >= 0 && begin <= kLimit, "begin: expected a column in [0, 2^62], got ",
                    begin);
  ChangedMemory changed;
  changed.add(out, "out");
  changed.add(squares, "squares");
  changed.check_rows(rows.addresses, rows.row_bytes(), "rows");
  return rows;
}

// Checks the arguments of sketch_and_sum_, apart from the weights, and returns the rows.
inline Rows check_sketch_and_sum(const at::Tensor& sum, const at::Tensor& out,
                                 const at::Tensor& squares, at::TensorList tensors, int64_t begin) {
  const Rows rows = check_sketch(out, squares, tensors, begin);
  check_tensor(out, "out", at::kDouble, {kAny, kAny});
  const int64_t d = rows.size() == 0 ? sum.numel() : rows.d;
  check_tensor(sum, "sum", at::kFloat, {d});
  check_same_device(sum, "sum", out.device());
  ChangedMemory changed;
  changed.add(sum, "sum");
  changed.add(out, "out");
  changed.add(squares, "squares");
  changed.check_rows(rows.addresses, rows.row_bytes(), "rows");
  return rows;
}

}  // namespace fastagg
