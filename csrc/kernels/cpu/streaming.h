// SPDX-License-Identifier: Apache-2.0
// Stores past the caches, for large rows that are written and not read again soon. An ordinary
// store first reads the cache line that it changes, so writing a row moves its bytes twice.
#pragma once

#include <cstdint>

#include "cache.h"
#include "simd.h"

namespace fastagg::cpu {

// Whether a call that moves `bytes` bytes should stream S rows, which must begin at cache lines. It
// should if that is more than the last cache holds for it. A smaller result is found in that cache
// by whoever reads it next.
template <class T>
bool should_stream(T* const* rows, int64_t S, int64_t bytes) {
  if (bytes <= own_l3_bytes()) return false;
  for (int64_t s = 0; s < S; ++s)
    if (reinterpret_cast<std::uintptr_t>(rows[s]) % 64 != 0) return false;
  return true;
}

// Stores W floats at p, which must be a multiple of their size. Without such an instruction it is
// an ordinary store.
template <int W>
FASTAGG_INLINE void stream(float* p, Vec<float, W> v) {
#if !defined(FASTAGG_X86)
  store<W>(p, v);
#elif defined(__clang__)
  __builtin_nontemporal_store(v, reinterpret_cast<Vec<float, W>*>(p));
#else
  // Assembly, because GCC declares the intrinsic of each width for its instruction set only.
  auto* target = reinterpret_cast<Vec<float, W>*>(p);
  if constexpr (W == 4)
    asm volatile("movntps %1, %0" : "=m"(*target) : "x"(v));
  else
    asm volatile("vmovntps %1, %0" : "=m"(*target) : "v"(v));
#endif
}

// Completes the streamed stores of this thread before its later stores.
FASTAGG_INLINE void finish_streams() {
#ifdef FASTAGG_X86
  asm volatile("sfence" ::: "memory");
#endif
}

}  // namespace fastagg::cpu
