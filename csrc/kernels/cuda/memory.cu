// SPDX-License-Identifier: Apache-2.0
#include "kernels.h"
#include "rows.cuh"

namespace fastagg::cuda {
namespace {

// sums += weight * (row - old) for the rows of batch b, in float64, and kept = row. A row or old
// row that is computed here (params + update, reference + memory) is rounded to float32 before it
// is used, so `sums` stay the sums of what memory holds.
//   params       // this thread's columns; used if `models`
//   references   // [S], entries may be null, or nullptr
//   kept         // [S], may be `memory`, or nullptr
template <class T, int V, class Memory>
__device__ __forceinline__ void remember(double (&sums)[V], const Batch<T, V>& updates,
                                         const Memory* const* memory,
                                         const float* const* references, float* const* kept,
                                         const double* weights, const Floats<V>& params,
                                         bool models, int64_t S, int64_t b, Columns<V> columns) {
  Batch<Memory, V> stored;
  stored.load_rows(memory, S, b, columns);
#pragma unroll
  for (int j = 0; j < kHeldRows; ++j) {
    const int64_t s = row_of(blockDim.y, threadIdx.y, b, j);
    if (s >= S) continue;
    Floats<V> old = stored.row(j);
    if (references && references[s]) {
      const Floats<V> r = load<V>(references[s] + columns.begin, columns.count);
#pragma unroll
      for (int v = 0; v < V; ++v) old.at[v] = __fadd_rn(r.at[v], old.at[v]);
    }
    const double weight = weights[s];
    Floats<V> row = updates.row(j);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (models) row.at[v] = __fadd_rn(params.at[v], row.at[v]);
      const double change = static_cast<double>(row.at[v]) - static_cast<double>(old.at[v]);
      sums[v] = fma(weight, change, sums[v]);
    }
    if (kept) store<V>(kept[s] + columns.begin, row, columns.count);
  }
}

// memory_update in kernels.h.
template <class T, int V>
__global__ void __launch_bounds__(kBlockThreads, 1)
    memory_update_kernel(int64_t tasks, float* params, double* total, const T* const* updates,
                         float* const* memory, int64_t S, int64_t d, const double* weights,
                         double lr, double norm, bool models) {
  __shared__ double scratch[V * kBlockThreads];
  const int64_t batches = row_batches(S, blockDim.y);
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const auto columns = Columns<V>::of(task, d);
    const Floats<V> p = load<V>(params + columns.begin, columns.count);
    double sums[V] = {};
    for (int64_t b = 0; b < batches; ++b) {
      Batch<T, V> batch;
      batch.load_rows(updates, S, b, columns);
      const float* const* old = memory;
      remember(sums, batch, old, nullptr, memory, weights, p, models, S, b, columns);
    }
    sum_over_splits(sums, scratch);
    if (threadIdx.y > 0) continue;
    double now[V];
    load_doubles(now, total, columns);
#pragma unroll
    for (int v = 0; v < V; ++v) now[v] = __dadd_rn(now[v], sums[v]);
    store_doubles(total, now, columns);
    apply_total(params, now, columns, lr, norm, models);
  }
}

template <class T, int V>
__global__ void __launch_bounds__(kBlockThreads)
    memory_total_kernel(int64_t tasks, double* out, int32_t* peaks, const double* total,
                        const T* const* updates, const T* const* memory,
                        const float* const* references, int64_t S, int64_t d, const double* weights,
                        const float* params, float* const* kept) {
  __shared__ double scratch[V * kBlockThreads];
  const int64_t batches = row_batches(S, blockDim.y);
  PeaksOfRows largest;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const auto columns = Columns<V>::of(task, d);
    Floats<V> p{};
    if (params) p = load<V>(params + columns.begin, columns.count);
    double sums[V] = {};
    for (int64_t b = 0; b < batches; ++b) {
      Batch<T, V> batch;
      batch.load_rows(updates, S, b, columns);
      remember(sums, batch, memory, references, kept, weights, p, params != nullptr, S, b, columns);
      largest.add(batch, peaks, S, b);
    }
    sum_over_splits(sums, scratch);
    if (threadIdx.y > 0) continue;
    double now[V];
    load_doubles(now, total, columns);
#pragma unroll
    for (int v = 0; v < V; ++v) now[v] = __dadd_rn(now[v], sums[v]);
    store_doubles(out, now, columns);
  }
  largest.write(peaks, S, 0);
}

