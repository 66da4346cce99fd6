// SPDX-License-Identifier: Apache-2.0
#include "kernels.h"
#include "rows.cuh"

namespace fastagg::cuda {
namespace {

template <class T, int V>
__global__ void __launch_bounds__(kBlockThreads)
    weighted_sum_kernel(int64_t tasks, float* out, const T* const* rows, int64_t S, int64_t d,
                        const double* weights, double beta, const uint8_t* when) {
  if (called_off(when)) return;
  __shared__ double scratch[V * kBlockThreads];
  const int64_t batches = row_batches(S, blockDim.y);
  const double factor = factor_of(weights, S), inverse = 1.0 / factor;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const auto columns = Columns<V>::of(task, d);
    double sums[V] = {};
    for (int64_t b = 0; b < batches; ++b) {
      Batch<T, V> batch;
      batch.load_rows(rows, S, b, columns);
      batch.add_to(sums, S, b,
                   [&](int64_t s) { return static_cast<float>(__dmul_rn(weights[s], inverse)); });
    }
    sum_over_splits(sums, scratch);
    if (threadIdx.y > 0) continue;
    Floats<V> result{};
    if (beta != 0.0) result = load<V>(out + columns.begin, columns.count);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const double old = beta == 0.0 ? 0.0 : __dmul_rn(beta, result.at[v]);
      result.at[v] = static_cast<float>(__dadd_rn(old, __dmul_rn(factor, sums[v])));
    }
    store<V>(out + columns.begin, result, columns.count);
  }
}

}  // namespace

template <class T>
cudaError_t weighted_sum(float* out, const T* const* rows, int64_t S, int64_t d,
                         const double* weights, double beta, const uint8_t* when, int width,
                         cudaStream_t stream) {
  return with_width<16 / sizeof(T)>(width, [&](auto w) {
    constexpr int V = decltype(w)::value;
    return launch_rows<V>(weighted_sum_kernel<T, V>, S, d, stream, out, rows, S, d, weights, beta,
                          when);
  });
}

template cudaError_t weighted_sum(float*, const float* const*, int64_t, int64_t, const double*,
                                  double, const uint8_t*, int, cudaStream_t);
template cudaError_t weighted_sum(float*, const Bfloat16* const*, int64_t, int64_t, const double*,
                                  double, const uint8_t*, int, cudaStream_t);
template cudaError_t weighted_sum(float*, const Half* const*, int64_t, int64_t, const double*,
                                  double, const uint8_t*, int, cudaStream_t);

}  // namespace fastagg::cuda
