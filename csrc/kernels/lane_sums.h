// SPDX-License-Identifier: Apache-2.0
// Sums over the lanes of many vectors at once.
#pragma once

#include <array>

#include "simd.h"

namespace fastagg::cpu {

// One level of a tree that sums the lanes of many vectors at once: folds each vector's lanes in
// half and puts the halves of a and b side by side. Both are treated alike, so that a dot product
// has the same bits wherever it stands in its tile. In 128-bit parts, these are one-cycle shuffles.
constexpr int fold_index(int W, int half, int position) {
  if (half >= 4) {
    const int segments = W / (2 * half), segment = position / half;
    const int source = segment < segments ? 0 : W;
    return source + (segment % segments) * 2 * half + position % half;
  }
  const int lane = position / 4 * 4, q = position % 4;
  const int source = q < 2 ? 0 : W;
  return source + lane + (half == 2 ? q % 2 : q % 2 * 2);
}

template <int W, int kHalf, int... P>
FASTAGG_INLINE Vec<float, W> fold(Vec<float, W> a, Vec<float, W> b,
                                  std::integer_sequence<int, P...>) {
  return __builtin_shufflevector(a, b, fold_index(W, kHalf, P)...) +
         __builtin_shufflevector(a, b, (fold_index(W, kHalf, P) + kHalf)...);
}

// All levels but the last: each pair of neighbouring lanes of v[0] and v[1] belongs to one vector.
template <int W, int kHalf>
FASTAGG_INLINE void fold_to_pairs(Vec<float, W>* v) {
  unroll<kHalf>([&](auto i) FASTAGG_INLINE_LAMBDA {
    v[i] = fold<W, kHalf>(v[2 * i], v[2 * i + 1], std::make_integer_sequence<int, W>());
  });
  if constexpr (kHalf > 2) fold_to_pairs<W, kHalf / 2>(v);
}

// The last level, in float64, where its rounding would be the largest of all: the sums of
// neighbouring lanes of v, those of its lower and of its upper half in turn.
constexpr int pair_index(int W, int position) {
  return position % 2 == 0 ? position : W / 2 + position - 1;
}
template <int W, int... P>
FASTAGG_INLINE Vec<double, W / 2> add_pairs(Vec<float, W> v, std::integer_sequence<int, P...>) {
  float lanes[W];
  store<W>(lanes, v);
  const auto lower = load_double<W / 2>(lanes), upper = load_double<W / 2>(lanes + W / 2);
  return __builtin_shufflevector(lower, upper, pair_index(W, P)...) +
         __builtin_shufflevector(lower, upper, (pair_index(W, P) + 1)...);
}

// N accumulators of W lanes -> kSlots running float64 sums (N of them used), in the tree's order.
template <int W, int N>
struct LaneSums {
  static constexpr int kGroups = (N + W - 1) / W;
  static constexpr int kSlots = kGroups * W;

  FASTAGG_INLINE static void add(const Vec<float, W>* accumulators, double* sums) {
    unroll<kGroups>([&](auto g) FASTAGG_INLINE_LAMBDA {
      Vec<float, W> v[W];
      unroll<W>([&](auto i) FASTAGG_INLINE_LAMBDA {
        constexpr int n = g * W + i;
        if constexpr (n < N)
          v[i] = accumulators[n];
        else
          v[i] = Vec<float, W>{};
      });
      fold_to_pairs<W, W / 2>(v);
      unroll<2>([&](auto i) FASTAGG_INLINE_LAMBDA {
        double* out = sums + g * W + i * (W / 2);
        store<W / 2>(
            out, load<W / 2>(out) + add_pairs<W>(v[i], std::make_integer_sequence<int, W / 2>()));
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
      for (int half = W / 2; half > 1; half /= 2)
        for (int i = 0; i < half; ++i) {
          int folded[W] = {};
          for (int p = 0; p < W; ++p) {
            const int from = fold_index(W, half, p);
            folded[p] = from < W ? names[2 * i][from] : names[2 * i + 1][from - W];
          }
          for (int p = 0; p < W; ++p) names[i][p] = folded[p];
        }
      for (int p = 0; p < W; ++p) {
        const int name = names[p / (W / 2)][pair_index(W, p % (W / 2))];
        if (name < N) slot[name] = g * W + p;
      }
    }
    return slot;
  }
};

}  // namespace fastagg::cpu
