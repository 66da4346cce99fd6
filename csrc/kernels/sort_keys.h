// SPDX-License-Identifier: Apache-2.0
// Floats as integers of the same order, so that a sort has no special cases: -NaN < -infinity <
// ... < -0 < +0 < ... < infinity < NaN. The order of integers is total, so the result of a sort is
// the same for any order of its input, which minima and maxima of floats do not promise (zeros have
// two signs, and NaN compares with nothing).
#pragma once

#include <cstdint>

#include "elements.h"

namespace fastagg {

// Greater than or equal to the key of any float: pads a column at its end.
constexpr int32_t kLastKey = INT32_MAX;

// The key of the float with these bits, and the bits of the float with this key.
FASTAGG_HD int32_t sort_key(int32_t bits) {
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

FASTAGG_HD float float_of_key(int32_t key) {
  return float_of_bits(static_cast<uint32_t>(sort_key(key)));
}

}  // namespace fastagg
