// SPDX-License-Identifier: Apache-2.0
// Vectors and run-time dispatch. A kernel body is written once, as an always-inlined template over
// the number of float lanes W, in terms of the compiler's generic vectors (GCC and Clang). It is
// instantiated inside functions compiled for AVX-512 (W = 16), AVX2 (W = 8) and the baseline of the
// target (W = 4: SSE2 or NEON); `dispatch` picks one of them at run time. No intrinsics, no flags
// per file.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#define FASTAGG_INLINE __attribute__((always_inline)) inline
#define FASTAGG_INLINE_LAMBDA __attribute__((always_inline))

// Passing wide vectors by value has no stable ABI without -mavx; nothing here is ever called, only
// inlined.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

#if defined(__x86_64__)
#define FASTAGG_X86 1
#define FASTAGG_TARGET_AVX512 \
  __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,prefer-vector-width=512")))
#define FASTAGG_TARGET_AVX2 __attribute__((target("avx2,fma")))
#endif

namespace fastagg::cpu {

enum class Isa : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };

Isa detected_isa();     // the best one this processor has
Isa current_isa();      // the one in use: the detected one unless set_isa said less
bool set_isa(Isa isa);  // false, and nothing changed, if the processor lacks it
const char* isa_name(Isa isa);

// clang-format off
template <class T, int N> struct VecType {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
  typedef T unaligned __attribute__((vector_size(N * sizeof(T)), aligned(alignof(T)), may_alias));
};
// clang-format on
template <class T, int N>
using Vec = typename VecType<T, N>::type;

template <int N, class T>
FASTAGG_INLINE Vec<T, N> load(const T* p) {
  return *reinterpret_cast<const typename VecType<T, N>::unaligned*>(p);
}
template <int N, class T>
FASTAGG_INLINE void store(T* p, Vec<T, N> v) {
  *reinterpret_cast<typename VecType<T, N>::unaligned*>(p) = v;
}
// N floats at p, widened.
// (Element by element: this form, not __builtin_convertvector, becomes one instruction.)
template <int N, int... I>
FASTAGG_INLINE Vec<double, N> load_double(const float* p, std::integer_sequence<int, I...>) {
  return Vec<double, N>{p[I]...};
}
template <int N>
FASTAGG_INLINE Vec<double, N> load_double(const float* p) {
  return load_double<N>(p, std::make_integer_sequence<int, N>());
}

// body(0), ..., body(N - 1) with constants for arguments, so that arrays of vectors indexed by them
// live in registers.
template <class Body, int... I>
FASTAGG_INLINE void unrolled(const Body& body, std::integer_sequence<int, I...>) {
  (body(std::integral_constant<int, I>()), ...);
}
template <int N, class Body>
FASTAGG_INLINE void unroll(const Body& body) {
  unrolled(body, std::make_integer_sequence<int, N>());
}

FASTAGG_INLINE void prefetch(const float* p) {
  __builtin_prefetch(p, 0, 3);
}

#ifdef FASTAGG_X86
template <class Kernel, class... Args>
FASTAGG_TARGET_AVX512 void run_avx512(Args... args) {
  Kernel::template run<16>(args...);
}
template <class Kernel, class... Args>
FASTAGG_TARGET_AVX2 void run_avx2(Args... args) {
  Kernel::template run<8>(args...);
}
#endif
template <class Kernel, class... Args>
void run_portable(Args... args) {
  Kernel::template run<4>(args...);
}

// Kernel::run<W>(args...) with the instruction set `isa`. Kernel::run must be FASTAGG_INLINE, as
// must be all it calls: code that is not inlined would be compiled for the baseline.
template <class Kernel, class... Args>
void dispatch(Isa isa, Args... args) {
#ifdef FASTAGG_X86
  if (isa == Isa::kAvx512) return run_avx512<Kernel>(args...);
  if (isa == Isa::kAvx2) return run_avx2<Kernel>(args...);
#endif
  (void)isa;
  run_portable<Kernel>(args...);
}

}  // namespace fastagg::cpu
