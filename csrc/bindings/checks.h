// SPDX-License-Identifier: Apache-2.0
// Argument checks shared by the bindings: each failure names the argument, what was expected and
// what came. TypeError for dtypes, IndexError for client ids, ValueError for the rest.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <vector>

#include "../kernels/pair_state.h"

namespace fastagg {

// `size` standing for "any".
constexpr int64_t kAny = -1;

inline void check_tensor(const at::Tensor& t, const char* name, at::ScalarType dtype,
                         std::initializer_list<int64_t> shape) {
  TORCH_CHECK_TYPE(t.scalar_type() == dtype, name, ": expected dtype ", dtype, ", got ",
                   t.scalar_type());
  bool fits = t.dim() == static_cast<int64_t>(shape.size());
  int64_t dim = 0;
  for (int64_t size : shape) {
    fits = fits && (size == kAny || t.size(dim) == size);
    ++dim;
  }
  TORCH_CHECK_VALUE(fits, name, ": expected shape ", at::IntArrayRef(shape),
                    " (-1 stands for any size), got ", t.sizes());
  TORCH_CHECK_VALUE(t.is_contiguous(), name, ": expected a contiguous tensor, got strides ",
                    t.strides(), " for shape ", t.sizes());
}

inline void check_same_device(const at::Tensor& t, const char* name, const at::Device& device) {
  TORCH_CHECK_VALUE(t.device() == device, name, ": expected device ", device, ", got ", t.device());
}

inline at::Device device_of(at::TensorList tensors, const char* name) {
  TORCH_CHECK_VALUE(!tensors.empty(), name, ": expected at least one tensor, got an empty list");
  return tensors[0].device();
}

// S rows of d floats, wherever they are.
struct Rows {
  std::vector<const float*> pointers;
  int64_t d = 0;
  int64_t size() const { return static_cast<int64_t>(pointers.size()); }
};

// `d`: the expected length of a row, or kAny.
inline Rows check_rows(at::TensorList tensors, const char* name, int64_t d,
                       const at::Device& device) {
  Rows rows;
  for (const at::Tensor& t : tensors) {
    TORCH_CHECK_TYPE(t.scalar_type() == at::kFloat, name, ": expected dtype Float, got ",
                     t.scalar_type());
    check_same_device(t, name, device);
    TORCH_CHECK_VALUE(t.dim() == 1 || t.dim() == 2, name,
                      ": expected [S, d] or S tensors [d], got a tensor of shape ", t.sizes());
    const int64_t length = t.size(-1);
    if (d == kAny) d = length;
    TORCH_CHECK_VALUE(length == d, name, ": expected rows of d = ", d, " elements, got shape ",
                      t.sizes());
    TORCH_CHECK_VALUE(t.stride(-1) == 1 || length <= 1, name,
                      ": expected a contiguous last dimension, got strides ", t.strides());
    const auto* data = t.const_data_ptr<float>();
    const int64_t count = t.dim() == 2 ? t.size(0) : 1;
    for (int64_t s = 0; s < count; ++s)
      rows.pointers.push_back(data + (t.dim() == 2 ? s * t.stride(0) : 0));
  }
  rows.d = d == kAny ? 0 : d;
  return rows;
}

// Rows are only read: none may lie in memory that the same call writes.
inline void check_no_overlap(const Rows& rows, const char* name, const at::Tensor& written,
                             const char* written_name) {
  const auto* begin = static_cast<const char*>(written.const_data_ptr());
  const auto* end = begin + written.nbytes();
  for (const float* row : rows.pointers) {
    const auto* first = reinterpret_cast<const char*>(row);
    const auto* last = reinterpret_cast<const char*>(row + rows.d);
    TORCH_CHECK_VALUE(last <= begin || end <= first, name, ": a row shares memory with ",
                      written_name, ", which this call changes");
  }
}

// The same for rows that are written: they must also be disjoint.
inline void check_no_overlap(const Rows& rows, const char* name, const std::vector<float*>& written,
                             const char* written_name) {
  std::vector<const float*> starts(written.begin(), written.end());
  std::sort(starts.begin(), starts.end());
  const int64_t d = rows.d;
  for (std::size_t s = 1; s < starts.size(); ++s)
    TORCH_CHECK_VALUE(starts[s - 1] + d <= starts[s], written_name,
                      ": expected rows that share no memory with each other");
  for (const float* row : rows.pointers) {
    const auto after = std::upper_bound(starts.begin(), starts.end(), row);
    const bool free_after = after == starts.end() || row + d <= *after;
    const bool free_before = after == starts.begin() || *(after - 1) + d <= row;
    TORCH_CHECK_VALUE(free_after && free_before, name, ": a row shares memory with ", written_name,
                      ", which this call changes");
  }
}

// Distinct ids in [0, K), one per row, or of any size if K is kAny; returns them.
inline const int64_t* check_clients(const at::Tensor& clients, int64_t S, int64_t K) {
  check_tensor(clients, "clients", at::kLong, {S});
  const auto* ids = clients.const_data_ptr<int64_t>();
  const int64_t limit = K == kAny ? std::numeric_limits<int64_t>::max() : K;
  for (int64_t s = 0; s < S; ++s)
    TORCH_CHECK_INDEX(ids[s] >= 0 && ids[s] < limit, "clients: expected ids in [0, ", limit,
                      "), got ", ids[s]);
  std::vector<int64_t> sorted(ids, ids + S);
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  TORCH_CHECK_VALUE(twice == sorted.end(), "clients: expected distinct ids, got ", *twice,
                    " twice");
  return ids;
}

// What is remembered of the clients of S rows: the rows `clients` of one [K, d] tensor, or S
// tensors [d], those of clients[0], clients[1], … Returns them in that order, and checks the ids.
struct ClientRows {
  std::vector<float*> pointers;
  const int64_t* ids;
};

inline ClientRows check_client_rows(at::TensorList tensors, const char* name,
                                    const at::Tensor& clients, int64_t S, int64_t d,
                                    const at::Device& device) {
  ClientRows rows;
  if (tensors.size() == 1 && tensors[0].dim() == 2) {
    const at::Tensor& matrix = tensors[0];
    check_tensor(matrix, name, at::kFloat, {kAny, d});
    check_same_device(matrix, name, device);
    rows.ids = check_clients(clients, S, matrix.size(0));
    auto* data = static_cast<float*>(matrix.mutable_data_ptr());
    for (int64_t s = 0; s < S; ++s) rows.pointers.push_back(data + rows.ids[s] * d);
    return rows;
  }
  rows.ids = check_clients(clients, S, kAny);
  TORCH_CHECK_VALUE(static_cast<int64_t>(tensors.size()) == S, name,
                    ": expected one tensor [K, d] or a row for each of ", S, " updates, got ",
                    tensors.size(), " tensors");
  for (const at::Tensor& row : tensors) {
    check_tensor(row, name, at::kFloat, {d});
    check_same_device(row, name, device);
    rows.pointers.push_back(static_cast<float*>(row.mutable_data_ptr()));
  }
  return rows;
}

// [] or S entries, each absent or [d]: S pointers, null where absent.
inline std::vector<const float*> check_references(
    const c10::List<std::optional<at::Tensor>>& tensors, int64_t S, int64_t d,
    const at::Device& device) {
  std::vector<const float*> pointers(S, nullptr);
  const auto given = static_cast<int64_t>(tensors.size());
  TORCH_CHECK_VALUE(given == 0 || given == S, "references: expected one entry for each of ", S,
                    " updates, got ", given);
  for (int64_t s = 0; s < given; ++s) {
    const std::optional<at::Tensor> row = tensors.get(s);
    if (!row) continue;
    check_tensor(*row, "references", at::kFloat, {d});
    check_same_device(*row, "references", device);
    pointers[s] = row->const_data_ptr<float>();
  }
  return pointers;
}

// The rows' positions in the order of their client ids.
inline std::vector<int64_t> order_by_client(const int64_t* ids, int64_t S) {
  std::vector<int64_t> order(S);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return ids[a] < ids[b]; });
  return order;
}

