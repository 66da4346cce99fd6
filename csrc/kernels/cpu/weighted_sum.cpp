// SPDX-License-Identifier: Apache-2.0
#include "../weighted_sum.h"

#include <cmath>
#include <type_traits>
#include <vector>

#include "gram_columns.h"
#include "magnitude.h"
#include "row_blocks.h"
#include "row_peaks.h"
#include "scratch.h"
#include "weighted_sum_block.h"

namespace fastagg::cpu {
namespace {

// Adds G rows to float64 sums, from group to group of rows: the first group sets `sums`, and the
// last one goes straight to `out`. So few rows, which are one or two groups, cost little more than
// their own reading.
//   out, sums   // [n]; sums is not used if the group is the first and the last
template <int W, int G, bool kFirst, bool kLast, bool kBeta, class T>
FASTAGG_INLINE void add_group(float* __restrict out, const T* const* rows, const float* weights,
                              double factor, double beta, int64_t column, int64_t n,
                              double* __restrict sums) {
  sum_group<W, G>(rows, weights, column, n, [&](int64_t k, float group) FASTAGG_INLINE_LAMBDA {
    const double sum = (kFirst ? 0.0 : sums[k]) + static_cast<double>(group);
    if constexpr (!kLast)
      sums[k] = sum;
    else if constexpr (kBeta)
      out[k] = static_cast<float>(beta * out[k] + factor * sum);
    else
      out[k] = static_cast<float>(factor * sum);
  });
}

// Calls body(size, s, first, last) with constants for each group of S >= 1 rows: rows s to
// s + size - 1. first, last: whether it is the first group, and the last one.
template <class Body>
FASTAGG_INLINE void for_groups(int64_t S, const Body& body) {
  int64_t s = 0;
  const auto call = [&](auto size) FASTAGG_INLINE_LAMBDA {
    const bool last = s + size == S;
    if (s == 0 && last) body(size, s, std::true_type(), std::true_type());
    if (s == 0 && !last) body(size, s, std::true_type(), std::false_type());
    if (s > 0 && last) body(size, s, std::false_type(), std::true_type());
    if (s > 0 && !last) body(size, s, std::false_type(), std::false_type());
    s += size;
  };
  while (s + kGroup <= S) call(std::integral_constant<int, kGroup>());
  while (s + 4 <= S) call(std::integral_constant<int, 4>());
  while (s + 2 <= S) call(std::integral_constant<int, 2>());
  while (s < S) call(std::integral_constant<int, 1>());
}

//   to       // [n]
//   memory   // [n] scratch
struct WeightedSum {
  template <int W, class T>
  FASTAGG_INLINE static void run(float* to, const T* const* rows, int64_t S, const float* weights,
                                 double factor, double beta, int64_t column, int64_t n,
                                 double* memory) {
    if (S == 0) {
      for (int64_t k = 0; k < n; ++k)
        to[k] = beta == 0.0 ? 0.0f : static_cast<float>(beta * to[k] + 0.0);
      return;
    }
    for_groups(S, [&](auto size, int64_t s, auto first, auto last) FASTAGG_INLINE_LAMBDA {
      constexpr int G = decltype(size)::value;
      constexpr bool kFirst = decltype(first)::value, kLast = decltype(last)::value;
      const auto add = [&](auto has_beta) FASTAGG_INLINE_LAMBDA {
        add_group<W, G, kFirst, kLast, decltype(has_beta)::value>(to, rows + s, weights + s, factor,
                                                                  beta, column, n, memory);
      };
      if constexpr (kLast) {
        if (beta != 0.0) {
          add(std::true_type());
          return;
        }
      }
      add(std::false_type());
    });
  }
};

}  // namespace

void weighted_sum_block(Isa isa, float* out, const float* const* rows, int64_t S,
                        const ScaledWeights& weights, double beta, int64_t column, int64_t n) {
  alignas(64) double sums[kMaxBlock];
  dispatch<WeightedSum>(isa, out + column, rows, S, weights.quotients.data(), weights.factor, beta,
                        column, n, &sums[0]);
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
    dispatch<WeightedSum>(isa, out + column, rows, S, scaled.quotients.data(), scaled.factor, beta,
                          column, std::min(columns, d - column),
                          sums.as<double>() + worker * columns);
  });
}

