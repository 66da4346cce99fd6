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
  Magnitude<W> largest;
  largest.add(x, n);
  return int8_scale(float_of_bits(static_cast<uint32_t>(largest.bits())));
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
        for (int64_t k = 0; k < width; ++k)
          out[k] = static_cast<int8_t>(int8_number(x[k], scale.halves));
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
    float row[G][kStep], old[G][kStep];
    for (int g = 0; g < G; ++g) {
      const float* x = updates[g] + column + begin;
      const int8_t* own = memory[g] + column + begin;
      int8_t* out = kept[g] + column + begin;
      for (int64_t k = 0; k < count; ++k) {
        const int32_t number = int8_number(x[k], scale[g].halves);
        out[k] = static_cast<int8_t>(number);
        row[g][k] = static_cast<float>(number) * scale[g].step;
      }
      for (int64_t k = 0; k < count; ++k) old[g][k] = static_cast<float>(own[k]) * old_scale[g];
    }
    double* here = sums + begin;
    for (int64_t k = 0; k < count; ++k) {
      double sum = here[k];
      for (int g = 0; g < G; ++g)
        sum += w[g] * (static_cast<double>(row[g][k]) - static_cast<double>(old[g][k]));
      here[k] = sum;
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
