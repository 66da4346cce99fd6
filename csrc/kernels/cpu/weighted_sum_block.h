// SPDX-License-Identifier: Apache-2.0
// One block of columns of weighted_sum, for kernels that compute it along with something else.
#pragma once

#include <cstdint>

#include "simd.h"

namespace fastagg::cpu {

// weighted_sum in columns [column, column + n), n <= kMaxBlock, on the calling thread.
//   out       // [d]
//   weights   // [S]
void weighted_sum_block(Isa isa, float* out, const float* const* rows, int64_t S,
                        const float* weights, double beta, int64_t column, int64_t n);

}  // namespace fastagg::cpu
