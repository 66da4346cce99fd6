// SPDX-License-Identifier: Apache-2.0
// Sums of S x S numbers by one warp, in an order that depends on their number alone.
#pragma once

#include "launch.cuh"

namespace fastagg::cuda {

__device__ __forceinline__ int lane_of_warp() {
  return static_cast<int>(threadIdx.x) % kWarp;
}

// term(0) + ... + term(n - 1), in all lanes. All lanes of the warp must call it.
template <class Term>
__device__ __forceinline__ double warp_sum(int64_t n, const Term& term) {
  double sum = 0.0;
  for (int64_t i = lane_of_warp(); i < n; i += kWarp) sum += term(i);
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    sum += __shfl_xor_sync(kAllLanes, sum, offset);
  return sum;
}

}  // namespace fastagg::cuda
