// SPDX-License-Identifier: Apache-2.0
// pair_gram: the Gram matrix of selected pairs, component by component.
#pragma once

#include <cstdint>

#include "common.h"

namespace fastagg::cpu {

// The result of `gram` with the same arguments, bit for bit. No pair crosses from one connected
// component of `pairs` to another, so each component is computed as a separate Gram matrix, whose
// panels fit a cache that the panels of all rows may not fit. If `pairs` has all pairs, this is the
// dense `gram`.
//   pairs   // [S, S] symmetric 0/1 flags
//   out     // [S, S]
void pair_gram(const float* const* rows, int64_t S, int64_t d, const uint8_t* pairs, double* out,
               const Parallel& parallel);

}  // namespace fastagg::cpu
