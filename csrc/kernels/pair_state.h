// SPDX-License-Identifier: Apache-2.0
// The state of FL-FDMS for each pair of clients, in the types in which it may be stored.
#pragma once

#include <cstdint>

namespace fastagg {

// How often each pair was scored: [K, K] int32, or int16 to save memory. Counts stop at the
// largest value of their type.
struct Counts {
  const void* data;
  bool is_short;  // int16
};

// A set of pairs: [K, K] bytes of 0 or 1; or packed, [K, ceil(K / 8)], pair (k, i) being bit i % 8
// of byte i / 8 of row k. Bits beyond K are ignored and stay as they are.
struct Flags {
  const uint8_t* data;  // nullptr: all pairs
  bool packed;
};

}  // namespace fastagg
