// SPDX-License-Identifier: Apache-2.0
#include <type_traits>

#include "kernels.h"
#include "rows.cuh"

namespace fastagg::cuda {
namespace {

// sums += equal * (update + weight * correction), summed over the rows of batch b, whose updates
// stay in `updates`.
//   references   // entries may be null; used if `referred`
//   factors      // equal * weight
template <class Own, class T, int V, class Rows, class Corrections, class References, class Factors>
__device__ __forceinline__ void add_batch(double (&sums)[V], Batch<T, V>& updates, const Rows& rows,
                                          const Corrections& corrections, bool referred,
                                          const References& references, const Factors& factors,
                                          int S, int b, float equal, Columns<V> columns) {
  Batch<Own, V> stored;
  updates.load_rows(rows, S, b, columns);
  stored.load_rows(corrections, S, b, columns);
  Batch<float, V> own;
#pragma unroll
  for (int j = 0; j < kHeldRows; ++j) own.x[j] = stored.row(j);
  if (referred) {
#pragma unroll
    for (int j = 0; j < kHeldRows; ++j) {
      const int s = row_of(blockDim.y, threadIdx.y, b, j);
      const float* reference = s < S ? references[s] : nullptr;
      if (!reference) continue;
      const Floats<V> r = load<V>(reference + columns.begin, columns.count);
#pragma unroll
      for (int v = 0; v < V; ++v) own.x[j].at[v] = __fsub_rn(r.at[v], own.x[j].at[v]);
    }
  }
  updates.add_to(sums, S, b, [&](int) { return equal; });
  own.add_to(sums, S, b, [&](int s) { return factors(s); });
}

// sums *= 1/S over `equal`, the part of 1/S that the rows have been multiplied by.
template <int V>
__device__ __forceinline__ void finish_mean(double (&sums)[V], int S, float equal) {
  const double factor = 1.0 / (static_cast<double>(S) * equal);
#pragma unroll
  for (int v = 0; v < V; ++v) sums[v] = __dmul_rn(sums[v], factor);
}

// kept = updates for the rows of batch b.
template <class T, int V, class Kept>
__device__ __forceinline__ void keep_rows(const Kept& kept, const Batch<T, V>& updates, int S,
                                          int b, Columns<V> columns) {
#pragma unroll
  for (int j = 0; j < kHeldRows; ++j) {
    const int s = row_of(blockDim.y, threadIdx.y, b, j);
    if (s < S) store<V>(kept[s] + columns.begin, updates.row(j), columns.count);
  }
}

// corrections = v - updates for the rows of batch b.
template <class T, int V, class Corrections>
__device__ __forceinline__ void write_corrections(const Corrections& corrections,
                                                  const Floats<V>& v, const Batch<T, V>& updates,
                                                  int S, int b, Columns<V> columns) {
#pragma unroll
  for (int j = 0; j < kHeldRows; ++j) {
    const int s = row_of(blockDim.y, threadIdx.y, b, j);
    if (s >= S) continue;
    Floats<V> c = updates.row(j);
#pragma unroll
    for (int k = 0; k < V; ++k) c.at[k] = __fsub_rn(v.at[k], c.at[k]);
    store<V>(corrections[s] + columns.begin, c, columns.count);
  }
}

template <int V>
__device__ __forceinline__ Floats<V> rounded_to_float(const double (&x)[V]) {
  Floats<V> single;
#pragma unroll
  for (int n = 0; n < V; ++n) single.at[n] = static_cast<float>(x[n]);
  return single;
}

template <class T, int V>
__global__ void __launch_bounds__(kBlockThreads, 1)
    mimic_kernel(int64_t tasks, float* params, const T* const* updates, float* const* corrections,
                 int S, int64_t d, float equal, double lr) {
  extern __shared__ float4 shared[];
  const int batches = row_batches(S, blockDim.y);
  TablePlaces places(shared, V, S);
  const Staged rows(places, [&](int s) { return updates[s]; });
  const Staged own(places, [&](int s) { return corrections[s]; });
  __syncthreads();
  SplitSums<V> splits(shared, S);
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const auto columns = Columns<V>::of(task, d);
    const Share share = share_of_thread<V>(task, d);
    const Floats<V> p = load_share<V>(params, share);
    double sums[V] = {};
    Batch<T, V> batch;
    for (int b = 0; b < batches; ++b)
      add_batch<float>(
          sums, batch, rows, own, false, own, [&](int) { return equal; }, S, b, equal, columns);
    splits.add_up(sums);
    finish_mean(sums, S, equal);
    apply_total(params, p, sums, share, lr, 1.0, false);
    const Floats<V> mean = splits.of_columns(rounded_to_float(sums));
    for (int b = 0; b < batches; ++b) {
      if (batches > 1) batch.load_rows(rows, S, b, columns);
      write_corrections(own, mean, batch, S, b, columns);
    }
  }
}

template <class T, int V>
__global__ void __launch_bounds__(kBlockThreads, 1)
    mimic_mean_kernel(int64_t tasks, double* v_out, float* rounded, int32_t* peaks,
                      const T* const* updates, const T* const* corrections,
                      const float* const* references, const double* weights, float* const* kept,
                      bool copies, int S, int64_t d, float equal) {
  extern __shared__ float4 shared[];
  const int batches = row_batches(S, blockDim.y);
  TablePlaces places(shared, V, S);
  const Staged rows(places, [&](int s) { return updates[s]; });
  const Staged own(places, [&](int s) { return corrections[s]; });
  const Staged bases(places, [&](int s) { return references ? references[s] : nullptr; });
  const Staged to(places, [&](int s) { return kept ? kept[s] : nullptr; });
  const Staged factors(places, [&](int s) {
    return weights ? static_cast<float>(__dmul_rn(weights[s], equal)) : equal;
  });
  __syncthreads();
  SplitSums<V> splits(shared, S);
  PeaksOfRows largest;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const auto columns = Columns<V>::of(task, d);
    const Share share = share_of_thread<V>(task, d);
    double sums[V] = {};
    Batch<T, V> batch;
    for (int b = 0; b < batches; ++b) {
      add_batch<T>(
          sums, batch, rows, own, references != nullptr, bases, [&](int s) { return factors[s]; },
          S, b, equal, columns);
      largest.add(batch, peaks, S, b);
      if (kept && copies) keep_rows(to, batch, S, b, columns);
    }
    splits.add_up(sums);
    finish_mean(sums, S, equal);
    const Floats<V> single = rounded_to_float(sums);
    store_share<V>(v_out, sums, share);
    store_share<V>(rounded, single, share);
    if (!kept || copies) continue;
    const Floats<V> mean = splits.of_columns(single);
    for (int b = 0; b < batches; ++b) {
      if (batches > 1) batch.load_rows(rows, S, b, columns);
      write_corrections(to, mean, batch, S, b, columns);
    }
  }
  largest.write(peaks, S, 0);
}

}  // namespace

