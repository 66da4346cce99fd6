// SPDX-License-Identifier: Apache-2.0
// pair_gram: the Gram matrix of selected pairs, component by component.
#pragma once

#include <cstdint>

#include "common.h"

namespace fastagg::cpu {

// As `gram` with the same arguments, bit for bit. No pair crosses from one connected component of
// `pairs` to another, so each is a Gram matrix of its own that knows nothing of the other rows: its
// panels fit a cache that those of all rows may not fit. A set without gaps is the dense `gram`.
//   pairs   // [S, S] symmetric 0/1 flags
//   out     // [S, S]
void pair_gram(const float* const* rows, int64_t S, int64_t d, const uint8_t* pairs, double* out,
               const Parallel& parallel);

}  // namespace fastagg::cpu
