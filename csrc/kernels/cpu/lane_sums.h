// SPDX-License-Identifier: Apache-2.0
// Sums over the lanes of many vectors at once.
#pragma once

#include <array>

#include "simd.h"

namespace fastagg::cpu {

// A tree that sums the lanes of many vectors at once: every level folds each vector's lanes in half
// and puts the halves of two vectors side by side. Both are treated alike, so that a dot product
// has the same bits wherever it stands in its tile. Levels down to four lanes a sum are in float32;
// the last two, whose rounding would be the largest, in float64. All shuffles are of 128-bit parts
// or inside of them, which take one cycle.
//
// The indices into (a, b) that position p of a level takes; its other operand is so many further.
constexpr int fold_index(int W, int half, int p) {
  const int segments = W / (2 * half), segment = p / half;
  const int source = segment < segments ? 0 : W;
  return source + segment % segments * 2 * half + p % half;
}
// From the lower and the upper half of a vector of W floats: neighbours.
constexpr int pair_index(int W, int p) {
  return p % 2 == 0 ? p : W / 2 + p - 1;
}
// From two vectors of N such sums of pairs: neighbouring parts, or elements if that is all.
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

// W vectors -> four, with four lanes of each.
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

// N accumulators of W lanes -> kSlots running float64 sums (N of them used), in the tree's order.
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
        double* out = sums + g * W + i * kHalf;
        const auto a = add_pairs<W>(v[2 * i], positions), b = add_pairs<W>(v[2 * i + 1], positions);
        store<kHalf>(out, load<kHalf>(out) + add_last<kHalf>(a, b, positions));
      });
    });
  }

  // The slot that holds accumulator n: the tree is run on names.
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
