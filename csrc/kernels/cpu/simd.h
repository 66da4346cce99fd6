// SPDX-License-Identifier: Apache-2.0
// Vectors, and the choice of an instruction set at run time. A kernel body is written once, as an
// always-inlined template over W, the number of float lanes of a vector, with the compiler's
// generic vectors (GCC and Clang). It is instantiated in functions that are compiled for AVX-512 (W
// = 16), AVX2 (W = 8), NEON (W = 4) and the baseline of other targets (W = 4, SSE2 on x86-64);
// `dispatch` calls one of them. NEON is the baseline of AArch64, which therefore has no other one.
// There are no intrinsics and no compiler flags for single files. FASTAGG_WITHOUT_AVX512 and
// FASTAGG_WITHOUT_AVX2 each leave out a third of the code, for builds of tests.
//
// SVE is not used: the width of its vectors is known only at run time, unless a flag for the whole
// build fixes it, and generic vectors have a fixed width. Processors with 128-bit SVE multiply as
// fast with NEON.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#define FASTAGG_INLINE __attribute__((always_inline)) inline
#define FASTAGG_INLINE_LAMBDA __attribute__((always_inline))

// Before a loop over columns, in a template over W: compute with W floats at a time, also if the
// loop converts them to double. Otherwise Clang takes as many as there are doubles in a vector.
#if defined(__clang__)
#define FASTAGG_WHOLE_VECTORS _Pragma("clang loop vectorize_width(W)")
#else
#define FASTAGG_WHOLE_VECTORS
#endif

// Before a loop: no iteration reads what another one writes.
#if defined(__clang__)
#define FASTAGG_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define FASTAGG_INDEPENDENT _Pragma("GCC ivdep")
#endif

// Compilers warn that passing wide vectors by value has no stable ABI without -mavx. That does not
// matter here, because all such functions are inlined.
#if defined(__clang__)
#pragma clang diagnostic ignored "-Wpsabi"
#elif defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wpsabi"
#endif

#if defined(__x86_64__)
#define FASTAGG_X86 1
#define FASTAGG_AVX512 "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma"
#define FASTAGG_TARGET_AVX2 __attribute__((target("avx2,fma")))
// GCC vectorizes loops with half of the width unless told otherwise. Clang has another word for
// this, and ignores a target that has a word it does not know, all of it, with a warning only.
#if defined(__clang__)
#define FASTAGG_TARGET_AVX512 __attribute__((target(FASTAGG_AVX512), min_vector_width(512)))
#else
#define FASTAGG_TARGET_AVX512 __attribute__((target(FASTAGG_AVX512 ",prefer-vector-width=512")))
#endif
#endif

namespace fastagg::cpu {

enum class Isa : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kNeon = 3 };
constexpr Isa kEveryIsa[] = {Isa::kPortable, Isa::kAvx2, Isa::kAvx512, Isa::kNeon};

Isa detected_isa();     // the best one of this processor
Isa current_isa();      // the one in use: the detected one, unless set_isa chose another
bool has_isa(Isa isa);  // whether this build and this processor have it
bool set_isa(Isa isa);  // returns false and changes nothing if they do not
const char* isa_name(Isa isa);

// Calls body(W) with the number of float lanes of `isa` as a constant.
template <class Body>
auto with_lanes(Isa isa, const Body& body) {
#ifdef FASTAGG_X86
  if (isa == Isa::kAvx512) return body(std::integral_constant<int, 16>());
#ifndef FASTAGG_WITHOUT_AVX2
  if (isa == Isa::kAvx2) return body(std::integral_constant<int, 8>());
#endif
#endif
  (void)isa;
  return body(std::integral_constant<int, 4>());
}

// Vector registers of an instruction set with W float lanes.
#if defined(__aarch64__)
template <int W>
constexpr int kRegisters = 32;
#else
template <int W>
constexpr int kRegisters = W == 16 ? 32 : 16;
#endif

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
// N floats at p as doubles. Written element by element, because GCC compiles this form, unlike
// __builtin_convertvector, to one instruction. For NEON it makes two of it.
template <int N, int... I>
FASTAGG_INLINE Vec<double, N> load_double(const float* p, std::integer_sequence<int, I...>) {
  return Vec<double, N>{p[I]...};
}
template <int N>
FASTAGG_INLINE Vec<double, N> load_double(const float* p) {
#if defined(__aarch64__) && !defined(__clang__)
  if constexpr (N == 2) {
    Vec<double, 2> out;
    asm("fcvtl %0.2d, %1.2s" : "=w"(out) : "w"(load<2>(p)));
    return out;
  }
#endif
  return load_double<N>(p, std::make_integer_sequence<int, N>());
}

