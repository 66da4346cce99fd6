// SPDX-License-Identifier: Apache-2.0
// The arithmetic of one pair of clients, for kernels that give a pair to a thread.
#pragma once

#include <cmath>
#include <cstdint>

#include "../host_device.h"

namespace fastagg::cuda {

// (cos + 1) / 2, from an inner product and two squared norms; 0.5 if one of the norms is zero.
FASTAGG_HD double cosine_score(double product, double square_a, double square_b, bool same) {
  const double norms = std::sqrt(square_a) * std::sqrt(square_b);
  if (same && square_a > 0.0) return 1.0;
  // Beside an infinite norm, 0 makes NaN of the product of the norms.
  const bool zero = square_a == 0.0 || square_b == 0.0 || norms == 0.0;
  const double cosine = zero ? 0.0 : product / norms;
  return ((cosine < -1.0 ? -1.0 : cosine > 1.0 ? 1.0 : cosine) + 1.0) / 2.0;
}

// -|a - b|, from the inner product and the squared norms of a and b.
FASTAGG_HD double distance_score(double product, double square_a, double square_b, bool same) {
  const double square = square_a + square_b - 2.0 * product;
  return same || square < 0.0 ? 0.0 : -std::sqrt(square);
}

// The mean of `count` values: `fresh` and count - 1 values whose mean is `mean` (FL-FDMS eq. 15).
FASTAGG_HD float moved_mean(float mean, double fresh, int64_t count) {
  const double old = mean;
  return static_cast<float>(old + (fresh - old) / static_cast<double>(count));
}

// A client and its score. The better of two has the higher score; on ties, the lower id.
struct Ranked {
  float score;
  int64_t client;  // -1: none
};

FASTAGG_HD Ranked better(Ranked a, Ranked b) {
  if (a.client < 0) return b;
  if (b.client < 0) return a;
  if (a.score != b.score) return a.score > b.score ? a : b;
  return a.client < b.client ? a : b;
}

// Whether elimination removes a candidate with this score: `threshold` or more below the best.
FASTAGG_HD bool far_below(float best, float score, double threshold) {
  return static_cast<double>(best) - static_cast<double>(score) >= threshold;
}

}  // namespace fastagg::cuda
