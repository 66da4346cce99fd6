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

// Adds a group of A rows and, unless B is 0, one of B rows to float64 sums, in one pass. The first
// pass sets `sums`, and the last one goes straight to `out`. So few rows, which are one or two
// passes, cost little more than their own reading. Calls then(begin, count) after each step of
// columns, as for_even_steps does.
//   out    // [n]
//   step   // [kStep], used with kReused: the results of one step, instead of `out`. `then` reads
//          // them, so it is not __restrict
//   sums   // [n]; not used if the pass is the first and the last
template <int W, int A, int B, bool kFirst, bool kLast, bool kBeta, bool kReused, class Then>
FASTAGG_INLINE void add_groups(float* __restrict out, float* step, const float* const* rows,
                               const float* weights, double factor, double beta, int64_t column,
                               int64_t n, double* __restrict sums, const Then& then) {
  constexpr int G = A + B;
  const float* row[G];
  float w[G];
  for (int g = 0; g < G; ++g) {
    row[g] = rows[g] + column;
    w[g] = weights[g];
  }
  for_even_steps<W>(n, [&](int64_t begin, auto count) FASTAGG_INLINE_LAMBDA {
    float* const to = kReused ? step : out + begin;
    FASTAGG_WHOLE_VECTORS
    for (int64_t k = 0; k < count; ++k) {
      const auto x = [&](int g) FASTAGG_INLINE_LAMBDA { return row[g][begin + k]; };
      double sum = kFirst ? 0.0 : sums[begin + k];
      sum += static_cast<double>(sum_of_products<W, A>(w, x));
      if constexpr (B > 0) {
        const auto second = [&](int g) FASTAGG_INLINE_LAMBDA { return x(A + g); };
        sum += static_cast<double>(sum_of_products<W, B>(w + A, second));
      }
      if constexpr (!kLast)
        sums[begin + k] = sum;
      else if constexpr (kBeta)
        to[k] = static_cast<float>(multiply_add<W>(beta, double{to[k]}, factor * sum));
      else
        to[k] = static_cast<float>(factor * sum);
    }
    then(begin, count);
  });
}

template <int A, int B, bool kFirst, bool kLast, bool kBeta>
struct SumGroups {
  template <int W>
  FASTAGG_INLINE static void run(float* out, const float* const* rows, const float* weights,
                                 double factor, double beta, int64_t column, int64_t n,
                                 double* sums) {
    add_groups<W, A, B, kFirst, kLast, kBeta, false>(out, nullptr, rows, weights, factor, beta,
                                                     column, n, sums,
                                                     [](int64_t, auto) FASTAGG_INLINE_LAMBDA {});
  }
};

// Calls body(A, B, s, first, last) with constants for each pass over S >= 1 rows: over the groups
// of rows s to s + A - 1 and, if B is not 0, of the next B rows. first, last: whether it is the
// first pass, and the last one. If there are two groups of floats, one pass takes both, and their
// sums stay in registers. Passes over two of more groups were no faster: these are many streams.
template <class T, class Body>
FASTAGG_INLINE void for_passes(int64_t S, const Body& body) {
  using std::false_type, std::true_type;
  constexpr std::integral_constant<int, 0> none;
  constexpr std::integral_constant<int, 1> one;
  constexpr std::integral_constant<int, 2> two;
  constexpr std::integral_constant<int, 4> four;
  constexpr std::integral_constant<int, kGroup> whole;
  if constexpr (std::is_same_v<T, float>) {  // code for each type takes long to compile
    const auto both = [&](auto a, auto b)
                          FASTAGG_INLINE_LAMBDA { body(a, b, 0, true_type(), true_type()); };
    if (S == kGroup + kGroup) return both(whole, whole);
    if (S == kGroup + 4) return both(whole, four);
    if (S == kGroup + 2) return both(whole, two);
    if (S == kGroup + 1) return both(whole, one);
    if (S == 4 + 2) return both(four, two);
    if (S == 4 + 1) return both(four, one);
    if (S == 2 + 1) return both(two, one);
  }
  int64_t s = 0;
  const auto add = [&](auto a) FASTAGG_INLINE_LAMBDA {
    const bool last = s + a == S;
    if (s == 0 && last) body(a, none, s, true_type(), true_type());
    if (s == 0 && !last) body(a, none, s, true_type(), false_type());
    if (s > 0 && last) body(a, none, s, false_type(), true_type());
    if (s > 0 && !last) body(a, none, s, false_type(), false_type());
    s += a;
  };
  while (s + kGroup <= S) add(whole);
  while (s + 4 <= S) add(four);
  while (s + 2 <= S) add(two);
  while (s < S) add(one);
}

// Adds n numbers to others, with the bits that the product with a factor of 1 and the sum in
// float64 have: a sum of two floats that was rounded to 53 bits before is the same float, because
// 53 is at least 2 * 24 + 2 (Figueroa 1995). As in an ordered sum, which begins with 0, a sum is
// never -0. With AVX2, the conversions that this saves took a sixth of a pass over ten rows, and
// half of a pass over one.
FASTAGG_INLINE void add_plain(float* to, const float* from, int64_t n) {
  for (int64_t k = 0; k < n; ++k) to[k] += from[k] + 0.0f;
}

