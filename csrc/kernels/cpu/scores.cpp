// SPDX-License-Identifier: Apache-2.0
#include "../scores.h"

#include <cmath>
#include <limits>

#include "scratch.h"
#include "simd.h"

namespace fastagg::cpu {

namespace {

struct CosineRow {
  template <int W>
  FASTAGG_INLINE static void run(const double* gram_row, const double* norms, int64_t i, int64_t S,
                                 double* out) {
    for (int64_t j = 0; j < S; ++j) {
      const double product = norms[i] * norms[j];
      // Beside an infinite norm, 0 makes NaN of the product.
      const bool zero = norms[i] == 0.0 || norms[j] == 0.0 || product == 0.0;
      const double ratio = gram_row[j] / (zero ? 1.0 : product);
      const double cosine = zero ? 0.0 : ratio;
      out[j] = (std::min(std::max(cosine, -1.0), 1.0) + 1.0) / 2.0;
    }
    if (norms[i] > 0.0) out[i] = 1.0;
  }
};

struct DistanceRow {
  template <int W>
  FASTAGG_INLINE static void run(const double* gram_row, const double* squares, int64_t i,
                                 int64_t S, double* out) {
    for (int64_t j = 0; j < S; ++j)
      out[j] = -std::sqrt(std::max(squares[i] + squares[j] - 2.0 * gram_row[j], 0.0));
    out[i] = 0.0;
  }
};

// Computes each row of `out` from the row of `gram` and of_square(entry) of the whole diagonal.
template <class Row, class OfSquare>
void for_rows(const double* gram, int64_t S, double* out, const Parallel& parallel,
              const OfSquare& of_square) {
  const Isa isa = current_isa();
  const Scratch scratch(S * int64_t{sizeof(double)});
  auto* diagonal = scratch.as<double>();
  for (int64_t i = 0; i < S; ++i) diagonal[i] = of_square(gram[i * S + i]);
  parallel.for_work(S * S * 16).for_each(S, [&](int64_t i, int) {
    dispatch<Row>(isa, gram + i * S, static_cast<const double*>(diagonal), i, S, out + i * S);
  });
}

}  // namespace

void cosine_scores(const double* gram, int64_t S, double* out, const Parallel& parallel) {
  for_rows<CosineRow>(gram, S, out, parallel, [](double square) { return std::sqrt(square); });
}

void distance_scores(const double* gram, int64_t S, double* out, const Parallel& parallel) {
  for_rows<DistanceRow>(gram, S, out, parallel, [](double square) { return square; });
}

namespace {

constexpr int64_t kPairs = 256;  // pairs gathered together, 8 KB, so that divisions are vectorized

// Row i of round_scores updates row clients[i] of scores and counts.
struct UpdateRow {
  template <int W, class Count>
  FASTAGG_INLINE static void run(float* score_row, Count* count_row, const double* round_row,
                                 const int64_t* clients, int64_t i, int64_t S,
                                 const uint8_t* pairs) {
    constexpr Count kMost = std::numeric_limits<Count>::max();
    int64_t ids[kPairs];
    double mean[kPairs], fresh[kPairs], count[kPairs];
    for (int64_t begin = 0; begin < S; begin += kPairs) {
      const int64_t end = std::min(begin + kPairs, S);
      int64_t n = 0;
      for (int64_t j = begin; j < end; ++j) {
        ids[n] = clients[j];
        fresh[n] = round_row[j];
        n += j != i && (!pairs || pairs[j]);
      }
      for (int64_t p = 0; p < n; ++p) {
        Count& known = count_row[ids[p]];
        known = static_cast<Count>(known + (known < kMost));
        count[p] = known;
        mean[p] = score_row[ids[p]];
      }
      for (int64_t p = 0; p < n; ++p) mean[p] += (fresh[p] - mean[p]) / count[p];
      for (int64_t p = 0; p < n; ++p) score_row[ids[p]] = static_cast<float>(mean[p]);
    }
  }
};

}  // namespace

template <class Count>
void update_scores(float* scores, Count* counts, int64_t K, const double* round_scores,
                   const int64_t* clients, int64_t S, const uint8_t* pairs,
                   const Parallel& parallel) {
  const Isa isa = current_isa();
  parallel.for_work(S * S * 32).for_each(S, [&](int64_t i, int) {
    dispatch<UpdateRow>(isa, scores + clients[i] * K, counts + clients[i] * K, round_scores + i * S,
                        clients, i, S, pairs ? pairs + i * S : nullptr);
  });
}

template void update_scores(float*, int16_t*, int64_t, const double*, const int64_t*, int64_t,
                            const uint8_t*, const Parallel&);
template void update_scores(float*, int32_t*, int64_t, const double*, const int64_t*, int64_t,
                            const uint8_t*, const Parallel&);

}  // namespace fastagg::cpu
