// SPDX-License-Identifier: Apache-2.0
// The arguments of the ops that read each update beside the memory row of its client, for all
// devices: mimic_, memory_update_, mimic_mean_, memory_total_ and scaffold_mean_. Client ids,
// weights, steps and scales must be on the CPU.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "changed_memory.h"
#include "check_faded.h"
#include "check_rows.h"
#include "checks.h"

namespace fastagg {

// Updates, and what belongs to each of them, in ascending order of client ids. A vector is empty if
// its argument is not given.
struct PairedRows {
  int64_t d;
  std::vector<int64_t> order;  // the position of each row in the arguments
  Rows updates;
  at::ScalarType own_dtype;  // of the memory rows
  std::vector<char*> own;    // the memory rows
  std::vector<double> weights, steps, faded_weights;
  std::vector<float> scales;
  std::vector<const float*> references;  // a row or null for each, if the op has references
  std::vector<char*> kept;               // rows that the call writes

  int64_t size() const { return static_cast<int64_t>(order.size()); }
  // Whether float32 updates have memory rows of bfloat16.
  bool rounds() const { return updates.dtype == at::kFloat && own_dtype == at::kBFloat16; }
  // From the order of the arguments.
  void sort() {
    const auto sort = [&](auto& items) {
      if (!items.empty()) items = reorder(items, order);
    };
    sort(updates.addresses);
    sort(own);
    sort(weights);
    sort(steps);
    sort(faded_weights);
    sort(scales);
    sort(references);
    sort(kept);
  }
};

// Checks updates and memory rows, and returns them in the order of the arguments.
//   own_dtype   // none: the dtype of the updates
inline PairedRows check_paired(at::TensorList tensors, at::TensorList own, const char* own_name,
                               const at::Tensor& clients, int64_t d, const at::Device& device,
                               std::optional<at::ScalarType> own_dtype) {
  PairedRows rows;
  rows.d = d;
  rows.updates = check_rows(tensors, "updates", d, device, Elements::kAlsoShort);
  rows.own_dtype = own_dtype.value_or(rows.updates.dtype);
  const int64_t S = rows.updates.size();
  ClientRows given = check_client_rows(own, own_name, clients, S, d, rows.own_dtype, device);
  rows.order = order_by_client(given.ids, S);
  rows.own = std::move(given.addresses);
  return rows;
}

inline PairedRows check_mimic(const at::Tensor& params, at::TensorList tensors,
                              at::TensorList corrections, const at::Tensor& clients) {
  const int64_t d = params.numel();
  check_tensor(params, "params", at::kFloat, {d});
  PairedRows rows =
      check_paired(tensors, corrections, "corrections", clients, d, params.device(), at::kFloat);
  ChangedMemory changed;
  changed.add(params, "params");
  changed.add_rows(rows.own, params.nbytes(), "corrections");
  changed.check_rows(rows.updates.addresses, rows.updates.row_bytes(), "updates");
  rows.sort();
  return rows;
}

inline PairedRows check_memory_update(const at::Tensor& params, const at::Tensor& total,
                                      at::TensorList memory, at::TensorList tensors,
                                      const at::Tensor& clients, const at::Tensor& weights) {
  const int64_t d = params.numel();
  check_tensor(params, "params", at::kFloat, {d});
  check_vector(total, "total", at::kDouble, d, params.device());
  PairedRows rows =
      check_paired(tensors, memory, "memory", clients, d, params.device(), at::kFloat);
  rows.weights = check_weights(weights, rows.size(), at::kCPU);
  ChangedMemory changed;
  changed.add(params, "params");
  changed.add(total, "total");
  changed.add_rows(rows.own, params.nbytes(), "memory");
  changed.check_rows(rows.updates.addresses, rows.updates.row_bytes(), "updates");
  rows.sort();
  return rows;
}

inline PairedRows check_mimic_mean(const at::Tensor& out, const at::Tensor& rounded,
                                   const at::Tensor& peaks, at::TensorList tensors,
                                   at::TensorList corrections, const at::Tensor& clients,
                                   const c10::List<std::optional<at::Tensor>>& references,
                                   at::TensorList kept, const std::optional<at::Tensor>& weights,
                                   const std::optional<at::Tensor>& scales) {
  const int64_t d = out.numel();
  check_tensor(out, "out", at::kDouble, {d});
  const at::Device device = out.device();
  check_vector(rounded, "rounded", at::kFloat, d, device);
  PairedRows rows =
      check_paired(tensors, corrections, "corrections", clients, d, device, std::nullopt);
  const int64_t S = rows.size();
  TORCH_CHECK_VALUE(S > 0, "updates: expected at least one row, got none");
  check_vector(peaks, "peaks", at::kFloat, S, device);
  rows.references = check_references(references, S, d, device);
  rows.kept = check_kept(kept, S, d, device);
  if (weights) rows.weights = check_weights(*weights, S, at::kCPU);
  rows.scales = check_scales(scales, S, at::kCPU);
  ChangedMemory changed;
  changed.add(out, "out");
  changed.add(rounded, "rounded");
  changed.add(peaks, "peaks");
  changed.add_rows(rows.kept, rounded.nbytes(), "kept");
  changed.check_rows(rows.updates.addresses, rows.updates.row_bytes(), "updates");
  changed.check_rows(rows.own, rows.updates.row_bytes(), "corrections");
  changed.check_rows(rows.references, rounded.nbytes(), "references");
  rows.sort();
  return rows;
}

// Whether an op takes memory rows of bfloat16 for updates of float32.
enum class Rounded { kNo, kYes };

inline PairedRows check_memory_total(
    const at::Tensor& out, const at::Tensor& peaks, const at::Tensor& total, at::TensorList memory,
    at::TensorList tensors, const at::Tensor& clients, const at::Tensor& weights,
    const c10::List<std::optional<at::Tensor>>& references, const std::optional<at::Tensor>& params,
    at::TensorList kept, const std::optional<at::Tensor>& scales,
    const std::optional<at::Tensor>& faded, const std::optional<at::Tensor>& faded_weights,
    Rounded allowed) {
  const int64_t d = out.numel();
  check_tensor(out, "out", at::kDouble, {d});
  const at::Device device = out.device();
  check_vector(total, "total", at::kDouble, d, device);
  std::optional<at::ScalarType> own_dtype;
  const bool floats = tensors.empty() || tensors[0].scalar_type() == at::kFloat;
  if (allowed == Rounded::kYes && floats && !memory.empty() &&
      memory[0].scalar_type() == at::kBFloat16)
    own_dtype = at::kBFloat16;
  PairedRows rows = check_paired(tensors, memory, "memory", clients, d, device, own_dtype);
  const int64_t S = rows.size();
  check_vector(peaks, "peaks", at::kFloat, S, device);
  rows.weights = check_weights(weights, S, at::kCPU);
  rows.scales = check_scales(scales, S, at::kCPU);
  rows.references = check_references(references, S, d, device);
  rows.faded_weights = check_faded(faded, faded_weights, S, d, device);
  if (faded) {
    TORCH_CHECK_VALUE(references.empty(), "references: expected none with faded");
    TORCH_CHECK_VALUE(!params, "params: expected None with faded");
  }
  if (rows.rounds()) {
    TORCH_CHECK_VALUE(references.empty(),
                      "references: expected none with bfloat16 memory rows of float32 updates");
    TORCH_CHECK_VALUE(!params,
                      "params: expected None with bfloat16 memory rows of float32 "
                      "updates");
  }
  if (params) check_vector(*params, "params", at::kFloat, d, device);
  const at::ScalarType kept_dtype = rows.rounds() ? at::kBFloat16 : at::kFloat;
  rows.kept = check_kept(kept, S, d, device, kept_dtype);
  const auto bytes_of = [&](at::ScalarType dtype) {
    return d * static_cast<int64_t>(c10::elementSize(dtype));
  };
  ChangedMemory changed;
  changed.add(out, "out");
  changed.add(peaks, "peaks");
  if (faded) changed.add(*faded, "faded");
  changed.add_rows(rows.kept, bytes_of(kept_dtype), "kept");
  changed.check(total, "total");
  changed.check_rows(rows.updates.addresses, rows.updates.row_bytes(), "updates");
  changed.check_rows(rows.own, bytes_of(rows.own_dtype), "memory");
  changed.check_rows(rows.references, bytes_of(at::kFloat), "references");
  if (params) changed.check(*params, "params");
  rows.sort();
  return rows;
}

inline PairedRows check_scaffold_mean(const at::Tensor& out, const at::Tensor& next,
                                      const at::Tensor& peaks, const at::Tensor& mean,
                                      at::TensorList tensors, at::TensorList controls,
                                      const at::Tensor& clients, const at::Tensor& weights,
                                      const at::Tensor& steps, at::TensorList kept) {
  const int64_t d = out.numel();
  check_tensor(out, "out", at::kDouble, {d});
  const at::Device device = out.device();
  check_vector(next, "next", at::kFloat, d, device);
  check_vector(mean, "mean", at::kFloat, d, device);
  PairedRows rows = check_paired(tensors, controls, "controls", clients, d, device, at::kFloat);
  TORCH_CHECK_TYPE(rows.updates.dtype == at::kFloat, "updates: expected dtype Float, got ",
                   rows.updates.dtype);
  const int64_t S = rows.size();
  check_vector(peaks, "peaks", at::kFloat, S, device);
  rows.weights = check_weights(weights, S, at::kCPU);
  rows.steps = check_weights(steps, S, at::kCPU, "steps");
  rows.kept = check_kept(kept, S, d, device);
  TORCH_CHECK_VALUE(static_cast<int64_t>(rows.kept.size()) == S, "kept: expected ", S,
                    " rows, got none");
  ChangedMemory changed;
  changed.add(out, "out");
  changed.add(next, "next");
  changed.add(peaks, "peaks");
  changed.add_rows(rows.kept, next.nbytes(), "kept");
  changed.check(mean, "mean");
  changed.check_rows(rows.updates.addresses, rows.updates.row_bytes(), "updates");
  changed.check_rows(rows.own, rows.updates.row_bytes(), "controls");
  rows.sort();
  return rows;
}

}  // namespace fastagg
