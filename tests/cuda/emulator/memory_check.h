// SPDX-License-Identifier: Apache-2.0
// Checks the emulated kernels for the faults that compute-sanitizer finds. The kernels are compiled
// with -fsanitize=thread, which makes the compiler call a function at every memory access;
// memory_check.cpp defines these functions in place of ThreadSanitizer's. The program stops with a
// message that names the thread and the access if a thread
//
//   - accesses an address outside all tensors, shared memory and its own stack;
//   - reads shared memory that its block has not written;
//   - reads data that another thread wrote, or writes data that another thread read or wrote,
//     without a barrier of their block, their common warp or their two warps in between, unless
//     both accesses are atomic. Nothing orders two blocks. A shuffle is not a barrier, and two
//     writes of the same value are a race, too;
//   - accesses the destination of an asynchronous copy before it has waited for the copy.
#pragma once
#include <cstddef>
#include <cstdint>

namespace memory_check {

enum class Access { kRead, kWrite, kAtomic, kCopy };

// Registers memory that kernels may use, such as that of a tensor.
void add_memory(const void* data, size_t bytes);
void remove_memory(const void* data);
// Registers the stacks of the threads; each thread may use only its own.
void set_stacks(const void* data, size_t bytes_of_one, int count);

void begin_launch(const char* kernel, const void* arguments, size_t bytes);
void begin_block(unsigned x, unsigned y, const void* dynamic_shared, size_t bytes);
void add_shared(const void* data, size_t bytes);  // static; may be repeated
void begin_thread(int thread);                    // accesses from here on are its own
void end_thread();                                // accesses from here on are the host's
void barrier();                                   // of the block
void barrier_of_warp(int warp);
void announced(int warp);              // at a barrier of two warps
void other_seen(int warp, int other);  // `warp` has waited for what `other` announced
void end_launch();

void check(const void* data, size_t bytes, Access access);
void copy_landed(const void* data, size_t bytes);

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace memory_check
