// SPDX-License-Identifier: Apache-2.0
#include "../int8_rows.h"

#include "magnitude.h"
#include "row_blocks.h"
#include "row_peaks.h"

namespace fastagg::cpu {
namespace {

constexpr int kRows = 4;  // updates taken together, each with its memory row

// Prefetch updates two blocks ahead. A block is read for its scale before anything is computed, and
// 1 KB of each row at a time is too short for hardware prefetchers.
constexpr int64_t kAhead = 2 * kScaleBlock;

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

// int8_number of W numbers.
template <int W>
FASTAGG_INLINE Vec<int32_t, W> int8_numbers(const Vec<float, W>& x, float halves) {
  const Vec<float, W> y = x * halves;
  const auto numbers = __builtin_convertvector(y == y ? y : Vec<float, W>{}, Vec<int32_t, W>);
  const auto least = Vec<int32_t, W>{} - 1;
  return (numbers - (numbers > least)) >> 1;  // a comparison that holds is -1
}

struct Quantize {
  template <int W>
  FASTAGG_INLINE static void run(int8_t* numbers, float* scales, const float* row, int64_t column,
                                 int64_t n) {
    for (int64_t begin = column; begin < column + n; begin += kScaleBlock) {
      const int64_t count = std::min(kScaleBlock, column + n - begin);
      const Int8Scale scale = scale_of<W>(row + begin, count);
      scales[begin / kScaleBlock] = scale.step;
      for_steps(count, [&](int64_t first, auto width) FASTAGG_INLINE_LAMBDA {
        const float* x = row + begin + first;
        int8_t* out = numbers + begin + first;
        alignas(64) int32_t rounded[kStep];
        int64_t k = 0;
        for (; k + W <= width; k += W)
          store<W>(rounded + k, int8_numbers<W>(load<W>(x + k), scale.halves));
        for (; k < width; ++k) rounded[k] = int8_number(x[k], scale.halves);
        for (k = 0; k < width; ++k) out[k] = static_cast<int8_t>(rounded[k]);
      });
    }
  }
};

struct Dequantize {
  template <int W>
  FASTAGG_INLINE static void run(float* out, const int8_t* numbers, const float* scales,
                                 int64_t column, int64_t n) {
    for (int64_t begin = column; begin < column + n; begin += kScaleBlock) {
      const int64_t count = std::min(kScaleBlock, column + n - begin);
      const float scale = scales[begin / kScaleBlock];
      for_steps(count, [&](int64_t first, auto width) FASTAGG_INLINE_LAMBDA {
        const int8_t* x = numbers + begin + first;
        float* to = out + begin + first;
        for (int64_t k = 0; k < width; ++k) to[k] = static_cast<float>(x[k]) * scale;
      });
    }
  }
};

// sums += weight * (row - old) for one block of G rows, in ascending order of rows, as in
// memory_total; row is the update after rounding, which is kept. Raises the peaks.
template <int W, int G>
FASTAGG_INLINE void remember(double* sums, int32_t* peaks, const float* const* updates,
                             const int8_t* const* memory, const float* const* memory_scales,
                             int8_t* const* kept, float* const* kept_scales, const double* weights,
                             int64_t column, int64_t n) {
  const int64_t block = column / kScaleBlock;
  Int8Scale scale[G];
  float old_scale[G];
  double w[G];
  for (int g = 0; g < G; ++g) {
    for (int64_t line = 0; line < kScaleBlock; line += 16)
      prefetch(updates[g] + column, kAhead + line);
    scale[g] = scale_of<W>(updates[g] + column, n);
    old_scale[g] = memory_scales[g][block];
    kept_scales[g][block] = scale[g].step;
    // The largest element of a block is 127 steps.
    peaks[g] = std::max(peaks[g], magnitude_bits(127.0f * scale[g].step));
    w[g] = weights[g];
  }
  for_steps(n, [&](int64_t begin, auto count) FASTAGG_INLINE_LAMBDA {
    constexpr int kHalf = W / 2;
    using Floats = Vec<float, W>;
    using Doubles = Vec<double, kHalf>;
    const float* x[G];
    const int8_t* own[G];
    for (int g = 0; g < G; ++g) {
      x[g] = updates[g] + column + begin;
      own[g] = memory[g] + column + begin;
    }
    // Conversions of int8 numbers have loops of their own, which GCC vectorizes. It converts
    // generic vectors of int8 one number at a time.
    alignas(64) int32_t numbers[G][kStep];
    alignas(64) float old_row[G][kStep];
    for (int g = 0; g < G; ++g)
      for (int64_t k = 0; k < count; ++k)
        old_row[g][k] = static_cast<float>(own[g][k]) * old_scale[g];
    double* here = sums + begin;
    int64_t k = 0;
    for (; k + W <= count; k += W) {
      Doubles low = load<kHalf>(here + k), high = load<kHalf>(here + k + kHalf);
      unroll<G>([&](auto g) FASTAGG_INLINE_LAMBDA {
        const auto number = int8_numbers<W>(load<W>(x[g] + k), scale[g].halves);
        store<W>(&numbers[g][k], number);
        const Floats row = __builtin_convertvector(number, Floats) * scale[g].step;
        const Floats old = load<W>(&old_row[g][k]);
        Doubles row_low, row_high, old_low, old_high;
        widen_halves<W>(bits_of<W>(row), &row_low, &row_high);
        widen_halves<W>(bits_of<W>(old), &old_low, &old_high);
        low += w[g] * (row_low - old_low);
        high += w[g] * (row_high - old_high);
      });
      store<kHalf>(here + k, low);
      store<kHalf>(here + k + kHalf, high);
    }
    for (; k < count; ++k)
      for (int g = 0; g < G; ++g) {
        numbers[g][k] = int8_number(x[g][k], scale[g].halves);
        const float row = static_cast<float>(numbers[g][k]) * scale[g].step;
        here[k] += w[g] * (static_cast<double>(row) - static_cast<double>(old_row[g][k]));
      }
    for (int g = 0; g < G; ++g) {
      int8_t* out = kept[g] + column + begin;
      for (k = 0; k < count; ++k) out[k] = static_cast<int8_t>(numbers[g][k]);
    }
  });
}

struct QuantizedTotal {
  template <int W>
  FASTAGG_INLINE static void run(double* out, int32_t* peaks, const double* total,
                                 const float* const* updates, const int8_t* const* memory,
                                 const float* const* memory_scales, const double* weights,
                                 int64_t S, int8_t* const* kept, float* const* kept_scales,
                                 int64_t column, int64_t n) {
    std::copy_n(total + column, n, out + column);
    const auto take = [&](auto rows, int64_t s) FASTAGG_INLINE_LAMBDA {
      for (int64_t begin = column; begin < column + n; begin += kScaleBlock)
        remember<W, decltype(rows)::value>(
            out + begin, peaks + s, updates + s, memory + s, memory_scales + s, kept + s,
            kept_scales + s, weights + s, begin, std::min(kScaleBlock, column + n - begin));
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
                     float* const* kept_scales, const Parallel& parallel) {
  const Isa isa = current_isa();
  const Parallel team = parallel.for_work((6 * S + 16) * d);
  const RowPeaks row_peaks(S, team);
  for_blocks(d, task_columns(d, team.workers), team, [&](int64_t column, int64_t n, int worker) {
    dispatch<QuantizedTotal>(isa, out, row_peaks.of(worker), total, updates, memory, memory_scales,
                             weights, S, kept, kept_scales, column, n);
  });
  row_peaks.write(peaks);
}

}  // namespace fastagg::cpu
