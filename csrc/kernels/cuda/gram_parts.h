// SPDX-License-Identifier: Apache-2.0
// The two kernels that read the rows for gram.cu. Both write the partial sums of some chunks into
// slots (gram_layout.h), and zeros to `found`.
#pragma once

#include <cuda_runtime_api.h>

#include "../precision.h"
#include "gram_layout.h"

namespace fastagg::cuda {

// The entries that the caller wants, on and below the diagonal. Partial sums of others are not
// read.
struct Wanted {
  const uint8_t* pairs;  // [S, S], or nullptr: all
  int64_t S;

  FASTAGG_HD bool operator()(int64_t i, int64_t j) const {
    return i < S && j <= i && (!pairs || i == j || pairs[i * S + j] != 0);
  }
};

// For S <= kFewRows: all chunks of segments [first, first + count).
//   partials   // [count, plan.chunks(), slots]
//   found      // [count, kFound]
cudaError_t gram_few(const float* const* rows, int64_t S, const GramPlan& plan, int64_t first,
                     int64_t count, double* partials, int32_t* found, Precision precision,
                     int width, cudaStream_t stream);

// For any S: chunks [first, first + count) of one segment.
//   needed     // [tiles] flags, or nullptr: all tiles
//   partials   // [ceil(count / plan.together), slots]; only those of wanted entries need be
//   written
//   found      // [kFound]
cudaError_t gram_many(const float* const* rows, Wanted wanted, const GramPlan& plan,
                      int64_t segment, int64_t first, int64_t count, const uint8_t* needed,
                      double* partials, int32_t* found, Precision precision, int width,
                      cudaStream_t stream);

}  // namespace fastagg::cuda
