// SPDX-License-Identifier: Apache-2.0
#include "tensor_core.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace {

constexpr int kTerms = 16;

float as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// x = significand * 2^(exponent - 23); no hidden bit below 2^-126.
struct Number {
  float x = 0.0f;
  int32_t significand = 0;
  int exponent = -126;

  Number() = default;
  explicit Number(float value) : x(value) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const int biased = bits >> 23 & 255;
    significand = (bits & 0x7fffff) | (biased ? 1 << 23 : 0);
    if (bits >> 31) significand = -significand;
    exponent = std::max(biased, 1) - 127;
  }
};

// x * 2^-shift, truncated towards zero.
int64_t cut(int64_t x, int shift) {
  if (shift <= 0) return x * (int64_t{1} << -shift);
  if (shift > 62) return 0;
  return x < 0 ? -(-x >> shift) : x >> shift;
}

float cut_to_float(int64_t sum, int exponent) {  // sum * 2^exponent
  const uint64_t magnitude = std::abs(sum);
  int extra = magnitude >> 24 ? 64 - 24 - __builtin_clzll(magnitude) : 0;
  extra = std::max(extra, -149 - exponent);
  return std::ldexp(static_cast<float>(cut(sum, extra)), exponent + extra);
}

double exact(float c, const Number* a, const Number* b, int n) {
  double sum = c;
  for (int k = 0; k < n; ++k) sum += double{a[k].x} * b[k].x;
  return sum;
}

float fused(float c, const Number* a, const Number* b, int n, int bits) {
  const Number start(c);
  int64_t products[kTerms];
  int exponents[kTerms], most = start.exponent;
  for (int k = 0; k < n; ++k) {
    products[k] = int64_t{a[k].significand} * b[k].significand;  // times 2^-46
    exponents[k] = a[k].exponent + b[k].exponent;
    most = std::max(most, exponents[k]);
  }
  if (most > 127) {  // infinities and NaN, or close to it
    const double sum = exact(c, a, b, n);
    if (std::isnan(sum)) return as_float(0x7fffffff);
    if (std::isinf(sum)) return static_cast<float>(sum);
  }
  int64_t sum = cut(start.significand, 23 - bits + most - start.exponent);
  for (int k = 0; k < n; ++k) sum += cut(products[k], 46 - bits + most - exponents[k]);
  return cut_to_float(sum, most - bits);
}

}  // namespace

void multiply(TensorCore core, bool bf16, MmaLane (&lanes)[32]) {
  const int n = bf16 ? 16 : 8;
  Number a[16][kTerms], b[8][kTerms];
  const auto take = [&](Number* to, int word, uint32_t bits) {
    if (bf16) {
      to[2 * word] = Number(as_float(bits << 16));
      to[2 * word + 1] = Number(as_float(bits & 0xffff0000u));
    } else {
      to[word] = Number(as_float(bits & 0xffffe000u));  // the hardware ignores the lower 13 bits
    }
  };
  for (int lane = 0; lane < 32; ++lane) {
    for (int r = 0; r < 4; ++r)
      take(a[lane / 4 + r % 2 * 8], lane % 4 + r / 2 * 4, lanes[lane].a[r]);
    for (int r = 0; r < 2; ++r) take(b[lane / 4], lane % 4 + r * 4, lanes[lane].b[r]);
  }
  for (int lane = 0; lane < 32; ++lane)
    for (int e = 0; e < 4; ++e) {
      const Number* x = a[lane / 4 + e / 2 * 8];
      const Number* y = b[lane % 4 * 2 + e % 2];
      float& c = lanes[lane].c[e];
      if (core == TensorCore::kSm80)
        c = fused(fused(c, x, y, n / 2, 24), x + n / 2, y + n / 2, n / 2, 24);
      else
        c = fused(c, x, y, n, 25);
    }
}