template <class T>
cudaError_t mimic(float* params, const T* const* updates, float* const* corrections, int64_t S,
                  int64_t d, double lr, int width, cudaStream_t stream) {
  if (S == 0) return cudaSuccess;
  return with_width(width, [&](auto w) {
    constexpr int V = decltype(w)::value;
    return launch_rows<V>(mimic_kernel<T, V>, 2, S, d, stream, params, updates, corrections, S, d,
                          mean_quotient(S), lr);
  });
}

template <class T>
cudaError_t mimic_mean(double* v, float* rounded, float* peaks, const T* const* updates,
                       const T* const* corrections, const float* const* references,
                       const double* weights, float* const* kept, bool copies, int64_t S, int64_t d,
                       int width, cudaStream_t stream) {
  auto* bits = reinterpret_cast<int32_t*>(peaks);
  if (cudaError_t error = cudaMemsetAsync(bits, 0, S * sizeof(int32_t), stream)) return error;
  return with_width(width, [&](auto w) {
    constexpr int V = decltype(w)::value;
    return launch_rows<V>(mimic_mean_kernel<T, V>, 5, S, d, stream, v, rounded, bits, updates,
                          corrections, references, weights, kept, copies, S, d, mean_quotient(S));
  });
}

template cudaError_t mimic(float*, const float* const*, float* const*, int64_t, int64_t, double,
                           int, cudaStream_t);
template cudaError_t mimic(float*, const Bfloat16* const*, float* const*, int64_t, int64_t, double,
                           int, cudaStream_t);
template cudaError_t mimic(float*, const Half* const*, float* const*, int64_t, int64_t, double, int,
                           cudaStream_t);
template cudaError_t mimic_mean(double*, float*, float*, const float* const*, const float* const*,
                                const float* const*, const double*, float* const*, bool, int64_t,
                                int64_t, int, cudaStream_t);
template cudaError_t mimic_mean(double*, float*, float*, const Bfloat16* const*,
                                const Bfloat16* const*, const float* const*, const double*,
                                float* const*, bool, int64_t, int64_t, int, cudaStream_t);
template cudaError_t mimic_mean(double*, float*, float*, const Half* const*, const Half* const*,
                                const float* const*, const double*, float* const*, bool, int64_t,
                                int64_t, int, cudaStream_t);

}  // namespace fastagg::cuda
