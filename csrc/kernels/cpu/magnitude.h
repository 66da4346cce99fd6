// SPDX-License-Identifier: Apache-2.0
// The largest magnitude in a row, with NaN above infinity and infinity above all numbers.
//
// The bit patterns of magnitudes, as integers, have the same order. So an integer maximum needs no
// special cases and is the same in any order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace fastagg::cpu {

FASTAGG_INLINE int32_t magnitude_bits(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits & 0x7fffffff;
}

// The bits of max |x| over all elements added.
template <int W>
class Magnitude {
 public:
  FASTAGG_INLINE void add(const Vec<float, W>& x) {
    Vec<int32_t, W> bits;
    std::memcpy(&bits, &x, sizeof bits);
    bits &= 0x7fffffff;
    lanes_ = bits > lanes_ ? bits : lanes_;
  }
  FASTAGG_INLINE void add(const Magnitude& other) {
    lanes_ = other.lanes_ > lanes_ ? other.lanes_ : lanes_;
    rest_ = std::max(rest_, other.rest_);
  }
  FASTAGG_INLINE void add(float x) { rest_ = std::max(rest_, magnitude_bits(x)); }
  FASTAGG_INLINE void add(const float* x, int64_t n) {
    int64_t k = 0;
    for (; k + W <= n; k += W) add(load<W>(x + k));
    for (; k < n; ++k) add(x[k]);
  }
  FASTAGG_INLINE int32_t bits() const {
    int32_t lanes[W];
    std::memcpy(lanes, &lanes_, sizeof lanes);
    int32_t largest = rest_;
    for (int32_t lane : lanes) largest = std::max(largest, lane);
    return largest;
  }

 private:
  Vec<int32_t, W> lanes_ = {};
  int32_t rest_ = 0;
};

}  // namespace fastagg::cpu
