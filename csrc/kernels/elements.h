// SPDX-License-Identifier: Apache-2.0
// The types of the elements of a row: float, Bfloat16 and Half. Each number of the two short types
// is exactly a float, and kernels compute with that float.
#pragma once

#include <cstdint>
#include <cstring>

#include "host_device.h"

namespace fastagg {

struct Bfloat16 {
  uint16_t bits;
};
struct Half {  // IEEE 754 binary16
  uint16_t bits;
};

FASTAGG_HD float widened(float x) {
  return x;
}

FASTAGG_HD float float_of_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

FASTAGG_HD float widened(Bfloat16 x) {
  return float_of_bits(uint32_t{x.bits} << 16);
}

// The bits of x rounded to the nearest Bfloat16, ties to even, as those of a float: the lower half
// is zero. Every NaN becomes the same one, 0x7fc0.
FASTAGG_HD uint32_t bfloat16_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  // A mask selects the result, because a branch would prevent vectorization.
  const uint32_t nan = 0u - static_cast<uint32_t>((bits & 0x7fffffffu) > 0x7f800000u);
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return ((rounded & ~nan) | (0x7fc00000u & nan)) & 0xffff0000u;
}

FASTAGG_HD float widened(Half x) {
#ifdef __CUDA_ARCH__
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
#else
  // Masks select the result, because a branch would prevent vectorization. No value here is a
  // subnormal float, so it does not matter whether the processor flushes subnormals to zero.
  const uint32_t magnitude = x.bits & 0x7fffu, sign = uint32_t{x.bits & 0x8000u} << 16;
  const uint32_t subnormal = 0u - static_cast<uint32_t>(magnitude < 0x400u);  // or zero
  const uint32_t special = 0u - static_cast<uint32_t>(magnitude >= 0x7c00u);  // infinity, NaN
  const uint32_t rebias = 112u << 23;  // exponent bias 15 becomes 127, and exponent 31 becomes 255
  const uint32_t normal = (magnitude << 13) + rebias + (rebias & special);
  const float small = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
  uint32_t small_bits;
  memcpy(&small_bits, &small, sizeof small);
  return float_of_bits((normal & ~subnormal) | (small_bits & subnormal) | sign);
#endif
}

}  // namespace fastagg
