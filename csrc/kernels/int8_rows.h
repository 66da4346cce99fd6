// SPDX-License-Identifier: Apache-2.0
// int8_rows: rows of int8 numbers, with one float32 scale for each block of 256 columns.
//
// Element k of a row is numbers[k] * scales[k / 256], rounded to float32. Blocks are counted from
// the first column of the row, so a part of a row that begins at a multiple of 256 has the same
// blocks.
#pragma once

#include <cstdint>

#include "common.h"
#include "elements.h"
#include "faded_total.h"

namespace fastagg {

constexpr int64_t kScaleBlock = 256;  // columns that share a scale

// How a block whose largest magnitude is `peak` is rounded to int8.
struct Int8Scale {
  float step;    // the scale: peak / 127, rounded
  float halves;  // 254 / peak, the factor that makes an element a number of half steps
};

// A block whose scale would be a subnormal number becomes zero: below 2^-119 = 1.5e-36. If a number
// of the block is NaN or infinite, so is the scale. Otherwise 127 steps are finite.
FASTAGG_HD Int8Scale int8_scale(float peak) {
  constexpr float kMostFinite = 0x1.fffffep+127f, kLargestStep = 0x1.020406p+121f;
  if (peak < 0x1p-119f) return {0.0f, 0.0f};
  const float step = peak / 127.0f;
  const bool beyond = step > kLargestStep && peak <= kMostFinite;
  return {beyond ? kLargestStep : step, 254.0f / peak};
}

// x in steps, rounded to the nearest integer, halves away from zero; 0 if x or the scale is not
// finite. The only operation on floats is one product, so all compilers and instruction sets give
// the same bits: an addition after it could be fused with it.
FASTAGG_HD int32_t int8_number(float x, float halves) {
  const float y = x * halves;
  const auto number = static_cast<int32_t>(y == y ? y : 0.0f);  // of half steps, towards zero
  return (number + (number >= 0)) >> 1;
}

namespace cpu {

// numbers[s] and scales[s] = rows[s]. With a = max |x| of a block, an element is off by at most
// (1 + 2^-14) a / 254, or by 2^-119 if that is more.
//   numbers   // [S] pointers to d numbers each, in [-127, 127]
//   scales    // [S] pointers to ceil(d / 256) floats each
//   rows      // [S] pointers to d floats each
void quantize(int8_t* const* numbers, float* const* scales, const float* const* rows, int64_t S,
              int64_t d, const Parallel& parallel);

// out[s][k] = numbers[s][k] * scales[s][k / 256].
//   out       // [S] pointers to d floats each
//   numbers   // [S] pointers to d numbers each
//   scales    // [S] pointers to ceil(d / 256) floats each
void dequantize(float* const* out, const int8_t* const* numbers, const float* const* scales,
                int64_t S, int64_t d, const Parallel& parallel);

// memory_total (memory.h) for int8 memory rows, in one pass: with q(x) the row x after `quantize`,
//   out = total + sum_s weights[s] * (q(updates[s]) - memory[s]);  kept[s] = q(updates[s])
// The bits are those of memory_total for q(updates[s]) and memory[s] as float rows.
//   out             // [d]
//   peaks           // [S] max |q(updates[s])|, NaN or infinite if a number of the row is
//   total           // [d]
//   updates         // [S] pointers to d floats each
//   memory          // [S] pointers to d numbers each
//   memory_scales   // [S] pointers to ceil(d / 256) floats each
//   weights         // [S]
//   kept            // [S] pointers to d numbers each, written
//   kept_scales     // [S] pointers to ceil(d / 256) floats each, written
//   faded           // a second sum
void quantized_total(double* out, float* peaks, const double* total, const float* const* updates,
                     const int8_t* const* memory, const float* const* memory_scales, int64_t S,
                     int64_t d, const double* weights, int8_t* const* kept,
                     float* const* kept_scales, const FadedTotal& faded, const Parallel& parallel);

}  // namespace cpu
}  // namespace fastagg
