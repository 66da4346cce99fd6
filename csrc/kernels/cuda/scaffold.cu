// SPDX-License-Identifier: Apache-2.0
#include "kernels.h"
#include "rows.cuh"

namespace fastagg::cuda {
namespace {

// scaffold_mean in kernels.h. Products and sums are float64.
template <int V>
__global__ void __launch_bounds__(kBlockThreads, 1)
    scaffold_mean_kernel(int64_t tasks, double* out, float* next, int32_t* peaks, const float* mean,
                         const float* const* updates, const float* const* controls,
                         const double* weights, const double* steps, double part,
                         float* const* kept, int S, int64_t d) {
  extern __shared__ float4 shared[];
  const int batches = row_batches(S, blockDim.y);
  TablePlaces places(shared, V, S);
  const Staged rows(places, [&](int s) { return updates[s]; });
  const Staged olds(places, [&](int s) { return controls[s]; });
  const Staged to(places, [&](int s) { return kept[s]; });
  const Staged factors(places, [&](int s) { return weights[s]; });
  const Staged rates(places, [&](int s) { return steps[s]; });
  __syncthreads();
  SplitSums<V> splits(shared, S);
  const double rest = 1.0 - part * static_cast<double>(S);
  PeaksOfRows largest;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const auto columns = Columns<V>::of(task, d);
    const Share share = share_of_thread<V>(task, d);
    const Floats<V> before = load<V>(mean + columns.begin, columns.count);
    double sums[V] = {}, changes[V] = {};
    for (int b = 0; b < batches; ++b) {
      Batch<float, V> batch, own;
      batch.load_rows(rows, S, b, columns);
      own.load_rows(olds, S, b, columns);
#pragma unroll
      for (int j = 0; j < kHeldRows; ++j) {
        const int s = row_of(blockDim.y, threadIdx.y, b, j);
        if (s >= S) continue;
        const double weight = factors[s], step = rates[s];
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
        store<V>(to[s] + columns.begin, fresh, columns.count);
      }
      largest.add(batch, peaks, S, b);
    }
    const Floats<V> was = load_share<V>(mean, share);  // from the L1 cache, see `before`
    splits.add_up(sums);
    splits.add_up(changes);
    Floats<V> after;
#pragma unroll
    for (int n = 0; n < V; ++n)
      after.at[n] =
          static_cast<float>(__dadd_rn(__dmul_rn(rest, was.at[n]), __dmul_rn(part, changes[n])));
    store_share<V>(next, after, share);
    store_share<V>(out, sums, share);
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
    return launch_rows<V>(scaffold_mean_kernel<V>, 5, S, d, stream, out, next, bits, mean, updates,
                          controls, weights, steps, part, kept, S, d);
  });
}

}  // namespace fastagg::cuda