struct AddPlain {
  template <int W>
  FASTAGG_INLINE static void run(float* to, const float* from, int64_t n) {
    for_even_steps<W>(n, [&](int64_t begin, auto count)
                             FASTAGG_INLINE_LAMBDA { add_plain(to + begin, from + begin, count); });
  }
};

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
    if constexpr (std::is_same_v<T, float>) {
      if (S == 1 && weights[0] == 1.0f && factor == 1.0 && beta == 1.0)
        return call<W, AddPlain>(to, rows[0] + column, n);
    }
    for_passes<T>(S, [&](auto a, auto b, int64_t s, auto first, auto last) FASTAGG_INLINE_LAMBDA {
      constexpr int A = decltype(a)::value, B = decltype(b)::value;
      constexpr bool kFirst = decltype(first)::value, kLast = decltype(last)::value;
      const auto take = [&](const float* const* x, int64_t from, int64_t begin,
                            int64_t count) FASTAGG_INLINE_LAMBDA {
        const auto add = [&](auto has_beta) FASTAGG_INLINE_LAMBDA {
          call<W, SumGroups<A, B, kFirst, kLast, decltype(has_beta)::value>>(
              to + begin, x, weights + s, factor, beta, from, count, memory + begin);
        };
        if constexpr (kLast) {
          if (beta != 0.0) return add(std::true_type());
        }
        add(std::false_type());
      };
      for_widened<W, A + B>(rows + s, column, n, take);
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

// The largest magnitudes in parameters and in what is added to them.
template <int W>
struct MovePeaks {
  Magnitude<W> known, added;
  FASTAGG_INLINE void raise(int32_t* peaks) const {
    peaks[0] = std::max(peaks[0], known.bits());
    peaks[1] = std::max(peaks[1], added.bits());
  }
};

// Copies n parameters and finds the largest magnitudes in them and in a sum.
//   params, sum   // [n]
//   before        // [n], changed
template <int W>
FASTAGG_INLINE void keep_params(const float* params, const float* sum, float* before, int64_t n,
                                MovePeaks<W>* peaks) {
  peaks->added.add(sum, n);
  int64_t k = 0;
  for (; k + W <= n; k += W) {
    const Vec<float, W> old = load<W>(params + k);
    peaks->known.add(old);
    store<W>(before + k, old);
  }
  for (; k < n; ++k) {
    peaks->known.add(params[k]);
    before[k] = params[k];
  }
}

// The last pass of MoveAlong. Parameters are read and written in each step of columns: as streams
// of their own, even over parts of 4 KB, they would wait for memory.
template <int A, int B, bool kFirst>
struct MoveGroups {
  template <int W>
  FASTAGG_INLINE static void run(float* params, float* before, const float* const* rows,
                                 const float* weights, double factor, float rate,
                                 double rate_factor, double once, int64_t column, int64_t n,
                                 int32_t* peaks, double* sums) {
    alignas(64) float sum[kStep];
    MovePeaks<W> found;
    add_groups<W, A, B, kFirst, true, false, true>(
        nullptr, sum, rows, weights, factor, 0.0, column, n, sums,
        [&](int64_t begin, auto count) FASTAGG_INLINE_LAMBDA {
          keep_params<W>(params + begin, sum, before + begin, count, &found);
          float* const to = params + begin;
          if (rate == 1.0f && rate_factor == 1.0) return add_plain(to, sum, count);
          FASTAGG_WHOLE_VECTORS
          for (int64_t k = 0; k < count; ++k) {  // SumGroups of one row, with beta = once
            const double group = static_cast<double>(rate * sum[k]);
            to[k] = static_cast<float>(
                multiply_add<W>(once, double{to[k]}, rate_factor * (0.0 + group)));
          }
        });
    found.raise(peaks);
  }
};

// params = once * params + the product of a rate and of the weighted sum of S rows, for n
// columns from `column` on.
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
    const float quotient = rate->quotients[0];
    const double factor = weights->factor, rate_factor = rate->factor;
    if (S == 0) {
      const float zeros[kStep] = {};
      MovePeaks<W> found;
      for_even_steps<W>(n, [&](int64_t begin, auto count) FASTAGG_INLINE_LAMBDA {
        keep_params<W>(params + begin, zeros, before + begin, count, &found);
        for (int64_t k = 0; k < count; ++k)  // -0 + 0 is 0
          params[begin + k] = static_cast<float>(once * params[begin + k] + 0.0);
      });
      found.raise(peaks);
      return;
    }
    for_passes<T>(S, [&](auto a, auto b, int64_t s, auto first, auto last) FASTAGG_INLINE_LAMBDA {
      constexpr int A = decltype(a)::value, B = decltype(b)::value;
      constexpr bool kFirst = decltype(first)::value;
      const auto take = [&](const float* const* x, int64_t from, int64_t begin,
                            int64_t count) FASTAGG_INLINE_LAMBDA {
        if constexpr (decltype(last)::value)
          call<W, MoveGroups<A, B, kFirst>>(params + begin, before + begin, x, w + s, factor,
                                            quotient, rate_factor, once, from, count, peaks,
                                            memory + begin);
        else
          call<W, SumGroups<A, B, kFirst, false, false>>(static_cast<float*>(nullptr), x, w + s,
                                                         0.0, 0.0, from, count, memory + begin);
      };
      for_widened<W, A + B>(rows + s, column, n, take);
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
  // The compiler must not know that the parameters are multiplied by 1: it might then leave out
  // that product, and not round the other one, which weighted_sum does.
  double once = 1.0;
  asm volatile("" : "+m"(once));
  for_blocks(d, columns, team, [&](int64_t column, int64_t n, int worker) {
    dispatch<MoveAlong>(isa, params + column, before + column, rows, S, &scaled, &rate, once,
                        column, n, peaks.of(worker), sums.as<double>() + worker * columns);
  });
  float largest[2];
  peaks.write(largest);
  if (fits_into(largest[0], largest[1], lr, limits)) return true;
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
