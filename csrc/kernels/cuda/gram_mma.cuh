// SPDX-License-Identifier: Apache-2.0
// The tensor-core arithmetic of both Gram kernels. Both do the same operations for an entry, so its
// bits depend neither on the kernel nor on its position in a tile.
#pragma once

#include <type_traits>

#include "../precision.h"
#include "gram_layout.h"
#include "launch.cuh"

namespace fastagg::cuda {

// A word of each of the four elements of a lane's 16 bytes.
struct Words4 {
  uint32_t at[4];
};

// x (lower half) and y (upper half) as bfloat16, rounded to nearest.
__device__ __forceinline__ uint32_t round_pair(float x, float y) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
  return pair;
}

// words[0] = (h, m) and words[1] = (h, l), if N is 2, of x and y, elements i and i + 1 of a lane.
// All differences are exact.
template <int N>
__device__ __forceinline__ void split_pair(float x, float y, Words4 (&words)[N], int i) {
  const uint32_t high = round_pair(x, y);
  uint32_t last = high;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    x = __fsub_rn(x, __uint_as_float(last << 16));
    y = __fsub_rn(y, __uint_as_float(last & 0xffff0000u));
    last = round_pair(x, y);
    words[n].at[i] = __byte_perm(last, high, 0x5410);
    words[n].at[i + 1] = __byte_perm(last, high, 0x7632);
  }
}

// x with 10 bits of mantissa, rounded to nearest, ties away from zero. An integer addition to the
// bits would turn some NaN into zero; this instruction does not.
__device__ __forceinline__ uint32_t round_tf32(float x) {
  uint32_t word;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(word) : "f"(x));
  return word;
}

__device__ __forceinline__ void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The words of a step: of 16 rows as registers of operand A, [word, half, register], and of 8 rows.
template <int kWords>
struct OperandA {
  uint32_t at[kWords][2][4];
};
template <int kWords>
struct OperandB {
  Words4 at[kWords];
};

// For each precision: an element has kWords words, `split` makes those of a lane's elements, and
// `add` adds the products of half a step. Elements have the same registers and lanes for all:
// m16n8k8 multiplies words where m16n8k16 multiplies their halves.
template <Precision>
struct Products;

// Without the products of m and l, and of l and l, which are below 2^-26 of h h'.
template <>
struct Products<Precision::kHighest> {
  static constexpr int kWords = 2;
  static __device__ __forceinline__ void split(float4 x, Words4 (&words)[kWords]) {
    split_pair(x.x, x.y, words, 0);
    split_pair(x.z, x.w, words, 2);
  }
  static __device__ __forceinline__ void add(float (&c)[4], const OperandA<kWords>& a,
                                             const OperandB<kWords>& b, int half) {
    const int i = b_word(half, 0), j = b_word(half, 1);
    mma_bf16(c, a.at[1][half], swapped(b.at[1].at[i]), swapped(b.at[1].at[j]));
    mma_bf16(c, a.at[0][half], swapped(b.at[0].at[i]), swapped(b.at[0].at[j]));
    mma_bf16(c, a.at[0][half], b.at[0].at[i], b.at[0].at[j]);
  }
};

template <>
struct Products<Precision::kHigh> {
  static constexpr int kWords = 1;
  static __device__ __forceinline__ void split(float4 x, Words4 (&words)[kWords]) {
    split_pair(x.x, x.y, words, 0);
    split_pair(x.z, x.w, words, 2);
  }
  static __device__ __forceinline__ void add(float (&c)[4], const OperandA<kWords>& a,
                                             const OperandB<kWords>& b, int half) {
    const int i = b_word(half, 0), j = b_word(half, 1);
    mma_bf16(c, a.at[0][half], b.at[0].at[i], b.at[0].at[j]);
    mma_bf16(c, a.at[0][half], swapped(b.at[0].at[i]), swapped(b.at[0].at[j]));
  }
};

template <>
struct Products<Precision::kTf32> {
  static constexpr int kWords = 1;
  static __device__ __forceinline__ void split(float4 x, Words4 (&words)[kWords]) {
    words[0] = {{round_tf32(x.x), round_tf32(x.y), round_tf32(x.z), round_tf32(x.w)}};
  }
  static __device__ __forceinline__ void add(float (&c)[4], const OperandA<kWords>& a,
                                             const OperandB<kWords>& b, int half) {
    mma_tf32(c, a.at[0][half], b.at[0].at[b_word(half, 0)], b.at[0].at[b_word(half, 1)]);
  }
};

// Operand A of the words of row groups 2a and 2a + 1.
template <int kWords>
__device__ __forceinline__ OperandA<kWords> operand_a(const Words4 (&even)[kWords],
                                                      const Words4 (&odd)[kWords]) {
  OperandA<kWords> a;
#pragma unroll
  for (int n = 0; n < kWords; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int r = 0; r < 4; ++r)
        a.at[n][half][r] = (a_group(r) ? odd : even)[n].at[a_word(half, r)];
  return a;
}

// sums += the products of one step of a 16 x 8 tile. Tensor cores truncate, which would bias a long
// chain of sums of one sign. So each step's chain starts from zero, and its result is added with
// rounding to nearest. With kSums = 2, of the upper 8 rows only.
template <Precision kPrecision, int kSums = 4>
__device__ __forceinline__ void add_step(float* sums,
                                         const OperandA<Products<kPrecision>::kWords>& a,
                                         const OperandB<Products<kPrecision>::kWords>& b) {
  float chain[4] = {};
  Products<kPrecision>::add(chain, a, b, 0);
  Products<kPrecision>::add(chain, a, b, 1);
#pragma unroll
  for (int r = 0; r < kSums; ++r) sums[r] = __fadd_rn(sums[r], chain[r]);
}

// wide[n * stride] += sums[n], and sums[n] = 0, for n in [0, N). `wide` is volatile so that the
// compiler does not load all of it before the additions, which would take two registers for each
// element.
template <int N>
__device__ __forceinline__ void flush(float* sums, volatile double* wide, int stride) {
#pragma unroll
  for (int n = 0; n < N; ++n) {
    wide[n * stride] = __dadd_rn(wide[n * stride], static_cast<double>(sums[n]));
    sums[n] = 0.0f;
  }
}

// call(std::integral_constant<Precision, precision>())
template <class Call>
cudaError_t with_precision(Precision precision, const Call& call) {
  if (precision == Precision::kTf32)
    return call(std::integral_constant<Precision, Precision::kTf32>());
  if (precision == Precision::kHigh)
    return call(std::integral_constant<Precision, Precision::kHigh>());
  return call(std::integral_constant<Precision, Precision::kHighest>());
}

}  // namespace fastagg::cuda
