// SPDX-License-Identifier: Apache-2.0
#include <type_traits>

#include "kernels.h"
#include "rows.cuh"

namespace fastagg::cuda {
namespace {

// sums += equal * (update + weight * correction), summed over the rows of batch b, whose updates
// stay in `updates`.
//   references   // [S], entries may be null, or nullptr
//   weights      // [S], or nullptr for ones
template <class T, int V, class Own>
__device__ __forceinline__ void add_batch(double (&sums)[V], Batch<T, V>& updates,
                                          const T* const* rows, Own* const* corrections,
                                          const float* const* references, const double* weights,
                                          int64_t S, int64_t b, float equal, Columns<V> columns) {
  Batch<std::remove_const_t<Own>, V> stored;
  updates.load_rows(rows, S, b, columns);
  stored.load_rows(corrections, S, b, columns);
  Batch<float, V> own;
#pragma unroll
  for (int j = 0; j < kHeldRows; ++j) own.x[j] = stored.row(j);
  if (references) {
#pragma unroll
    for (int j = 0; j < kHeldRows; ++j) {
      const int64_t s = row_of(blockDim.y, threadIdx.y, b, j);
      const float* reference = s < S ? references[s] : nullptr;
      if (!reference) continue;
      const Floats<V> r = load<V>(reference + columns.begin, columns.count);
#pragma unroll
      for (int v = 0; v < V; ++v) own.x[j].at[v] = __fsub_rn(r.at[v], own.x[j].at[v]);
    }
  }
  updates.add_to(sums, S, b, [&](int64_t) { return equal; });
  own.add_to(sums, S, b, [&](int64_t s) {
    return weights ? static_cast<float>(__dmul_rn(weights[s], equal)) : equal;
  });
}

// sums *= 1/S over `equal`, the part of 1/S that the rows have been multiplied by.
template <int V>
__device__ __forceinline__ void finish_mean(double (&sums)[V], int64_t S, float equal) {
  const double factor = 1.0 / (static_cast<double>(S) * equal);
#pragma unroll
  for (int v = 0; v < V; ++v) sums[v] = __dmul_rn(sums[v], factor);
}

// kept = updates for the rows of batch b.
template <class T, int V>
__device__ __forceinline__ void keep_rows(float* const* kept, const Batch<T, V>& updates, int64_t S,
                                          int64_t b, Columns<V> columns) {
#pragma unroll
  for (int j = 0; j < kHeldRows; ++j) {
    const int64_t s = row_of(blockDim.y, threadIdx.y, b, j);
    if (s < S) store<V>(kept[s] + columns.begin, updates.row(j), columns.count);
  }
}

// corrections = v - updates for the rows of batch b.
template <class T, int V>
__device__ __forceinline__ void write_corrections(float* const* corrections, const double (&v)[V],
                                                  const Batch<T, V>& updates, int64_t S, int64_t b,
                                                  Columns<V> columns) {
#pragma unroll
  for (int j = 0; j < kHeldRows; ++j) {
    const int64_t s = row_of(blockDim.y, threadIdx.y, b, j);
    if (s >= S) continue;
    Floats<V> c = updates.row(j);
#pragma unroll
    for (int k = 0; k < V; ++k) c.at[k] = __fsub_rn(static_cast<float>(v[k]), c.at[k]);
    store<V>(corrections[s] + columns.begin, c, columns.count);
  }
}

template <class T, int V>
__global__ void __launch_bounds__(kBlockThreads)
    mimic_kernel(int64_t tasks, float* params, const T* const* updates, float* const* corrections,
                 int64_t S, int64_t d, float equal, double lr) {
  __shared__ double scratch[V * kBlockThreads];
  const int64_t batches = row_batches(S, blockDim.y);
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const auto columns = Columns<V>::of(task, d);
    double sums[V] = {};
    Batch<T, V> batch;
    for (int64_t b = 0; b < batches; ++b)
      add_batch(sums, batch, updates, corrections, nullptr, nullptr, S, b, equal, columns);
    sum_over_splits(sums, scratch);
    finish_mean(sums, S, equal);
    if (threadIdx.y == 0) apply_total(params, sums, columns, lr, 1.0, false);
    for (int64_t b = 0; b < batches; ++b) {
      if (batches > 1) batch.load_rows(updates, S, b, columns);
      write_corrections(corrections, sums, batch, S, b, columns);
    }
  }
}

template <class T, int V>
__global__ void __launch_bounds__(kBlockThreads, 1)
    mimic_mean_kernel(int64_t tasks, double* v_out, float* rounded, int32_t* peaks,
                      const T* const* updates, const T* const* corrections,
                      const float* const* references, const double* weights, float* const* kept,
                      bool copies, int64_t S, int64_t d, float equal) {
  __shared__ double scratch[V * kBlockThreads];
  const int64_t batches = row_batches(S, blockDim.y);
  PeaksOfRows largest;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const auto columns = Columns<V>::of(task, d);
    double sums[V] = {};
    Batch<T, V> batch;
    for (int64_t b = 0; b < batches; ++b) {
      add_batch(sums, batch, updates, corrections, references, weights, S, b, equal, columns);
      largest.add(batch, peaks, S, b);
      if (kept && copies) keep_rows(kept, batch, S, b, columns);
    }
    sum_over_splits(sums, scratch);
    finish_mean(sums, S, equal);
    if (kept && !copies)
      for (int64_t b = 0; b < batches; ++b) {
        if (batches > 1) batch.load_rows(updates, S, b, columns);
        write_corrections(kept, sums, batch, S, b, columns);
      }
    if (threadIdx.y > 0) continue;
    Floats<V> single;
#pragma unroll
    for (int v = 0; v < V; ++v) single.at[v] = static_cast<float>(sums[v]);
    store_doubles(v_out, sums, columns);
    store<V>(rounded + columns.begin, single, columns.count);
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
    return launch_rows<V>(mimic_kernel<T, V>, S, d, stream, params, updates, corrections, S, d,
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
    return launch_rows<V>(mimic_mean_kernel<T, V>, S, d, stream, v, rounded, bits, updates,
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