template <class T>
std::vector<T> reorder(const std::vector<T>& items, const std::vector<int64_t>& order) {
  std::vector<T> result;
  result.reserve(order.size());
  for (int64_t position : order) result.push_back(items[position]);
  return result;
}

inline void check_weight_shape(const at::Tensor& weights, int64_t S) {
  TORCH_CHECK_TYPE(weights.scalar_type() == at::kDouble || weights.scalar_type() == at::kFloat,
                   "weights: expected dtype Float or Double, got ", weights.scalar_type());
  check_tensor(weights, "weights", weights.scalar_type(), {S});
}

// [S] float32 or float64 -> S doubles.
inline std::vector<double> check_weights(const at::Tensor& weights, int64_t S,
                                         const at::Device& device) {
  check_weight_shape(weights, S);
  check_same_device(weights, "weights", device);
  if (weights.scalar_type() == at::kDouble) {
    const auto* w = weights.const_data_ptr<double>();
    return {w, w + S};
  }
  const auto* w = weights.const_data_ptr<float>();
  return {w, w + S};
}

// An optional [rows, rows] matrix of flags.
inline const uint8_t* check_flags(const std::optional<at::Tensor>& flags, const char* name,
                                  int64_t rows, const at::Device& device) {
  if (!flags) return nullptr;
  check_tensor(*flags, name, at::kBool, {rows, rows});
  check_same_device(*flags, name, device);
  return reinterpret_cast<const uint8_t*>(flags->const_data_ptr<bool>());
}

