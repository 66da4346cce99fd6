// SPDX-License-Identifier: Apache-2.0
#include "../int8_rows.h"

#include <cmath>

#include "magnitude.h"
#include "rounded_rows.h"
#include "row_peaks.h"

namespace fastagg::cpu {
namespace {

constexpr int kRows = 4;  // updates taken together, each with its memory row

// Prefetch two blocks ahead. A block is read for its scale before it is rounded, and between two
// such reads hardware prefetchers see no new line of the update. So each step of a block fetches
// what the same step of a later block will need. To fetch all lines of a block at once was slower:
// the processor waited for them and computed nothing.
constexpr int64_t kAhead = 2 * kScaleBlock;

// Fetches `count` elements of T from p[ahead] on, which may be outside of the array.
template <class T>
FASTAGG_INLINE void prefetch_step(const T* p, int64_t ahead, int64_t count) {
  constexpr int64_t kLine = 16;  // floats in a cache line
  const auto* floats = reinterpret_cast<const float*>(p);
  const int64_t begin = ahead * int64_t{sizeof(T)} / 4;
  for (int64_t k = 0; 4 * k < count * int64_t{sizeof(T)}; k += kLine) prefetch(floats, begin + k);
}

// Columns of a task: whole blocks that share a scale.
int64_t task_columns(int64_t d, int workers) {
  return ceil_div(block_columns(d, workers), kScaleBlock) * kScaleBlock;
}

template <int W>
FASTAGG_INLINE Int8Scale scale_of(const float* x, int64_t n) {
  constexpr int kChains = 4;  // so that no maximum waits for the one before
  Magnitude<W> largest[kChains];
  int64_t k = 0;
  for (; k + kChains * W <= n; k += kChains * W)
    unroll<kChains>([&](auto c) FASTAGG_INLINE_LAMBDA { largest[c].add(load<W>(x + k + c * W)); });
  largest[0].add(x + k, n - k);
  unroll<kChains - 1>([&](auto c) FASTAGG_INLINE_LAMBDA { largest[0].add(largest[c + 1]); });
  return int8_scale(float_of_bits(static_cast<uint32_t>(largest[0].bits())));
}

// int8_number of W numbers of a block that is finite.
template <int W>
FASTAGG_INLINE Vec<int32_t, W> int8_numbers(const Vec<float, W>& x, float halves) {
  const auto numbers = __builtin_convertvector(x * halves, Vec<int32_t, W>);
  const auto least = Vec<int32_t, W>{} - 1;
  return (numbers - (numbers > least)) >> 1;  // a comparison that holds is -1
}

constexpr float kZeroBlock[kScaleBlock] = {};

// The block at x, or zeros if a number of it is NaN or infinite: int8_number makes all of them 0.
FASTAGG_INLINE const float* finite_block(const float* x, const Int8Scale& scale) {
  return std::isfinite(scale.step) ? x : kZeroBlock;
}

// Conversions of int8 numbers have loops of their own, which GCC vectorizes. It converts generic
// vectors of int8 one number at a time.

// out = x in steps, for `count` columns of a finite block; and rows = out * scale.step if given.
template <int W, class Count>
FASTAGG_INLINE void quantize_step(int8_t* out, float* rows, const float* x, const Int8Scale& scale,
                                  Count count) {
  alignas(64) int32_t numbers[kStep];
  int64_t k = 0;
  for (; k + W <= count; k += W) {
    const auto number = int8_numbers<W>(load<W>(x + k), scale.halves);
    store<W>(numbers + k, number);
    if (rows) store<W>(rows + k, __builtin_convertvector(number, Vec<float, W>) * scale.step);
  }
  for (; k < count; ++k) {
    numbers[k] = int8_number(x[k], scale.halves);
    if (rows) rows[k] = static_cast<float>(numbers[k]) * scale.step;
  }
  for (k = 0; k < count; ++k) out[k] = static_cast<int8_t>(numbers[k]);
}

// out = numbers * scale.
template <class Count>
FASTAGG_INLINE void dequantize_step(float* out, const int8_t* numbers, float scale, Count count) {
  for (int64_t k = 0; k < count; ++k) out[k] = static_cast<float>(numbers[k]) * scale;
}

struct Quantize {
  template <int W>
  FASTAGG_INLINE static void run(int8_t* numbers, float* scales, const float* row, int64_t column,
                                 int64_t n) {
    for (int64_t begin = column; begin < column + n; begin += kScaleBlock) {
      const int64_t columns = std::min(kScaleBlock, column + n - begin);
      const Int8Scale scale = scale_of<W>(row + begin, columns);
      scales[begin / kScaleBlock] = scale.step;
      const float* x = finite_block(row + begin, scale);
      for_steps(columns, [&](int64_t first, auto count) FASTAGG_INLINE_LAMBDA {
        quantize_step<W>(numbers + begin + first, nullptr, x + first, scale, count);
      });
    }
  }
};

struct Dequantize {
  template <int W>
  FASTAGG_INLINE static void run(float* out, const int8_t* numbers, const float* scales,
                                 int64_t column, int64_t n) {
    for (int64_t begin = column; begin < column + n; begin += kScaleBlock) {
      const int64_t columns = std::min(kScaleBlock, column + n - begin);
      const float scale = scales[begin / kScaleBlock];
      for_steps(columns, [&](int64_t first, auto count) FASTAGG_INLINE_LAMBDA {
        dequantize_step(out + begin + first, numbers + begin + first, scale, count);
      });
    }
  }
};

// sums += weight * (row - old) for one block of G rows, in ascending order of rows, as in
// memory_total; row is the update after rounding, which is kept. Raises the peaks.
//   faded   // of this block
template <int W, int G>
FASTAGG_INLINE void remember(double* sums, int32_t* peaks, const float* const* updates,
                             const int8_t* const* memory, const float* const* memory_scales,
                             int8_t* const* kept, float* const* kept_scales, const double* weights,
                             const FadedTotal& faded, int64_t column, int64_t n) {
  const int64_t block = column / kScaleBlock;
  const float* update[G];
  const int8_t* own[G];
  int8_t* out[G];
  Int8Scale scale[G];
  float old_scale[G];
  double w[G], faded_weights[G] = {};
  const FadedTotal other = {faded.out, faded_weights, faded.fading};
  // Written out for each row: see Widen.
  unroll<G>([&](auto g) FASTAGG_INLINE_LAMBDA {
    scale[g] = scale_of<W>(updates[g] + column, n);
    update[g] = finite_block(updates[g] + column, scale[g]);
    own[g] = memory[g] + column;
    out[g] = kept[g] + column;
    old_scale[g] = memory_scales[g][block];
    kept_scales[g][block] = scale[g].step;
    // The largest element of a block is 127 steps.
    peaks[g] = std::max(peaks[g], magnitude_bits(127.0f * scale[g].step));
    w[g] = weights[g];
    if (faded.out) faded_weights[g] = faded.weights[g];
  });
  for_steps(n, [&](int64_t begin, auto count) FASTAGG_INLINE_LAMBDA {
    alignas(64) float rows[G][kStep];
    alignas(64) float old[G][kStep];
    unroll<G>([&](auto g) FASTAGG_INLINE_LAMBDA {
      prefetch_step(updates[g] + column + begin, kAhead, count);
      prefetch_step(own[g] + begin, kAhead, count);
      prefetch_step(out[g] + begin, kAhead, count);
      dequantize_step(old[g], own[g] + begin, old_scale[g], count);
      quantize_step<W>(out[g] + begin, rows[g], update[g] + begin, scale[g], count);
    });
    add_both<W, G>(sums, sums, rows, old, w, other, begin, count);
  });
}

struct QuantizedTotal {
  template <int W>
  FASTAGG_INLINE static void run(double* out, int32_t* peaks, const double* total,
                                 const float* const* updates, const int8_t* const* memory,
                                 const float* const* memory_scales, const double* weights,
                                 int64_t S, int8_t* const* kept, float* const* kept_scales,
                                 const FadedTotal& faded, int64_t column, int64_t n) {
    const FadedTotal other = begin_faded(faded, total + column, column, n);
    std::copy_n(total + column, n, out + column);
    const auto take = [&](auto rows, int64_t s) FASTAGG_INLINE_LAMBDA {
      for (int64_t begin = column; begin < column + n; begin += kScaleBlock)
        remember<W, decltype(rows)::value>(out + begin, peaks + s, updates + s, memory + s,
                                           memory_scales + s, kept + s, kept_scales + s,
                                           weights + s, part_of(other, s, begin - column), begin,
                                           std::min(kScaleBlock, column + n - begin));
    };
    int64_t s = 0;
    for (; s + kRows <= S; s += kRows) take(std::integral_constant<int, kRows>(), s);
    for (; s < S; ++s) take(std::integral_constant<int, 1>(), s);
  }
};

// Calls body(s, column, n) for the tasks of S rows that do not depend on each other.
template <class Body>
void for_row_blocks(int64_t S, int64_t d, const Parallel& parallel, const Body& body) {
  const int64_t blocks = ceil_div(d, kRowColumns);
  parallel.for_each(S * blocks, [&](int64_t task, int) {
    const int64_t column = task % blocks * kRowColumns;
    body(task / blocks, column, std::min(kRowColumns, d - column));
  });
}
static_assert(kRowColumns % kScaleBlock == 0);

}  // namespace

void quantize(int8_t* const* numbers, float* const* scales, const float* const* rows, int64_t S,
              int64_t d, const Parallel& parallel) {
  const Isa isa = current_isa();
  for_row_blocks(S, d, parallel.for_work(5 * S * d), [&](int64_t s, int64_t column, int64_t n) {
    dispatch<Quantize>(isa, numbers[s], scales[s], rows[s], column, n);
  });
}

void dequantize(float* const* out, const int8_t* const* numbers, const float* const* scales,
                int64_t S, int64_t d, const Parallel& parallel) {
  const Isa isa = current_isa();
  for_row_blocks(S, d, parallel.for_work(5 * S * d), [&](int64_t s, int64_t column, int64_t n) {
    dispatch<Dequantize>(isa, out[s], numbers[s], scales[s], column, n);
  });
}

void quantized_total(double* out, float* peaks, const double* total, const float* const* updates,
                     const int8_t* const* memory, const float* const* memory_scales, int64_t S,
                     int64_t d, const double* weights, int8_t* const* kept,
                     float* const* kept_scales, const FadedTotal& faded, const Parallel& parallel) {
  const Isa isa = current_isa();
  const Parallel team = parallel.for_work((6 * S + (faded.out ? 24 : 16)) * d);
  const RowPeaks row_peaks(S, team);
  for_blocks(d, task_columns(d, team.workers), team, [&](int64_t column, int64_t n, int worker) {
    dispatch<QuantizedTotal>(isa, out, row_peaks.of(worker), total, updates, memory, memory_scales,
                             weights, S, kept, kept_scales, faded, column, n);
  });
  row_peaks.write(peaks);
}

}  // namespace fastagg::cpu
