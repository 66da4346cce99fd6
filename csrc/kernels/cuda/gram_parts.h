// SPDX-License-Identifier: Apache-2.0
// The two kernels that read the rows for gram.cu. Both write the partial sums of some chunks into
// slots (gram_layout.h), and zeros to found[kFound].
#pragma once

#include <cuda_runtime_api.h>

#include "../precision.h"
#include "gram_layout.h"

namespace fastagg::cuda {

// For S <= kFewRows: all chunks.
//   partials   // [chunks, slots]
cudaError_t gram_few(const float* const* rows, int64_t S, int64_t d, const GramPlan& plan,
                     double* partials, int32_t* found, Precision precision, int width,
                     cudaStream_t stream);

// For any S: chunks [first, first + count).
//   needed     // [tiles] flags, or nullptr: all tiles
//   partials   // [ceil(count / plan.together), slots]; tiles that are not needed do not change
cudaError_t gram_many(const float* const* rows, int64_t S, int64_t d, const GramPlan& plan,
                      int64_t first, int64_t count, const uint8_t* needed, double* partials,
                      int32_t* found, Precision precision, int width, cudaStream_t stream);

}  // namespace fastagg::cuda
