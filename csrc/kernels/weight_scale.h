// SPDX-License-Identifier: Apache-2.0
// The weights of a sum in float32, as factor * quotients. The factor is applied once per column, in
// float64; the quotients multiply the rows, in float32.
//
// What all weights have in common (1/S, the server learning rate) is thereby not rounded to
// float32. Equal weights, and multiples of the smallest one, have exact quotients.
#pragma once

#include "host_device.h"

namespace fastagg {

// The factor of weights, from the magnitudes of those that are not zero. It is the smallest one, if
// the others are not much larger, times a power of two. The magnitudes of all quotients add up to 1
// at most, or to no more than those of the weights. So a sum with convex weights stays in the range
// of its rows. The inverse of the factor is finite: the sum with smaller weights is zero in
// float32.
FASTAGG_HD double common_factor(double smallest, double largest, double total) {
  if (!(largest > 0.0 && total <= 0x1p960)) return 1.0;  // all zero; or NaN, or too large
  double factor = largest <= smallest * 0x1p20 ? smallest : largest;
  while (factor < total && factor < 1.0) factor *= 2.0;
  return factor < 0x1p-1021 ? 1.0 : factor;
}

// The quotient of weights 1, of which there are S: a power of two, at most 1 / S.
FASTAGG_HD float mean_quotient(int64_t S) {
  float quotient = 1.0f;
  for (int64_t power = 1; power < S; power *= 2) quotient *= 0.5f;
  return quotient;
}

}  // namespace fastagg
