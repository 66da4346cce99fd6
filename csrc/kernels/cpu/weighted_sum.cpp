// SPDX-License-Identifier: Apache-2.0
#include "../weighted_sum.h"

#include <vector>

#include "gram_columns.h"
#include "row_blocks.h"
#include "scratch.h"
#include "weighted_sum_block.h"

namespace fastagg::cpu {
namespace {

// sums[k] += sum_g weights[g] * rows[g][column + k] for k in [0, n).
template <int W, int G, class T>
FASTAGG_INLINE void add_group(const T* const* rows, const float* weights, int64_t column, int64_t n,
                              double* __restrict sums) {
  sum_group<W, G>(rows, weights, column, n, [&](int64_t k, float sum) FASTAGG_INLINE_LAMBDA {
    sums[k] += static_cast<double>(sum);
  });
}

//   memory   // [n] scratch
struct WeightedSum {
  template <int W, class T>
  FASTAGG_INLINE static void run(float* out, const T* const* rows, int64_t S, const float* weights,
                                 double factor, double beta, int64_t column, int64_t n,
                                 double* memory) {
    double* __restrict sums = memory;
    std::fill_n(sums, n, 0.0);
    int64_t s = 0;
    for (; s + kGroup <= S; s += kGroup)
      add_group<W, kGroup>(rows + s, weights + s, column, n, sums);
    for (; s + 4 <= S; s += 4) add_group<W, 4>(rows + s, weights + s, column, n, sums);
    for (; s + 2 <= S; s += 2) add_group<W, 2>(rows + s, weights + s, column, n, sums);
    for (; s < S; ++s) add_group<W, 1>(rows + s, weights + s, column, n, sums);
    float* to = out + column;
    if (beta == 0.0)
      for (int64_t k = 0; k < n; ++k) to[k] = static_cast<float>(factor * sums[k]);
    else
      for (int64_t k = 0; k < n; ++k) to[k] = static_cast<float>(beta * to[k] + factor * sums[k]);
  }
};

}  // namespace

void weighted_sum_block(Isa isa, float* out, const float* const* rows, int64_t S,
                        const ScaledWeights& weights, double beta, int64_t column, int64_t n) {
  alignas(64) double sums[kMaxBlock];
  dispatch<WeightedSum>(isa, out, rows, S, weights.quotients.data(), weights.factor, beta, column,
                        n, &sums[0]);
}

template <class T>
void weighted_sum(float* out, const T* const* rows, int64_t S, int64_t d, const double* weights,
                  double beta, const Parallel& parallel) {
  const Isa isa = current_isa();
  const ScaledWeights scaled(weights, S);
  const Parallel team = parallel.for_work((S + 2) * d * int64_t{sizeof(T)});
  // Start at the end of d: rows are often summed right after their Gram matrix, which starts at the
  // beginning, so a cache still holds the last columns.
  const int64_t columns = block_columns(d, team.workers), blocks = ceil_div(d, columns);
  const Scratch sums(team.workers * columns * int64_t{sizeof(double)});  // stacks may be small
  team.for_each(blocks, [&](int64_t task, int worker) {
    const int64_t column = (blocks - 1 - task) * columns;
    dispatch<WeightedSum>(isa, out, rows, S, scaled.quotients.data(), scaled.factor, beta, column,
                          std::min(columns, d - column), sums.as<double>() + worker * columns);
  });
}

template void weighted_sum(float*, const float* const*, int64_t, int64_t, const double*, double,
                           const Parallel&);
template void weighted_sum(float*, const Bfloat16* const*, int64_t, int64_t, const double*, double,
                           const Parallel&);
template void weighted_sum(float*, const Half* const*, int64_t, int64_t, const double*, double,
                           const Parallel&);

}  // namespace fastagg::cpu
