// SPDX-License-Identifier: Apache-2.0
// Stores past the caches, for large rows that are written and not read again soon. An ordinary
// store first reads the cache line that it changes, so writing a row moves its bytes twice.
#pragma once

#ifdef __linux__
#include <unistd.h>
#endif

#include <cstdint>

#include "simd.h"

namespace fastagg::cpu {

// The bytes from which on a call streams what it writes: more than the last cache holds. A smaller
// result is found in that cache by whoever reads it next.
inline int64_t streamed_bytes() {
  static const int64_t bytes = [] {
    int64_t found = 0;
#ifdef _SC_LEVEL3_CACHE_SIZE
    found = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
    return found > 0 ? found : int64_t{32} << 20;
  }();
  return bytes;
}

// Whether a call that moves `bytes` bytes should stream S rows, which must begin at cache lines.
template <class T>
bool should_stream(T* const* rows, int64_t S, int64_t bytes) {
  if (bytes <= streamed_bytes()) return false;
  for (int64_t s = 0; s < S; ++s)
    if (reinterpret_cast<std::uintptr_t>(rows[s]) % 64 != 0) return false;
  return true;
}

// Stores W floats at p, which must be a multiple of their size. Without such an instruction it is
// an ordinary store.
template <int W>
FASTAGG_INLINE void stream(float* p, Vec<float, W> v) {
#ifdef FASTAGG_X86
  // Assembly, because the intrinsic of each width is declared for its instruction set only.
  auto* target = reinterpret_cast<Vec<float, W>*>(p);
  if constexpr (W == 4)
    asm volatile("movntps %1, %0" : "=m"(*target) : "x"(v));
  else
    asm volatile("vmovntps %1, %0" : "=m"(*target) : "v"(v));
#else
  store<W>(p, v);
#endif
}

// Completes the streamed stores of this thread before its later stores.
FASTAGG_INLINE void finish_streams() {
#ifdef FASTAGG_X86
  asm volatile("sfence" ::: "memory");
#endif
}

}  // namespace fastagg::cpu
