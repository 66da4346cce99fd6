// SPDX-License-Identifier: Apache-2.0
// The tensor-core arithmetic of both Gram kernels. Both do the same operations for an entry, so its
// bits depend neither on the kernel nor on its position in a tile.
#pragma once

#include <type_traits>

#include "../precision.h"
#include "gram_layout.h"
#include "launch.cuh"

namespace fastagg::cuda {

// The four elements of a lane's 16 bytes as words of two bfloat16 each, or of one TF32.
struct Words4 {
  uint32_t at[4];
};

// x (lower half) and y (upper half) as bfloat16, rounded to nearest.
__device__ __forceinline__ uint32_t round_pair(float x, float y) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
  return pair;
}

__device__ __forceinline__ void split_pair(float x, float y, uint32_t& word_x, uint32_t& word_y) {
  const uint32_t high = round_pair(x, y);
  const float high_x = __uint_as_float(high << 16), high_y = __uint_as_float(high & 0xffff0000u);
  const uint32_t low = round_pair(__fsub_rn(x, high_x), __fsub_rn(y, high_y));
  word_x = __byte_perm(low, high, 0x5410);
  word_y = __byte_perm(low, high, 0x7632);
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

// For each precision: `words` converts the elements of a lane, and `add` adds the products of 8
// words of 16 rows with 8 words of 8 rows. Both precisions hold a word in the same register of the
// same lane: m16n8k8 multiplies words where m16n8k16 multiplies their halves.
template <Precision>
struct Products;

template <>
struct Products<Precision::kHighest> {
  static __device__ __forceinline__ Words4 words(float4 x) {
    Words4 w;
    split_pair(x.x, x.y, w.at[0], w.at[1]);
    split_pair(x.z, x.w, w.at[2], w.at[3]);
    return w;
  }
  static __device__ __forceinline__ void add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
    mma_bf16(c, a, b0, b1);
    mma_bf16(c, a, swapped(b0), swapped(b1));
  }
};

template <>
struct Products<Precision::kTf32> {
  static __device__ __forceinline__ Words4 words(float4 x) {
    return {{round_tf32(x.x), round_tf32(x.y), round_tf32(x.z), round_tf32(x.w)}};
  }
  static __device__ __forceinline__ void add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
    mma_tf32(c, a, b0, b1);
  }
};

// sums += the products of one step of a 16 x 8 tile. Tensor cores truncate, which would bias a long
// chain of sums of one sign. So each step's chain starts from zero, and its result is added with
// rounding to nearest.
//   a0, a1   // words of row groups 2a and 2a + 1
//   b        // words of row group b
template <Precision kPrecision>
__device__ __forceinline__ void add_step(float* sums, const Words4& a0, const Words4& a1,
                                         const Words4& b) {
  float chain[4] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t a[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) a[r] = (a_group(r) ? a1 : a0).at[a_word(half, r)];
    Products<kPrecision>::add(chain, a, b.at[b_word(half, 0)], b.at[b_word(half, 1)]);
  }
#pragma unroll
  for (int r = 0; r < 4; ++r) sums[r] = __fadd_rn(sums[r], chain[r]);
}

// wide[n * stride] += sums[n], and sums = 0. `wide` is volatile so that the compiler does not load
// all of it before the additions, which would take two registers for each element.
template <int N>
__device__ __forceinline__ void flush(float (&sums)[N], volatile double* wide, int stride) {
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
  return call(std::integral_constant<Precision, Precision::kHighest>());
}

}  // namespace fastagg::cuda
