// SPDX-License-Identifier: Apache-2.0
#include "simd.h"

#include <atomic>

namespace fastagg::cpu {

Isa detected_isa() {
#ifdef FASTAGG_X86
#ifndef FASTAGG_WITHOUT_AVX512
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
    return Isa::kAvx512;
#endif
#ifndef FASTAGG_WITHOUT_AVX2
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Isa::kAvx2;
#endif
#endif
#ifdef __aarch64__
  return Isa::kNeon;
#else
  return Isa::kPortable;
#endif
}

bool has_isa(Isa isa) {
#ifdef FASTAGG_WITHOUT_AVX2
  if (isa == Isa::kAvx2) return false;
#endif
  const Isa best = detected_isa();
  return best == Isa::kNeon ? isa == best : isa <= best;
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kNeon:
      return "neon";
    case Isa::kPortable:
      return "portable";
  }
  return "unknown";
}

namespace {

std::atomic<Isa>& current() {
  static std::atomic<Isa> isa{detected_isa()};
  return isa;
}

// Made when the library is loaded: a child of fork() that interrupts the first call would wait for
// the end of that call.
[[maybe_unused]] const std::atomic<Isa>& loaded = current();

}  // namespace

Isa current_isa() {
  return current().load(std::memory_order_relaxed);
}

bool set_isa(Isa isa) {
  if (!has_isa(isa)) return false;
  current().store(isa, std::memory_order_relaxed);
  return true;
}

}  // namespace fastagg::cpu