__global__ void __launch_bounds__(256)
    lerp_total_kernel(double* total, const double* end, int64_t d, double weight) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t k = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; k < d; k += stride) {
    const double change = __dadd_rn(end[k], -total[k]);
    total[k] = weight < 0.5 ? fma(weight, change, total[k]) : fma(change, weight - 1.0, end[k]);
  }
}

__global__ void __launch_bounds__(256)
    add_total_kernel(float* params, const double* total, int64_t d, double lr, double norm,
                     bool models) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t k = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; k < d; k += stride)
    params[k] = apply_total(params[k], total[k], lr, norm, models);
}

}  // namespace

template <class T>
cudaError_t memory_update(float* params, double* total, const T* const* updates,
                          float* const* memory, int64_t S, int64_t d, const double* weights,
                          double lr, double norm, bool models, int width, cudaStream_t stream) {
  return with_width(width, [&](auto w) {
    constexpr int V = decltype(w)::value;
    return launch_rows<V>(memory_update_kernel<T, V>, S, d, stream, params, total, updates, memory,
                          S, d, weights, lr, norm, models);
  });
}

template <class T>
cudaError_t memory_total(double* out, float* peaks, const double* total, const T* const* updates,
                         const T* const* memory, const float* const* references, int64_t S,
                         int64_t d, const double* weights, const float* params, float* const* kept,
                         int width, cudaStream_t stream) {
  auto* bits = reinterpret_cast<int32_t*>(peaks);
  if (cudaError_t error = cudaMemsetAsync(bits, 0, S * sizeof(int32_t), stream)) return error;
  return with_width(width, [&](auto w) {
    constexpr int V = decltype(w)::value;
    return launch_rows<V>(memory_total_kernel<T, V>, S, d, stream, out, bits, total, updates,
                          memory, references, S, d, weights, params, kept);
  });
}

cudaError_t lerp_total(double* total, const double* end, int64_t d, double weight,
                       cudaStream_t stream) {
  if (d == 0) return cudaSuccess;
  int blocks = 0;
  if (cudaError_t error = resident_blocks(lerp_total_kernel, 256, ceil_div(d, 256), &blocks))
    return error;
  lerp_total_kernel<<<blocks, 256, 0, stream>>>(total, end, d, weight);
  return cudaGetLastError();
}

cudaError_t add_total(float* params, const double* total, int64_t d, double lr, double norm,
                      bool models, cudaStream_t stream) {
  if (d == 0) return cudaSuccess;
  int blocks = 0;
  if (cudaError_t error = resident_blocks(add_total_kernel, 256, ceil_div(d, 256), &blocks))
    return error;
  add_total_kernel<<<blocks, 256, 0, stream>>>(params, total, d, lr, norm, models);
  return cudaGetLastError();
}

template cudaError_t memory_update(float*, double*, const float* const*, float* const*, int64_t,
                                   int64_t, const double*, double, double, bool, int, cudaStream_t);
template cudaError_t memory_update(float*, double*, const Bfloat16* const*, float* const*, int64_t,
                                   int64_t, const double*, double, double, bool, int, cudaStream_t);
template cudaError_t memory_update(float*, double*, const Half* const*, float* const*, int64_t,
                                   int64_t, const double*, double, double, bool, int, cudaStream_t);
template cudaError_t memory_total(double*, float*, const double*, const float* const*,
                                  const float* const*, const float* const*, int64_t, int64_t,
                                  const double*, const float*, float* const*, int, cudaStream_t);
template cudaError_t memory_total(double*, float*, const double*, const Bfloat16* const*,
                                  const Bfloat16* const*, const float* const*, int64_t, int64_t,
                                  const double*, const float*, float* const*, int, cudaStream_t);
template cudaError_t memory_total(double*, float*, const double*, const Half* const*,
                                  const Half* const*, const float* const*, int64_t, int64_t,
                                  const double*, const float*, float* const*, int, cudaStream_t);

}  // namespace fastagg::cuda
