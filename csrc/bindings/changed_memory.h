// SPDX-License-Identifier: Apache-2.0
// The rule about aliasing: memory that a call changes must not overlap anything else that the call
// reads or changes. Small vectors are exempt where a binding copies them before the first write
// (`weights`, `clients`, and `when` on the CPU).
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

namespace fastagg {

// The memory that one call changes, as ranges of addresses. Storages are not compared: two parts of
// one storage may be given if they do not overlap.
//
// Cost: O(log S) for a row that is read, and one sort of the rows that are changed, unless they are
// in ascending order already.
class ChangedMemory {
 public:
  // `tensor`, which is contiguous, is changed.
  void add(const at::Tensor& tensor, const char* name) {
    if (tensor.nbytes() == 0) return;
    check(tensor, name);
    TORCH_INTERNAL_ASSERT(count_ < kMostTensors);
    const Address begin = address_of(tensor.const_data_ptr());
    ranges_[count_++] = {name, begin, begin + tensor.nbytes()};
  }

  // Rows of `bytes` bytes each are changed. At most one set of rows for each call.
  void add_rows(const std::vector<char*>& rows, int64_t bytes, const char* name) {
    TORCH_INTERNAL_ASSERT(rows_.empty());
    if (bytes == 0) return;
    check_rows(rows, bytes, name);
    rows_.reserve(rows.size());
    for (const char* row : rows) rows_.push_back(address_of(row));
    row_bytes_ = static_cast<Address>(bytes);
    rows_name_ = name;
    if (!std::is_sorted(rows_.begin(), rows_.end())) std::sort(rows_.begin(), rows_.end());
    for (std::size_t s = 1; s < rows_.size(); ++s)
      TORCH_CHECK_VALUE(rows_[s - 1] + row_bytes_ <= rows_[s], name,
                        ": expected rows that share no memory with each other");
  }

  // `tensor`, which is contiguous, is read.
  void check(const at::Tensor& tensor, const char* name) const {
    const void* begin = tensor.const_data_ptr();
    if (const char* other = overlapped(&begin, 1, tensor.nbytes()))
      TORCH_CHECK_VALUE(false, name, ": shares memory with ", other, ", which this call changes");
  }

  // Rows of `bytes` bytes each are read; a row may be null.
  template <class T>
  void check_rows(const std::vector<T*>& rows, int64_t bytes, const char* name) const {
    if (const char* other = overlapped(rows.data(), rows.size(), static_cast<Address>(bytes)))
      TORCH_CHECK_VALUE(false, name, ": a row shares memory with ", other,
                        ", which this call changes");
  }

 private:
  using Address = std::uintptr_t;  // pointers into different arrays must not be compared
  struct Range {
    const char* name;
    Address begin, end;
  };
  static constexpr int kMostTensors = 4;

  static Address address_of(const void* pointer) { return reinterpret_cast<Address>(pointer); }

  // The name of changed memory that one of `count` ranges of `bytes` bytes overlaps, or null.
  template <class T>
  const char* overlapped(T* const* begins, std::size_t count, Address bytes) const {
    if (bytes == 0) return nullptr;
    for (int k = 0; k < count_; ++k) {
      bool any = false;  // without a branch for each row; a null row ends before any range
      for (std::size_t s = 0; s < count; ++s) {
        const Address begin = address_of(begins[s]);
        any |= (begin < ranges_[k].end) & (ranges_[k].begin < begin + bytes);
      }
      if (any) return ranges_[k].name;
    }
    if (rows_.empty()) return nullptr;
    for (std::size_t s = 0; s < count; ++s) {
      const Address begin = address_of(begins[s]);
      // The rows do not overlap each other, so their ends ascend as their beginnings do.
      const auto after = std::upper_bound(rows_.begin(), rows_.end(), begin);
      const bool hits_next = after != rows_.end() && *after < begin + bytes;
      const bool hits_previous = after != rows_.begin() && begin < *(after - 1) + row_bytes_;
      if (hits_next || hits_previous) return rows_name_;
    }
    return nullptr;
  }

  Range ranges_[kMostTensors];
  int count_ = 0;
  std::vector<Address> rows_;  // ascending
  Address row_bytes_ = 0;
  const char* rows_name_ = nullptr;
};

// What update_scores_ changes, after a check that it reads nothing of it.
inline ChangedMemory changed_scores(const at::Tensor& scores, const at::Tensor& counts,
                                    const at::Tensor& round_scores,
                                    const std::optional<at::Tensor>& pairs) {
  ChangedMemory changed;
  changed.add(scores, "scores");
  changed.add(counts, "counts");
  changed.check(round_scores, "round_scores");
  if (pairs) changed.check(*pairs, "pairs");
  return changed;
}

// What eliminate_ changes, after a check that it reads nothing of it.
inline ChangedMemory changed_candidates(const at::Tensor& candidates, const at::Tensor& scores,
                                        const at::Tensor& counts) {
  ChangedMemory changed;
  changed.add(candidates, "candidates");
  changed.check(scores, "scores");
  changed.check(counts, "counts");
  return changed;
}

}  // namespace fastagg
