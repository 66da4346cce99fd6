// SPDX-License-Identifier: Apache-2.0
// Tells memory_check which memory belongs to tensors, and fills new memory with NaN. A kernel that
// reads an element before it is written carries the NaN into its results.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include <cstring>

#include "memory_check.h"

namespace {

void release(void* data) {
  memory_check::remove_memory(data);
  c10::free_cpu(data);
}

struct CheckedAllocator final : c10::Allocator {
  CheckedAllocator() { c10::SetCPUAllocator(this); }

  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &release, cpu};
    void* data = c10::alloc_cpu(bytes);
    std::memset(data, 0xff, bytes);
    memory_check::add_memory(data, bytes);
    return {data, data, &release, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

CheckedAllocator allocator;

}  // namespace