// A vector or number whose origin the compiler cannot see. So it does not fuse a product with an
// addition, and does not compute several numbers as one vector.
template <class T>
FASTAGG_INLINE T opaque(T x) {
#if defined(FASTAGG_X86)
  asm("" : "+v"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#else
  asm("" : "+m"(x));
#endif
  return x;
}

// x * y + z, rounded once if the instruction set with W lanes has an instruction for it. SSE2, the
// baseline of x86-64, has none. In `a * b + c * d` one product is rounded, and the compiler chooses
// which one, in each loop anew. Loops that must have the same bits therefore call this.
template <int W, class T>
FASTAGG_INLINE T multiply_add(T x, T y, T z) {
#if !defined(__FP_FAST_FMA) && !defined(__aarch64__)
  if constexpr (W == 4) return x * y + z;
#endif
  return std::fma(x, y, z);
}

// sum_g weights[g] * x(g) for G numbers, in float32. The product of number 1 is the rounded one,
// because recorded results depend on it: GCC chose it, before the choice was written down. Sums of
// vectors have the same order: see row_in_order.
template <int W, int G, class Number>
FASTAGG_INLINE float sum_of_products(const float* weights, const Number& x) {
  if constexpr (G == 1) {
    return weights[0] * x(0);
  } else {
    float sum = multiply_add<W>(weights[0], x(0), weights[1] * x(1));
    for (int g = 2; g < G; ++g) sum = multiply_add<W>(weights[g], x(g), sum);
    return sum;
  }
}

// Adds one of the products of a sum in float32, of vectors or numbers.
//
// The first product is rounded, and all others are fused with their additions, if the instruction
// set with W lanes can do that. Left to itself, a compiler fuses either one of the first two
// products. GCC chose differently for vectors and for single columns; where it computed two
// products of single columns as one vector, or optimized little, it fused none.
template <int W, class T>
FASTAGG_INLINE void add_product(T* sum, bool first, float weight, const T& x) {
  if (first) {
    *sum = opaque(weight * x);
  } else if constexpr (std::is_same_v<T, float>) {
    *sum = multiply_add<W>(weight, x, *sum);
  } else {
#if defined(FASTAGG_X86)
    if constexpr (W > 4) {
      // In all lanes. A sum with zeros would lose the sign of -0.
      const T factor = weight - T{};
      asm("vfmadd231ps %2, %1, %0" : "+v"(*sum) : "v"(factor), "vm"(x));
      return;
    }
#endif
    *sum += weight * x;
  }
}

// The row of G whose product add_product adds as number i. Row 1 comes first, as in
// sum_of_products.
template <int G>
constexpr int row_in_order(int i) {
  return G > 1 && i < 2 ? 1 - i : i;
}

// The bits of floats.
template <int W>
FASTAGG_INLINE Vec<uint32_t, W> bits_of(const Vec<float, W>& x) {
  Vec<uint32_t, W> bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

// The floats with these bits as doubles, in two halves. GCC 12 has no form of generic vectors that
// becomes one instruction for each half wherever it is inlined: it made nine of the two with
// AVX-512, and converted one number at a time with NEON.
template <int W>
FASTAGG_INLINE void widen_halves(const Vec<uint32_t, W>& bits, Vec<double, W / 2>* low,
                                 Vec<double, W / 2>* high) {
  constexpr int kHalf = W / 2;
  if constexpr (W == 16) {
    Vec<float, kHalf> halves[2];
    std::memcpy(halves, &bits, sizeof bits);
#if defined(FASTAGG_X86) && !defined(__clang__)
    asm("vcvtps2pd %1, %0" : "=v"(*low) : "v"(halves[0]));
    asm("vcvtps2pd %1, %0" : "=v"(*high) : "v"(halves[1]));
#else
    *low = __builtin_convertvector(halves[0], Vec<double, kHalf>);
    *high = __builtin_convertvector(halves[1], Vec<double, kHalf>);
#endif
  } else {
#if defined(__aarch64__) && !defined(__clang__)
    asm("fcvtl %0.2d, %1.2s" : "=w"(*low) : "w"(bits));
    asm("fcvtl2 %0.2d, %1.4s" : "=w"(*high) : "w"(bits));
#else
    float numbers[W];
    std::memcpy(numbers, &bits, sizeof bits);
    *low = load_double<kHalf>(numbers);
    *high = load_double<kHalf>(numbers + kHalf);
#endif
  }
}

// Calls body(0), ..., body(N - 1) with constants, so that arrays of vectors that are indexed by
// them stay in registers.
template <class Body, int... I>
FASTAGG_INLINE void unrolled(const Body& body, std::integer_sequence<int, I...>) {
  (body(std::integral_constant<int, I>()), ...);
}
template <int N, class Body>
FASTAGG_INLINE void unroll(const Body& body) {
  unrolled(body, std::make_integer_sequence<int, N>());
}

// Fetch the cache line of p into the L1 cache, or only into L2.
FASTAGG_INLINE void prefetch(const float* p) {
  __builtin_prefetch(p, 0, 3);
}
FASTAGG_INLINE void prefetch_l2(const float* p) {
  __builtin_prefetch(p, 0, 2);
}
// The same for p[offset], which may be outside of the array, so it is not computed as a pointer.
template <class T>
FASTAGG_INLINE const float* far_from(const T* p, int64_t offset) {
  return reinterpret_cast<const float*>(reinterpret_cast<uintptr_t>(p) + offset * sizeof(T));
}
FASTAGG_INLINE void prefetch(const float* p, int64_t offset) {
  prefetch(far_from(p, offset));
}
template <class T>
FASTAGG_INLINE void prefetch_l2(const T* p, int64_t offset) {
  prefetch_l2(far_from(p, offset));
}

// They are not inlined, because tests find their machine code by name, and so that code that
// several kernels call is compiled once. They are hidden: no other library could replace them, so a
// call does not read its address from a table.
#define FASTAGG_FUNCTION __attribute__((noinline, visibility("hidden")))
#ifdef FASTAGG_X86
template <class Kernel, class... Args>
FASTAGG_TARGET_AVX512 FASTAGG_FUNCTION void run_avx512(Args... args) {
  Kernel::template run<16>(args...);
}
template <class Kernel, class... Args>
FASTAGG_TARGET_AVX2 FASTAGG_FUNCTION void run_avx2(Args... args) {
  Kernel::template run<8>(args...);
}
#endif
#ifdef __aarch64__
template <class Kernel, class... Args>
FASTAGG_FUNCTION void run_neon(Args... args) {
  Kernel::template run<4>(args...);
}
#else
template <class Kernel, class... Args>
FASTAGG_FUNCTION void run_portable(Args... args) {
  Kernel::template run<4>(args...);
}
#endif

// Calls Kernel::run<W>(args...) from code that is compiled for W lanes, as a function of its own.
template <int W, class Kernel, class... Args>
FASTAGG_INLINE void call(Args... args) {
#ifdef FASTAGG_X86
  if constexpr (W == 16) return run_avx512<Kernel>(args...);
  if constexpr (W == 8) return run_avx2<Kernel>(args...);
#endif
#ifdef __aarch64__
  if constexpr (W == 4) run_neon<Kernel>(args...);
#else
  if constexpr (W == 4) run_portable<Kernel>(args...);
#endif
}

// Calls Kernel::run<W>(args...), compiled for the instruction set `isa`. Kernel::run and everything
// that it calls must be FASTAGG_INLINE: code that is not inlined is compiled for the baseline.
template <class Kernel, class... Args>
void dispatch(Isa isa, Args... args) {
#ifdef FASTAGG_X86
#ifndef FASTAGG_WITHOUT_AVX512
  if (isa == Isa::kAvx512) return run_avx512<Kernel>(args...);
#endif
#ifndef FASTAGG_WITHOUT_AVX2
  if (isa == Isa::kAvx2) return run_avx2<Kernel>(args...);
#endif
#endif
  (void)isa;
#ifdef __aarch64__
  run_neon<Kernel>(args...);
#else
  run_portable<Kernel>(args...);
#endif
}

}  // namespace fastagg::cpu
