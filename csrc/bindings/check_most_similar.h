// SPDX-License-Identifier: Apache-2.0
// The arguments of most_similar, for all devices.
#pragma once

#include <ATen/core/Tensor.h>

#include "../kernels/most_similar.h"
#include "checks.h"

namespace fastagg {

// The sizes of a call of most_similar, and its splits [groups + 1, 2].
struct SimilarSizes {
  int64_t k, queries, rows, groups;  // of queries and rows: those that take part
  std::vector<int64_t> splits;
};

// Checks optional ids, int64 [any], in [0, most), on the CPU or on the device of the vectors.
// Returns how many there are, `most` without ids. Ids on a GPU are copied, which waits for it.
inline int64_t check_ids(const std::optional<at::Tensor>& ids, const char* name, int64_t most,
                         const at::Device& device) {
  if (!ids) return most;
  check_tensor(*ids, name, at::kLong, {kAny});
  if (!ids->is_cpu()) check_same_device(*ids, name, device);
  const at::Tensor here = ids->is_cpu() ? *ids : ids->to(at::kCPU);
  const auto* id = here.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < ids->numel(); ++i)
    TORCH_CHECK_INDEX(id[i] >= 0 && id[i] < most, name, ": expected ids in [0, ", most, "), got ",
                      id[i], " at position ", i);
  return ids->numel();
}

inline SimilarSizes check_most_similar(const at::Tensor& queries, const at::Tensor& rows,
                                       const at::Tensor& factors,
                                       const std::optional<at::Tensor>& query_ids,
                                       const std::optional<at::Tensor>& row_ids,
                                       const std::optional<at::Tensor>& splits) {
  check_tensor(queries, "queries", at::kChar, {kAny, kAny});
  const int64_t k = queries.size(1);
  TORCH_CHECK_VALUE(k >= 1 && k <= kMostSketchColumns, "queries: expected 1 to ",
                    kMostSketchColumns, " columns, got ", k);
  check_tensor(rows, "rows", at::kChar, {kAny, k});
  check_tensor(factors, "factors", at::kFloat, {rows.size(0)});
  check_same_device(rows, "rows", queries.device());
  check_same_device(factors, "factors", queries.device());
  SimilarSizes sizes{};
  sizes.k = k;
  sizes.queries = check_ids(query_ids, "query_ids", queries.size(0), queries.device());
  sizes.rows = check_ids(row_ids, "row_ids", rows.size(0), queries.device());
  sizes.groups = 1;
  sizes.splits = {0, 0, sizes.queries, sizes.rows};
  if (!splits) return sizes;
  check_tensor(*splits, "splits", at::kLong, {kAny, 2});
  check_same_device(*splits, "splits", at::Device(at::kCPU));
  sizes.groups = splits->size(0) - 1;
  TORCH_CHECK_VALUE(sizes.groups >= 0, "splits: expected at least one row, got none");
  const auto* numbers = splits->const_data_ptr<int64_t>();
  sizes.splits.assign(numbers, numbers + splits->numel());
  bool ascend = numbers[0] == 0 && numbers[1] == 0;
  for (int64_t i = 2; i < splits->numel(); ++i) ascend = ascend && numbers[i] >= numbers[i - 2];
  const int64_t* last = numbers + 2 * sizes.groups;
  TORCH_CHECK_VALUE(ascend && last[0] == sizes.queries && last[1] == sizes.rows,
                    "splits: expected columns that ascend from 0 to ", sizes.queries, " and to ",
                    sizes.rows, ", got ", last[0], " and ", last[1], " in the last row, ",
                    ascend ? "and columns that ascend from 0" : "and columns that do not");
  return sizes;
}

}  // namespace fastagg
