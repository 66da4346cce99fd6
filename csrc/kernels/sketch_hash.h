// SPDX-License-Identifier: Apache-2.0
// Where a sketch puts a column, and with which sign: a pure function of (seed, column, k).
//
// A block is k neighbouring columns, [b k, (b + 1) k). It is rotated by r(b), so column b k + p
// goes to bucket (p + r(b)) mod k: two columns of a block never meet, and two of different blocks
// meet with probability 1/k. Buckets have signs, which differ from block to block; 512 buckets are
// a unit.
//
// Random numbers are the outputs of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) that starts
// from `seed`, by number. Block b has 1 + 8 units(k) of them: r(b) is the upper log2(k) bits of the
// first; the others are 16 words of 32 bits for each unit, two of an output, the lower one first.
// The bucket q of a unit has the bit 31 - q / 16 of word q % 16; if it is set, numbers are negated.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace fastagg {

constexpr int64_t kLeastBuckets = 64, kMostBuckets = 16384;
constexpr int64_t kUnitBuckets = 512, kUnitWords = 16, kUnitOutputs = kUnitWords / 2;

FASTAGG_HD constexpr int64_t sketch_units(int64_t k) {
  return (k + kUnitBuckets - 1) / kUnitBuckets;
}

// Output number i = 0, 1, ... of SplitMix64. T: uint64_t, or vectors of them on a CPU.
template <class T>
FASTAGG_HD constexpr T split_mix(T seed, T i) {
  T z = seed + (i + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// The number of the first output of block b.
FASTAGG_HD constexpr uint64_t first_output(uint64_t b, int64_t k) {
  return b * static_cast<uint64_t>(1 + kUnitOutputs * sketch_units(k));
}

// Word w of a unit of block b.
FASTAGG_HD constexpr uint32_t sign_word(uint64_t seed, uint64_t b, int64_t k, int64_t unit, int w) {
  const uint64_t output = 1 + unit * kUnitOutputs + w / 2;
  return static_cast<uint32_t>(split_mix(seed, first_output(b, k) + output) >> (w % 2 * 32));
}

// r(b), in [0, k).
FASTAGG_HD constexpr int64_t rotation(uint64_t seed, uint64_t b, int64_t k) {
  // The upper 32 bits suffice, since k <= 2^14.
  const uint64_t upper = split_mix(seed, first_output(b, k)) >> 32;
  return static_cast<int64_t>((upper * static_cast<uint64_t>(k)) >> 32);
}

}  // namespace fastagg
