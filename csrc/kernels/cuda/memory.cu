// SPDX-License-Identifier: Apache-2.0
#include "kernels.h"
#include "rows.cuh"
#include "total_sums.cuh"

namespace fastagg::cuda {
namespace {

// sums += weight * (row - old) for the rows of batch b, in float64, and kept = row. A row or old
// row that is computed here (params + update, reference + memory) is rounded to float32 before it
// is used, so `sums` stay the sums of what memory holds.
//   params       // [d], or nullptr: nothing is added to updates
//   references   // entries may be null; used if `referred`
//   kept         // may be `memory`; used if `keeps`
//   faded        // used if kFaded
template <class Memory, class T, int V, bool kFaded, class Rows, class References, class Kept,
          class Weights>
__device__ __forceinline__ void remember(TotalSums<V, kFaded>& sums, const Batch<T, V>& updates,
                                         const Rows& memory, bool referred,
                                         const References& references, bool keeps, const Kept& kept,
                                         const Weights& weights, const FadedTotal& faded,
                                         const float* params, int S, int b, Columns<V> columns) {
  Batch<Memory, V> stored;
  stored.load_rows(memory, S, b, columns);
  Floats<V> p{};  // not earlier: registers
  if (params) p = load<V>(params + columns.begin, columns.count);
#pragma unroll
  for (int j = 0; j < kHeldRows; ++j) {
    const int s = row_of(blockDim.y, threadIdx.y, b, j);
    if (s >= S) continue;
    Floats<V> old = stored.row(j);
    const float* const reference = referred ? references[s] : nullptr;
    if (reference) {
      const Floats<V> r = load<V>(reference + columns.begin, columns.count);
#pragma unroll
      for (int v = 0; v < V; ++v) old.at[v] = __fadd_rn(r.at[v], old.at[v]);
    }
    const double weight = weights[s];
    Floats<V> row = updates.row(j);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (params) row.at[v] = __fadd_rn(p.at[v], row.at[v]);
      sums.add(v, weight, faded, s, row.at[v], old.at[v]);
    }
    if (keeps) store<V>(kept[s] + columns.begin, row, columns.count);
  }
}

// memory_update in kernels.h.
template <class T, int V>
__global__ void __launch_bounds__(kBlockThreads, 1)
    memory_update_kernel(int64_t tasks, float* params, double* total, const T* const* updates,
                         float* const* memory, int S, int64_t d, const double* weights, double lr,
                         double norm, bool models) {
  extern __shared__ float4 shared[];
  const int batches = row_batches(S, blockDim.y);
  TablePlaces places(shared, V, S);
  const Staged rows(places, [&](int s) { return updates[s]; });
  const Staged own(places, [&](int s) { return memory[s]; });
  const Staged factors(places, [&](int s) { return weights[s]; });
  __syncthreads();
  SplitSums<V> splits(shared, S);
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const auto columns = Columns<V>::of(task, d);
    const Share share = share_of_thread<V>(task, d);
    double now[V];
    TotalSums<V, false> sums;
    load_share<V>(now, total, share);
    for (int b = 0; b < batches; ++b) {
      Batch<T, V> batch;
      batch.load_rows(rows, S, b, columns);
      remember<float>(sums, batch, own, false, own, true, own, factors, {},
                      models ? params : nullptr, S, b, columns);
    }
    const Floats<V> old = load_share<V>(params, share);  // registers have no room for it earlier
    sums.store(splits, now, total, {}, share);
    apply_total(params, old, now, share, lr, norm, models);
  }
}