namespace {

// Columns of a part of a block, whose sum stays in L1 until the parameters have moved.
constexpr int64_t kPart = 1024;

// Copies n parameters, and raises the largest magnitudes in them and in a sum.
//   params, sum   // [n]
//   before        // [n], changed
//   peaks         // [2] magnitude bits
template <int W>
FASTAGG_INLINE void keep_params(const float* params, const float* sum, float* __restrict before,
                                int64_t n, int32_t* peaks) {
  Magnitude<W> known, added;
  for (int64_t k = 0; k < n; k += kStep) {
    const int64_t count = std::min(kStep, n - k);
    known.add(params + k, count);
    added.add(sum + k, count);
    std::copy_n(params + k, count, before + k);
  }
  peaks[0] = std::max(peaks[0], known.bits());
  peaks[1] = std::max(peaks[1], added.bits());
}

// params = once * params + the product of a rate and of the weighted sum of S rows, for n
// columns from `column` on. Parameters are read and written beside the last group of rows: as
// streams of their own they would wait for memory.
//   before   // [n], changed: the old parameters
//   peaks    // [2] magnitude bits, raised: of the old parameters, of the sum
//   memory   // [n] scratch
struct MoveAlong {
  template <int W, class T>
  FASTAGG_INLINE static void run(float* params, float* before, const T* const* rows, int64_t S,
                                 const ScaledWeights* weights, const ScaledWeights* rate,
                                 double once, int64_t column, int64_t n, int32_t* peaks,
                                 double* memory) {
    const float* const w = weights->quotients.data();
    if (S == 0) {
      const float zeros[kPart] = {};
      for (int64_t done = 0; done < n; done += kPart)
        keep_params<W>(params + done, zeros, before + done, std::min(kPart, n - done), peaks);
    }
    for_groups(S, [&](auto size, int64_t s, auto first, auto last) FASTAGG_INLINE_LAMBDA {
      constexpr int G = decltype(size)::value;
      constexpr bool kFirst = decltype(first)::value;
      if constexpr (!decltype(last)::value) {
        add_group<W, G, kFirst, false, false>(nullptr, rows + s, w + s, 0.0, 0.0, column, n,
                                              memory);
      } else {
        for (int64_t done = 0; done < n; done += kPart) {
          const int64_t count = std::min(kPart, n - done);
          alignas(64) float sum[kPart];
          add_group<W, G, kFirst, true, false>(sum, rows + s, w + s, weights->factor, 0.0,
                                               column + done, count, memory + done);
          keep_params<W>(params + done, sum, before + done, count, peaks);
          const float* const one = sum;
          add_group<W, 1, true, true, true>(params + done, &one, rate->quotients.data(),
                                            rate->factor, once, 0, count, memory);
        }
      }
    });
  }
};

}  // namespace

template <class T>
bool apply_weighted_sum(float* params, float* before, const T* const* rows, int64_t S, int64_t d,
                        const double* weights, double lr, const SumLimits& limits,
                        const Parallel& parallel) {
  const Isa isa = current_isa();
  const ScaledWeights scaled(weights, S), rate(&lr, 1);
  const Parallel team = parallel.for_work((S + 3) * d * int64_t{sizeof(T)});
  const int64_t columns = block_columns(d, team.workers);
  const Scratch sums(team.workers * columns * int64_t{sizeof(double)});
  const RowPeaks peaks(2, team);
  // The compiler must not know that the parameters are multiplied by 1: it would round the other
  // product in another way than weighted_sum does.
  double once = 1.0;
  asm volatile("" : "+m"(once));
  for_blocks(d, columns, team, [&](int64_t column, int64_t n, int worker) {
    dispatch<MoveAlong>(isa, params + column, before + column, rows, S, &scaled, &rate, once,
                        column, n, peaks.of(worker), sums.as<double>() + worker * columns);
  });
  float largest[2];
  peaks.write(largest);
  const double known = largest[0], added = largest[1];
  if (std::isfinite(known) && std::isfinite(added) && added <= limits.sum &&
      known + lr * added <= limits.params)
    return true;
  for_blocks(d, columns, team, [&](int64_t column, int64_t n, int) {
    std::copy_n(before + column, n, params + column);
  });
  return false;
}

template bool apply_weighted_sum(float*, float*, const float* const*, int64_t, int64_t,
                                 const double*, double, const SumLimits&, const Parallel&);
template bool apply_weighted_sum(float*, float*, const Bfloat16* const*, int64_t, int64_t,
                                 const double*, double, const SumLimits&, const Parallel&);
template bool apply_weighted_sum(float*, float*, const Half* const*, int64_t, int64_t,
                                 const double*, double, const SumLimits&, const Parallel&);

template void weighted_sum(float*, const float* const*, int64_t, int64_t, const double*, double,
                           const Parallel&);
template void weighted_sum(float*, const Bfloat16* const*, int64_t, int64_t, const double*, double,
                           const Parallel&);
template void weighted_sum(float*, const Half* const*, int64_t, int64_t, const double*, double,
                           const Parallel&);

}  // namespace fastagg::cpu
