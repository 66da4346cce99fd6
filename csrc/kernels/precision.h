// SPDX-License-Identifier: Apache-2.0
// The precision of the products of a Gram matrix.
#pragma once

namespace fastagg {

// The CUDA kernels round each element x before they multiply it: by at most 2^-17 |x| (kHighest:
// two bfloat16, 16 bits of mantissa, less than the 24 bits of float32) or 2^-11 |x| (kTf32).
// Everything after that is the same for both. The CPU multiplies float32 numbers, which is at least
// as precise as either.
enum class Precision { kHighest, kTf32 };

}  // namespace fastagg
