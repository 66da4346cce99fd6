// SPDX-License-Identifier: Apache-2.0
// What compute-sanitizer looks for, for the emulated kernels. They are compiled with
// -fsanitize=thread, which makes the compiler call a function at every access to memory; these
// functions are not ThreadSanitizer's, but those of memory_check.cpp. The program ends, with a
// sentence that says who did what, if a thread
//
//   - touches an address that belongs to no tensor, to no shared memory, and not to itself;
//   - reads shared memory that its block has not written;
//   - reads what another thread wrote, or writes what another read or wrote, without a barrier of
//     the block, or of the warp they share, between them (none is between blocks), unless both are
//     atomic. A shuffle is no barrier, and to write the same number twice is no excuse;
//   - touches the destination of an asynchronous copy that has not been waited for.
#pragma once
#include <cstddef>
#include <cstdint>

namespace memory_check {

enum class Access { kRead, kWrite, kAtomic, kCopy };

// Memory that kernels may use: of tensors, say.
void add_memory(const void* data, size_t bytes);
void remove_memory(const void* data);
// Memory of threads: each may use its own stack.
void set_stacks(const void* data, size_t bytes_of_one, int count);

void begin_launch(const char* kernel, const void* arguments, size_t bytes);
void begin_block(unsigned x, unsigned y, const void* dynamic_shared, size_t bytes);
void add_shared(const void* data, size_t bytes);  // static; once or often
void begin_thread(int thread);                    // what follows is done by it, ...
void end_thread();                                // ... or by nobody
void barrier();                                   // of the block
void barrier_of_warp(int warp);
void end_launch();

void check(const void* data, size_t bytes, Access access);
void copy_landed(const void* data, size_t bytes);

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace memory_check