template <class T, int V, bool kFaded>
__global__ void __launch_bounds__(kBlockThreads, 1)
    memory_total_kernel(int64_t tasks, double* out, int32_t* peaks, const double* total,
                        const T* const* updates, const T* const* memory,
                        const float* const* references, int S, int64_t d, const double* weights,
                        const float* params, float* const* kept, FadedTotal faded) {
  extern __shared__ float4 shared[];
  const int batches = row_batches(S, blockDim.y);
  TablePlaces places(shared, V, S);
  const Staged rows(places, [&](int s) { return updates[s]; });
  const Staged own(places, [&](int s) { return memory[s]; });
  const Staged factors(places, [&](int s) { return weights[s]; });
  const Staged bases(places, [&](int s) { return references ? references[s] : nullptr; });
  const Staged to(places, [&](int s) { return kept ? kept[s] : nullptr; });
  __syncthreads();
  SplitSums<V> splits(shared, S);
  PeaksOfRows largest;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const auto columns = Columns<V>::of(task, d);
    const Share share = share_of_thread<V>(task, d);
    double now[V];
    TotalSums<V, kFaded> sums;
    load_share<V>(now, total, share);
    for (int b = 0; b < batches; ++b) {
      Batch<T, V> batch;
      batch.load_rows(rows, S, b, columns);
      // With a second sum there are neither references nor params, and registers are scarce.
      remember<T>(sums, batch, own, !kFaded && references != nullptr, bases, kept != nullptr, to,
                  factors, faded, kFaded ? nullptr : params, S, b, columns);
      largest.add(batch, peaks, S, b);
    }
    sums.store(splits, now, out, faded, share);
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

// Every thread decides from the peak, so nobody has to wait for a decision.
__global__ void __launch_bounds__(256)
    apply_total_kernel(float* params, bool* applied, const double* total, const float* peak,
                       int64_t d, double lr, double norm, double added, double limit) {
  const double known = *peak;
  const bool fits = known < INFINITY && added < INFINITY &&  // not with a NaN
                    known + lr * added <= limit;
  if (blockIdx.x == 0 && threadIdx.x == 0) *applied = fits;
  if (!fits) return;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t k = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; k < d; k += stride)
    params[k] = apply_total(params[k], total[k], lr, norm, false);
}

}  // namespace

template <class T>
cudaError_t memory_update(float* params, double* total, const T* const* updates,
                          float* const* memory, int64_t S, int64_t d, const double* weights,
                          double lr, double norm, bool models, int width, cudaStream_t stream) {
  return with_width(width, [&](auto w) {
    constexpr int V = decltype(w)::value;
    return launch_rows<V>(memory_update_kernel<T, V>, 3, S, d, stream, params, total, updates,
                          memory, S, d, weights, lr, norm, models);
  });
}

template <class T>
cudaError_t memory_total(double* out, float* peaks, const double* total, const T* const* updates,
                         const T* const* memory, const float* const* references, int64_t S,
                         int64_t d, const double* weights, const float* params, float* const* kept,
                         const FadedTotal& faded, int width, cudaStream_t stream) {
  auto* bits = reinterpret_cast<int32_t*>(peaks);
  if (cudaError_t error = cudaMemsetAsync(bits, 0, S * sizeof(int32_t), stream)) return error;
  return with_width(width, [&](auto w) {
    constexpr int V = decltype(w)::value;
    return with_faded(faded, [&](auto fades) {
      return launch_rows<V>(memory_total_kernel<T, V, fades()>, 5, S, d, stream, out, bits, total,
                            updates, memory, references, S, d, weights, params, kept, faded);
    });
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

cudaError_t apply_total(float* params, bool* applied, const double* total, const float* peak,
                        int64_t d, double lr, double norm, double added, double limit,
                        cudaStream_t stream) {
  int blocks = 0;
  if (cudaError_t error =
          resident_blocks(apply_total_kernel, 256, at_least(ceil_div(d, 256), 1), &blocks))
    return error;
  apply_total_kernel<<<blocks, 256, 0, stream>>>(params, applied, total, peak, d, lr, norm, added,
                                                 limit);
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
                                  const double*, const float*, float* const*, const FadedTotal&,
                                  int, cudaStream_t);
template cudaError_t memory_total(double*, float*, const double*, const Bfloat16* const*,
                                  const Bfloat16* const*, const float* const*, int64_t, int64_t,
                                  const double*, const float*, float* const*, const FadedTotal&,
                                  int, cudaStream_t);
template cudaError_t memory_total(double*, float*, const double*, const Half* const*,
                                  const Half* const*, const float* const*, int64_t, int64_t,
                                  const double*, const float*, float* const*, const FadedTotal&,
                                  int, cudaStream_t);

}  // namespace fastagg::cuda
