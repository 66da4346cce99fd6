// SPDX-License-Identifier: Apache-2.0
// The sums of memory_total and quantized_total for the columns of a thread.
#pragma once

#include "../faded_total.h"
#include "rows.cuh"

namespace fastagg::cuda {

template <int V, bool kFaded>
struct TotalSums {
  double sums[V] = {};
  double faded[kFaded ? V : 1] = {};  // those of the FadedTotal

  // Adds column v of row s. The second weights are read from memory: these kernels have no room for
  // one more table in shared memory.
  __device__ __forceinline__ void add(int v, double weight, const FadedTotal& other, int s,
                                      float row, float old) {
    const double fresh = row, before = old;
    sums[v] = fma(weight, fresh - before, sums[v]);
    if constexpr (kFaded)
      faded[v] = fma(other.weights[s], fma(-other.fading, before, fresh), faded[v]);
  }

  // Writes the sums of all splits. All threads of a thread block must call it.
  //   now   // the totals of the thread's share, before the call
  __device__ __forceinline__ void store(SplitSums<V>& splits, double (&now)[V], double* out,
                                        const FadedTotal& other, Share share) {
    if constexpr (kFaded) {
      splits.add_up(faded);
#pragma unroll
      for (int n = 0; n < V; ++n) faded[n] = fma(other.fading, now[n], faded[n]);
      store_share<V>(other.out, faded, share);
    }
    splits.add_up(sums);
#pragma unroll
    for (int n = 0; n < V; ++n) now[n] = __dadd_rn(now[n], sums[n]);
    store_share<V>(out, now, share);
  }
};

// Calls launch(kFaded) with whether there is a second sum, as a constant.
template <class Launch>
cudaError_t with_faded(const FadedTotal& faded, const Launch& launch) {
  return faded.out ? launch(std::true_type()) : launch(std::false_type());
}

}  // namespace fastagg::cuda
