// SPDX-License-Identifier: Apache-2.0
#include "kernels.h"
#include "rows.cuh"

namespace fastagg::cuda {
namespace {

template <class T, int V>
__global__ void __launch_bounds__(kBlockThreads, 1)
    weighted_sum_kernel(int64_t tasks, float* out, const T* const* rows, int S, int64_t d,
                        const double* weights, double beta, const uint8_t* when) {
  if (called_off(when)) return;
  extern __shared__ float4 shared[];
  const int batches = row_batches(S, blockDim.y);
  const double factor = factor_of(weights, S), inverse = 1.0 / factor;
  TablePlaces places(shared, V, S);
  const Staged from(places, [&](int s) { return rows[s]; });
  const Staged quotients(places,
                         [&](int s) { return static_cast<float>(__dmul_rn(weights[s], inverse)); });
  __syncthreads();
  SplitSums<V> splits(shared, S);
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const auto columns = Columns<V>::of(task, d);
    const Share share = share_of_thread<V>(task, d);
    constexpr bool kEarly = V < 8;  // more registers than there are would be needed
    Floats<V> result{};
    if (kEarly && beta != 0.0) result = load_share<V>(out, share);
    double sums[V] = {};
    for (int b = 0; b < batches; ++b) {
      Batch<T, V> batch;
      batch.load_rows(from, S, b, columns);
      batch.add_to(sums, S, b, [&](int s) { return quotients[s]; });
    }
    if (!kEarly && beta != 0.0) result = load_share<V>(out, share);
    splits.add_up(sums);
#pragma unroll
    for (int n = 0; n < V; ++n) {
      const double old = beta == 0.0 ? 0.0 : __dmul_rn(beta, result.at[n]);
      result.at[n] = static_cast<float>(__dadd_rn(old, __dmul_rn(factor, sums[n])));
    }
    store_share<V>(out, result, share);
  }
}

}  // namespace

template <class T>
cudaError_t weighted_sum(float* out, const T* const* rows, int64_t S, int64_t d,
                         const double* weights, double beta, const uint8_t* when, int width,
                         cudaStream_t stream) {
  return with_width<16 / sizeof(T)>(width, [&](auto w) {
    constexpr int V = decltype(w)::value;
    return launch_rows<V>(weighted_sum_kernel<T, V>, 2, S, d, stream, out, rows, S, d, weights,
                          beta, when);
  });
}

template cudaError_t weighted_sum(float*, const float* const*, int64_t, int64_t, const double*,
                                  double, const uint8_t*, int, cudaStream_t);
template cudaError_t weighted_sum(float*, const Bfloat16* const*, int64_t, int64_t, const double*,
                                  double, const uint8_t*, int, cudaStream_t);
template cudaError_t weighted_sum(float*, const Half* const*, int64_t, int64_t, const double*,
                                  double, const uint8_t*, int, cudaStream_t);

}  // namespace fastagg::cuda
