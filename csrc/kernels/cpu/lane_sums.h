// SPDX-License-Identifier: Apache-2.0
// Adds up the lanes of many vectors together.
#pragma once

#include <array>

#include "simd.h"

namespace fastagg::cpu {

// A tree adds up the lanes of many vectors together. Each level takes two vectors, adds the two
// halves of each, and puts the two results side by side into one vector. Every vector goes through
// the same additions, so a dot product has the same bits at every position in its tile. Levels down
// to four lanes for each sum are float32; the last two levels, whose rounding would be the largest,
// are float64. All shuffles move 128-bit parts or stay inside them, which takes one cycle.
//
// Level `half` of the tree: position p of the result of two vectors (a, b) of W lanes is the sum of
// the elements of (a, b) at fold_index and at fold_index + half.
constexpr int fold_index(int W, int half, int p) {
  const int parts = W / (2 * half), part = p / half;
  const int source = part < parts ? 0 : W;
  return source + part % parts * 2 * half + p % half;
}
// First float64 level: sums of neighbours in the lower and the upper half of a vector of W floats.
constexpr int pair_index(int W, int p) {
  return p % 2 == 0 ? p : W / 2 + p - 1;
}
// Last level: sums in two vectors of N such sums, at last_index and last_distance further.
constexpr int last_index(int N, int p) {
  if (N == 2) return p * N;
  const int part = p / 2, parts = N / 4;
  return part / parts * N + part % parts * 4 + p % 2;
}
constexpr int last_distance(int N) {
  return N == 2 ? 1 : 2;
}

template <int W, int kHalf, int... P>
FASTAGG_INLINE Vec<float, W> fold(Vec<float, W> a, Vec<float, W> b,
                                  std::integer_sequence<int, P...>) {
  return __builtin_shufflevector(a, b, fold_index(W, kHalf, P)...) +
         __builtin_shufflevector(a, b, (fold_index(W, kHalf, P) + kHalf)...);
}

// W vectors become four, in which each of the W sums has four lanes left.
template <int W, int kHalf>
FASTAGG_INLINE void fold_to_four(Vec<float, W>* v) {
  if constexpr (kHalf >= 4) {
    unroll<kHalf>([&](auto i) FASTAGG_INLINE_LAMBDA {
      v[i] = fold<W, kHalf>(v[2 * i], v[2 * i + 1], std::make_integer_sequence<int, W>());
    });
    fold_to_four<W, kHalf / 2>(v);
  }
}

template <int W, int... P>
FASTAGG_INLINE Vec<double, W / 2> add_pairs(Vec<float, W> v, std::integer_sequence<int, P...>) {
  float lanes[W];
  store<W>(lanes, v);
  const auto lower = load_double<W / 2>(lanes), upper = load_double<W / 2>(lanes + W / 2);
  return __builtin_shufflevector(lower, upper, pair_index(W, P)...) +
         __builtin_shufflevector(lower, upper, (pair_index(W, P) + 1)...);
}

template <int N, int... P>
FASTAGG_INLINE Vec<double, N> add_last(Vec<double, N> a, Vec<double, N> b,
                                       std::integer_sequence<int, P...>) {
  return __builtin_shufflevector(a, b, last_index(N, P)...) +
         __builtin_shufflevector(a, b, (last_index(N, P) + last_distance(N))...);
}

// Adds N accumulators of W lanes to kSlots float64 sums, of which N are used, in the tree's order.
template <int W, int N>
struct LaneSums {
  static constexpr int kGroups = (N + W - 1) / W;
  static constexpr int kSlots = kGroups * W;
  static constexpr int kHalf = W / 2;

  FASTAGG_INLINE static void add(const Vec<float, W>* accumulators, double* sums) {
    constexpr auto positions = std::make_integer_sequence<int, kHalf>();
    unroll<kGroups>([&](auto g) FASTAGG_INLINE_LAMBDA {
      Vec<float, W> v[W];
      unroll<W>([&](auto i) FASTAGG_INLINE_LAMBDA {
        constexpr int n = g * W + i;
        if constexpr (n < N)
          v[i] = accumulators[n];
        else
          v[i] = Vec<float, W>{};
      });
      fold_to_four<W, kHalf>(v);
      unroll<2>([&](auto i) FASTAGG_INLINE_LAMBDA {
        if constexpr (g * W + i * kHalf < N) {  // else there is no sum in this half of a group
          double* out = sums + g * W + i * kHalf;
          const auto a = add_pairs<W>(v[2 * i], positions),
                     b = add_pairs<W>(v[2 * i + 1], positions);
          store<kHalf>(out, load<kHalf>(out) + add_last<kHalf>(a, b, positions));
        }
      });
    });
  }

  // The slot of each accumulator: runs the tree on their numbers instead of their values.
  static constexpr std::array<int, N> slots() {
    std::array<int, N> slot{};
    for (int g = 0; g < kGroups; ++g) {
      int names[W][W] = {};
      for (int i = 0; i < W; ++i)
        for (int p = 0; p < W; ++p) names[i][p] = g * W + i;
      for (int half = kHalf; half >= 4; half /= 2)
        for (int i = 0; i < half; ++i) {
          int folded[W] = {};
          for (int p = 0; p < W; ++p) {
            const int from = fold_index(W, half, p);
            folded[p] = names[2 * i + from / W][from % W];
          }
          for (int p = 0; p < W; ++p) names[i][p] = folded[p];
        }
      for (int p = 0; p < W; ++p) {
        const int from = last_index(kHalf, p % kHalf);
        const int name = names[p / kHalf * 2 + from / kHalf][pair_index(W, from % kHalf)];
        if (name < N) slot[name] = g * W + p;
      }
    }
    return slot;
  }
};

}  // namespace fastagg::cpu
