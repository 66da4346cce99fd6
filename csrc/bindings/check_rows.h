// SPDX-License-Identifier: Apache-2.0
// Checks of rows: S updates, and the memory rows of their clients.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "../kernels/elements.h"
#include "checks.h"

namespace fastagg {

// S rows of d elements of one dtype.
struct Rows {
  std::vector<const char*> addresses;
  at::ScalarType dtype = at::kFloat;
  int64_t d = 0;
  int64_t size() const { return static_cast<int64_t>(addresses.size()); }
  int64_t element_bytes() const { return static_cast<int64_t>(c10::elementSize(dtype)); }
  int64_t row_bytes() const { return d * element_bytes(); }
};

// The same addresses as pointers to T.
template <class T, class Byte>
std::vector<T*> pointers(const std::vector<Byte*>& addresses) {
  std::vector<T*> result;
  result.reserve(addresses.size());
  for (Byte* address : addresses) result.push_back(reinterpret_cast<T*>(address));
  return result;
}

// call(T()) with the type of elements: float, Bfloat16 or Half.
template <class Call>
void with_element(at::ScalarType dtype, const Call& call) {
  if (dtype == at::kBFloat16)
    call(Bfloat16());
  else if (dtype == at::kHalf)
    call(Half());
  else
    call(float());
}

// The dtypes that an op accepts: only float32, or also bfloat16 and float16.
enum class Elements { kFloat, kAlsoShort };

inline void check_elements(const at::Tensor& t, const char* name, Elements allowed) {
  const at::ScalarType dtype = t.scalar_type();
  if (allowed == Elements::kFloat) {
    TORCH_CHECK_TYPE(dtype == at::kFloat, name, ": expected dtype Float, got ", dtype);
  } else {
    TORCH_CHECK_TYPE(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf, name,
                     ": expected dtype Float, BFloat16 or Half, got ", dtype);
  }
}

// Rows of a call, at most. A view may repeat one row as often as it likes.
constexpr int64_t kMostRows = int64_t{1} << 24;

// Checks and collects rows. `tensors` is any mixture of tensors [n, d] and [d].
//   d   // the expected length of a row, or kAny
inline Rows check_rows(at::TensorList tensors, const char* name, int64_t d,
                       const at::Device& device, Elements allowed = Elements::kFloat) {
  Rows rows;
  if (!tensors.empty()) rows.dtype = tensors[0].scalar_type();
  for (const at::Tensor& t : tensors) {
    check_dense(t, name);
    check_elements(t, name, allowed);
    TORCH_CHECK_TYPE(t.scalar_type() == rows.dtype, name, ": expected rows of one dtype, got ",
                     rows.dtype, " and ", t.scalar_type());
    check_same_device(t, name, device);
    TORCH_CHECK_VALUE(t.dim() == 1 || t.dim() == 2, name,
                      ": expected [S, d] or S tensors [d], got a tensor of shape ", t.sizes());
    const int64_t length = t.size(-1);
    if (d == kAny) d = length;
    TORCH_CHECK_VALUE(length == d, name, ": expected rows of d = ", d, " elements, got shape ",
                      t.sizes());
    TORCH_CHECK_VALUE(t.stride(-1) == 1 || length <= 1, name,
                      ": expected a contiguous last dimension, got strides ", t.strides());
    check_memory(t, name);
    const int64_t count = t.dim() == 2 ? t.size(0) : 1;
    TORCH_CHECK_VALUE(count <= kMostRows - rows.size(), name, ": expected at most ", kMostRows,
                      " rows, got more");
    const auto* data = static_cast<const char*>(t.const_data_ptr());
    const int64_t distance = t.dim() == 2 ? t.stride(0) * rows.element_bytes() : 0;
    for (int64_t s = 0; s < count; ++s) rows.addresses.push_back(data + s * distance);
  }
  rows.d = d == kAny ? 0 : d;
  return rows;
}

// Checks `changed` of gram_rows, int64 [C] in CPU memory: distinct positions in [0, S).
inline std::vector<int64_t> check_positions(const at::Tensor& changed, int64_t S) {
  check_tensor(changed, "changed", at::kLong, {changed.numel()});
  check_same_device(changed, "changed", at::kCPU);
  const auto* first = changed.const_data_ptr<int64_t>();
  std::vector<int64_t> positions(first, first + changed.numel());
  std::vector<uint8_t> seen(S, 0);
  for (int64_t s : positions) {
    TORCH_CHECK_INDEX(s >= 0 && s < S, "changed: expected positions in [0, ", S, "), got ", s);
    TORCH_CHECK_VALUE(!seen[s], "changed: expected distinct positions, got ", s, " twice");
    seen[s] = 1;
  }
  return positions;
}

// Checks `clients`: int64 [S], distinct ids in [0, K), or only non-negative if K is kAny. Returns
// them.
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

// The memory rows of the clients of S updates: the rows `clients` of one tensor [K, d], or S
// tensors [d], those of clients[0], clients[1], and so on. They are returned in that order; the ids
// are checked too.
//   d, dtype   // of a memory row
struct ClientRows {
  std::vector<char*> addresses;
  const int64_t* ids;
};

inline ClientRows check_client_rows(at::TensorList tensors, const char* name,
                                    const at::Tensor& clients, int64_t S, int64_t d,
                                    at::ScalarType dtype, const at::Device& device) {
  ClientRows rows;
  if (tensors.size() == 1 && tensors[0].dim() == 2) {
    const at::Tensor& matrix = tensors[0];
    check_tensor(matrix, name, dtype, {kAny, d});
    check_same_device(matrix, name, device);
    rows.ids = check_clients(clients, S, matrix.size(0));
    auto* data = static_cast<char*>(matrix.mutable_data_ptr());
    const int64_t row_bytes = d * static_cast<int64_t>(c10::elementSize(dtype));
    for (int64_t s = 0; s < S; ++s) rows.addresses.push_back(data + rows.ids[s] * row_bytes);
    return rows;
  }
  rows.ids = check_clients(clients, S, kAny);
  TORCH_CHECK_VALUE(static_cast<int64_t>(tensors.size()) == S, name,
                    ": expected one tensor [K, d] or a row for each of ", S, " updates, got ",
                    tensors.size(), " tensors");
  for (const at::Tensor& row : tensors) {
    check_tensor(row, name, dtype, {d});
    check_same_device(row, name, device);
    rows.addresses.push_back(static_cast<char*>(row.mutable_data_ptr()));
  }
  return rows;
}

// Checks `references`: empty, or S entries, each None or float32 [d]. Returns S pointers, null for
// None.
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

// Checks `kept`: empty, or S rows [d] of `dtype` that the call writes. Returns their addresses.
inline std::vector<char*> check_kept(at::TensorList kept, int64_t S, int64_t d,
                                     const at::Device& device, at::ScalarType dtype = at::kFloat) {
  const auto given = static_cast<int64_t>(kept.size());
  TORCH_CHECK_VALUE(given == 0 || given == S, "kept: expected one row for each of ", S,
                    " updates, got ", given);
  std::vector<char*> addresses;
  for (const at::Tensor& row : kept) {
    check_tensor(row, "kept", dtype, {d});
    check_same_device(row, "kept", device);
    addresses.push_back(static_cast<char*>(row.mutable_data_ptr()));
  }
  return addresses;
}

// The positions of the rows in ascending order of their client ids.
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

// The rows of matrices and vectors, as vectors.
inline std::vector<at::Tensor> one_by_one(at::TensorList tensors) {
  std::vector<at::Tensor> rows;
  for (const at::Tensor& t : tensors) {
    if (t.dim() != 2) {
      rows.push_back(t);
      continue;
    }
    const std::vector<at::Tensor> parts = t.unbind(0);
    rows.insert(rows.end(), parts.begin(), parts.end());
  }
  return rows;
}

}  // namespace fastagg
