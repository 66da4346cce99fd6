// SPDX-License-Identifier: Apache-2.0
// Sizes of caches. Only speed depends on them: results have the same bits with any.
#pragma once

#include <unistd.h>

#include <cstdint>

namespace fastagg::cpu {

// Bytes of a core's L2 cache; 1 MB where the system does not say.
inline int64_t l2_bytes() {
  static const int64_t bytes = [] {
    long found = 0;
#ifdef _SC_LEVEL2_CACHE_SIZE
    found = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
    return found > 0 ? int64_t{found} : int64_t{1} << 20;
  }();
  return bytes;
}

}  // namespace fastagg::cpu