// [K, K] float32 scores and int32 or int16 counts; returns K.
inline int64_t check_scores(const at::Tensor& scores, const at::Tensor& counts) {
  const int64_t K = scores.dim() == 2 ? scores.size(0) : 0;
  check_tensor(scores, "scores", at::kFloat, {K, K});
  TORCH_CHECK_TYPE(counts.scalar_type() == at::kInt || counts.scalar_type() == at::kShort,
                   "counts: expected dtype Int or Short, got ", counts.scalar_type());
  check_tensor(counts, "counts", counts.scalar_type(), {K, K});
  check_same_device(counts, "counts", scores.device());
  return K;
}

inline Counts read_counts(const at::Tensor& counts) {
  return {counts.const_data_ptr(), counts.scalar_type() == at::kShort};
}

// [K, K] bool or [K, ceil(K / 8)] packed bits; returns whether they are packed.
inline bool check_candidates(const at::Tensor& candidates, int64_t K, const at::Device& device) {
  check_same_device(candidates, "candidates", device);
  const bool packed = candidates.scalar_type() == at::kByte;
  TORCH_CHECK_TYPE(packed || candidates.scalar_type() == at::kBool,
                   "candidates: expected dtype Bool, or Byte for packed bits, got ",
                   candidates.scalar_type());
  check_tensor(candidates, "candidates", candidates.scalar_type(), {K, packed ? (K + 7) / 8 : K});
  return packed;
}

inline void check_threshold(double threshold) {
  TORCH_CHECK_VALUE(threshold == threshold, "threshold: expected a number, got NaN");
}

inline const uint8_t* check_pairs(const std::optional<at::Tensor>& pairs, int64_t S,
                                  const at::Device& device) {
  const uint8_t* flags = check_flags(pairs, "pairs", S, device);
  if (flags)
    for (int64_t i = 0; i < S; ++i)
      for (int64_t j = 0; j < i; ++j)
        TORCH_CHECK_VALUE(flags[i * S + j] == flags[j * S + i],
                          "pairs: expected a symmetric matrix, got different values at [", i, ", ",
                          j, "] and [", j, ", ", i, "]");
  return flags;
}

}  // namespace fastagg
