// SPDX-License-Identifier: Apache-2.0
#include "kernels.h"
#include "rows.cuh"

namespace fastagg::cuda {
namespace {

// scaffold_mean in kernels.h. Products and sums are float64.
template <int V>
__global__ void __launch_bounds__(kBlockThreads)
    scaffold_mean_kernel(int64_t tasks, double* out, float* next, int32_t* peaks, const float* mean,
                         const float* const* updates, const float* const* controls,
                         const double* weights, const double* steps, double part,
                         float* const* kept, int64_t S, int64_t d) {
  __shared__ double scratch[V * kBlockThreads];
  const int64_t batches = row_batches(S, blockDim.y);
  const double rest = 1.0 - part * static_cast<double>(S);
  PeaksOfRows largest;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const auto columns = Columns<V>::of(task, d);
    const Floats<V> before = load<V>(mean + columns.begin, columns.count);
    double sums[V] = {}, changes[V] = {};
    for (int64_t b = 0; b < batches; ++b) {
      Batch<float, V> batch, own;
      batch.load_rows(updates, S, b, columns);
      own.load_rows(controls, S, b, columns);
#pragma unroll
      for (int j = 0; j < kHeldRows; ++j) {
        const int64_t s = row_of(blockDim.y, threadIdx.y, b, j);
        if (s >= S) continue;
        const double weight = weights[s], step = steps[s];
        Floats<V> fresh;
#pragma unroll
        for (int v = 0; v < V; ++v) {
          const double update = batch.x[j].at[v], change = __dmul_rn(step, update);
          sums[v] = fma(weight, update, sums[v]);
          changes[v] = __dadd_rn(changes[v], change);
          const double old = own.x[j].at[v];
          fresh.at[v] =
              static_cast<float>(__dadd_rn(__dadd_rn(old, -double{before.at[v]}), change));
        }
        store<V>(kept[s] + columns.begin, fresh, columns.count);
      }
      largest.add(batch, peaks, S, b);
    }
    sum_over_splits(sums, scratch);
    sum_over_splits(changes, scratch);
    if (threadIdx.y > 0) continue;
    Floats<V> after;
#pragma unroll
    for (int v = 0; v < V; ++v)
      after.at[v] =
          static_cast<float>(__dadd_rn(__dmul_rn(rest, before.at[v]), __dmul_rn(part, changes[v])));
    store<V>(next + columns.begin, after, columns.count);
    store_doubles(out, sums, columns);
  }
  largest.write(peaks, S, 0);
}

}  // namespace

cudaError_t scaffold_mean(double* out, float* next, float* peaks, const float* mean,
                          const float* const* updates, const float* const* controls,
                          const double* weights, const double* steps, double part,
                          float* const* kept, int64_t S, int64_t d, int width,
                          cudaStream_t stream) {
  auto* bits = reinterpret_cast<int32_t*>(peaks);
  if (cudaError_t error = cudaMemsetAsync(bits, 0, S * sizeof(int32_t), stream)) return error;
  return with_width(width, [&](auto w) {
    constexpr int V = decltype(w)::value;
    return launch_rows<V>(scaffold_mean_kernel<V>, S, d, stream, out, next, bits, mean, updates,
                          controls, weights, steps, part, kept, S, d);
  });
}

}  // namespace fastagg::cuda
