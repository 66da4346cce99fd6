// SPDX-License-Identifier: Apache-2.0
// The precision of the products of a Gram matrix.
#pragma once

namespace fastagg {

// The CUDA kernels multiply each element x as a sum of bfloat16 numbers: three (kHighest: all 24
// bits of x, without products below 2^-26 of the largest one) or two (kHigh: x rounded by at most
// 2^-17 |x|); or round it to TF32 (kTf32: by at most 2^-11 |x|). Everything after that is the same
// for all. The CPU multiplies float32 numbers, which is at least as precise as any of them.
enum class Precision { kHighest, kHigh, kTf32 };

}  // namespace fastagg
