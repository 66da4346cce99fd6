// SPDX-License-Identifier: Apache-2.0
#include "../friends.h"

#include <cmath>

#include "scratch.h"
#include "simd.h"

namespace fastagg::cpu {
namespace {

// --- flags ------------------------------------------------------------------------------------

int64_t packed_bytes(int64_t K) {
  return ceil_div(K, 8);
}

FASTAGG_INLINE bool bit(const uint8_t* bits, int64_t i) {
  return bits[i / 8] >> (i % 8) & 1;
}

FASTAGG_INLINE void clear_bit(uint8_t* bits, int64_t i) {
  bits[i / 8] = static_cast<uint8_t>(bits[i / 8] & ~(1u << (i % 8)));
}

// bits = the flags of n bytes of 0 or 1.
void pack(const uint8_t* flags, int64_t n, uint8_t* bits) {
  for (int64_t i = 0; i < n; i += 8) {
    unsigned byte = 0;
    for (int64_t b = 0; b < std::min<int64_t>(8, n - i); ++b)
      byte |= static_cast<unsigned>(flags[i + b] != 0) << b;
    bits[i / 8] = static_cast<uint8_t>(byte);
  }
}

void unpack(const uint8_t* bits, int64_t n, uint8_t* flags) {
  for (int64_t i = 0; i < n; ++i) flags[i] = bit(bits, i);
}

// bits = row k of a set of pairs; all clients if the set has no data.
void read_row(Flags flags, int64_t k, int64_t K, uint8_t* bits) {
  if (!flags.data)
    std::fill_n(bits, packed_bytes(K), uint8_t{0xff});
  else if (flags.packed)
    std::copy_n(flags.data + k * packed_bytes(K), packed_bytes(K), bits);
  else
    pack(flags.data + k * K, K, bits);
}

// --- one row ----------------------------------------------------------------------------------

// Rows are read in steps of at most 8 lanes, one byte of flags. (GCC 12 splits vectors of 16 lanes
// here.)
template <int W>
constexpr int kLanes = std::min(W, 8);

// The W flags from position i, a multiple of W, as bits 0 to W - 1.
template <int W>
FASTAGG_INLINE int32_t lane_bits(const uint8_t* bits, int64_t i) {
  static_assert(W == 4 || W == 8);
  return W == 8 ? bits[i / 8] : bits[i / 8] >> (i % 8) & 15;
}

// 1 << l in lane l.
template <int W>
FASTAGG_INLINE Vec<int32_t, W> lane_flags() {
  Vec<int32_t, W> flags;
  for (int l = 0; l < W; ++l) flags[l] = 1 << l;
  return flags;
}

// -1 in the lanes of those clients in [i, i + W) that are in the set and have been scored, 0 in the
// others.
template <int W, class Count>
FASTAGG_INLINE Vec<int32_t, W> scored_lanes(const Count* counts, const uint8_t* bits, int64_t i) {
  const Vec<int32_t, W> n = __builtin_convertvector(load<W>(counts + i), Vec<int32_t, W>);
  return (((Vec<int32_t, W>{} + lane_bits<W>(bits, i)) & lane_flags<W>()) != 0) & (n > 0);
}

template <int W>
FASTAGG_INLINE int32_t any_bits(Vec<int32_t, W> lanes) {
  int32_t parts[W], all = 0;
  std::memcpy(parts, &lanes, sizeof lanes);
  for (int32_t part : parts) all |= part;
  return all;
}

// *result = the client of the highest score among those in the set that have been scored, the
// lowest on ties; -1 if there is none.
struct BestScored {
  template <int kVector, class Count>
  FASTAGG_INLINE static void run(const float* scores, const Count* counts, const uint8_t* bits,
                                 int64_t K, int64_t* result) {
    constexpr int W = kLanes<kVector>;
    // The loop finds the maximum of each block; only the first block that has the largest maximum
    // is searched for its position.
    constexpr int64_t kBlock = 256;
    const auto scored = [&](int64_t i) { return counts[i] > 0 && bit(bits, i); };
    float best = -INFINITY;
    int64_t block = -1;  // where the first block with the best begins
    int64_t begin = 0;
    for (; begin + W <= K; begin += kBlock) {
      const int64_t end = std::min(begin + kBlock, K);
      Vec<float, W> highest = Vec<float, W>{} - INFINITY;
      Vec<int32_t, W> found = {};
      int64_t i = begin;
      for (; i + W <= end; i += W) {
        const auto lanes = scored_lanes<W>(counts, bits, i);
        const auto score = load<W>(scores + i);
        highest = (lanes & (score > highest)) ? score : highest;
        found |= lanes;
      }
      float values[W];
      std::memcpy(values, &highest, sizeof highest);
      float top = -INFINITY;
      for (float value : values) top = value > top ? value : top;
      bool some = any_bits<W>(found) != 0;
      for (; i < end; ++i)
        if (scored(i)) {
          some = true;
          top = scores[i] > top ? scores[i] : top;
        }
      if (some && (block < 0 || top > best)) {
        best = top;
        block = begin;
      }
    }
    for (; begin < K; ++begin)  // fewer than W
      if (scored(begin) && (block < 0 || scores[begin] > best)) {
        best = scores[begin];
        block = begin;
      }
    *result = -1;
    if (block < 0) return;
    for (int64_t i = block; i < std::min(block + kBlock, K); ++i)
      if (scores[i] == best && scored(i)) {
        *result = i;
        return;
      }
  }
};

// Clears the bits of the clients that have been scored and are `threshold` or more below `highest`.
struct Remove {
  template <int kVector, class Count>
  FASTAGG_INLINE static void run(uint8_t* bits, const float* scores, const Count* counts, int64_t K,
                                 double highest, double threshold) {
    constexpr int W = kLanes<kVector>;
    int64_t i = 0;
    for (; i + W <= K; i += W) {
      const auto gap = highest - load_double<W>(scores + i);
      const auto far = __builtin_convertvector(gap >= threshold, Vec<int32_t, W>);
      const int32_t removed = any_bits<W>(far & scored_lanes<W>(counts, bits, i) & lane_flags<W>());
      bits[i / 8] = static_cast<uint8_t>(bits[i / 8] & ~(removed << (i % 8)));
    }
    for (; i < K; ++i)
      if (counts[i] > 0 && highest - static_cast<double>(scores[i]) >= threshold)
        clear_bit(bits, i);
  }
};

// --- all rows ---------------------------------------------------------------------------------

// Calls body(k, row k of scores, row k of counts in their type, scratch bits of this worker) for
// each client k.
template <class Body>
void for_rows(const float* scores, Counts counts, int64_t K, const Parallel& parallel,
              const Body& body) {
  const int64_t bytes = packed_bytes(K);
  const Parallel team = parallel.for_work(K * K * 8);
  const Scratch scratch(team.workers * bytes);
  team.for_each(K, [&](int64_t k, int worker) {
    uint8_t* bits = scratch.as<uint8_t>() + worker * bytes;
    if (counts.is_short)
      body(k, scores + k * K, static_cast<const int16_t*>(counts.data) + k * K, bits);
    else
      body(k, scores + k * K, static_cast<const int32_t*>(counts.data) + k * K, bits);
  });
}

}  // namespace

void select_friends(const float* scores, Counts counts, const uint8_t* active, Flags candidates,
                    int64_t K, int64_t* friends, const Parallel& parallel) {
  const Isa isa = current_isa();
  const Scratch packed(packed_bytes(K));
  auto* active_bits = packed.as<uint8_t>();
  pack(active, K, active_bits);
  for_rows(scores, counts, K, parallel, [&](int64_t k, const float* r, const auto* n, auto* bits) {
    if (active[k]) {
      friends[k] = k;
      return;
    }
    read_row(candidates, k, K, bits);
    for (int64_t b = 0; b < packed_bytes(K); ++b) bits[b] &= active_bits[b];
    dispatch<BestScored>(isa, r, n, bits, K, friends + k);
  });
}

void eliminate(uint8_t* candidates, bool packed, const float* scores, Counts counts, int64_t K,
               double threshold, const Parallel& parallel) {
  const Isa isa = current_isa();
  for_rows(scores, counts, K, parallel, [&](int64_t k, const float* r, const auto* n, auto* bits) {
    read_row({candidates, packed}, k, K, bits);
    const bool self = bit(bits, k);
    clear_bit(bits, k);
    int64_t best = -1;
    dispatch<BestScored>(isa, r, n, bits, K, &best);
    if (best < 0) return;
    dispatch<Remove>(isa, bits, r, n, K, static_cast<double>(r[best]), threshold);
    for (int64_t kept : {best, self ? k : best})
      bits[kept / 8] = static_cast<uint8_t>(bits[kept / 8] | 1u << (kept % 8));
    if (packed)
      std::copy_n(bits, packed_bytes(K), candidates + k * packed_bytes(K));
    else
      unpack(bits, K, candidates + k * K);
  });
}

}  // namespace fastagg::cpu
