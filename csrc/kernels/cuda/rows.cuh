// SPDX-License-Identifier: Apache-2.0
// Shared by the one-pass row operations: how a thread block passes over its columns of S rows. The
// arithmetic is written with intrinsics (fmaf, __fsub_rn, ...), because two kernels must have the
// same bits.
#pragma once

#include "../weight_scale.h"
#include "launch.cuh"
#include "row_layout.h"

namespace fastagg::cuda {

// The columns of one thread in one task. A task is the columns that a thread block takes at a time.
template <int V>
struct Columns {
  int64_t begin;
  int64_t count;  // of them that exist: V or more, or less at the end of d (0 and below: none)

  __device__ static Columns of(int64_t task, int64_t d) {
    const int64_t begin = (task * blockDim.x + threadIdx.x) * V;
    return {begin, d - begin};
  }
};

// The rows of a thread in one batch (row_layout.h), in its columns.
template <class T, int V>
struct Batch {
  Vector<T, V> x[kHeldRows];

  __device__ __forceinline__ Floats<V> row(int j) const {
    Floats<V> wide;
#pragma unroll
    for (int v = 0; v < V; ++v) wide.at[v] = widened(x[j].at[v]);
    return wide;
  }

  // Loads batch `batch`, with zeros past S: all addresses first, then all loads.
  template <class Row>  // T or const T
  __device__ __forceinline__ void load_rows(Row* const* rows, int64_t S, int64_t batch,
                                            Columns<V> columns) {
    const T* from[kHeldRows];
#pragma unroll
    for (int j = 0; j < kHeldRows; ++j) {
      const int64_t s = row_of(blockDim.y, threadIdx.y, batch, j);
      from[j] = s < S ? rows[s] + columns.begin : nullptr;
      x[j] = Vector<T, V>{};
    }
    if (columns.count >= V) {
#pragma unroll
      for (int j = 0; j < kHeldRows; ++j)
        if (from[j]) x[j] = *reinterpret_cast<const Vector<T, V>*>(from[j]);
    } else {
#pragma unroll
      for (int j = 0; j < kHeldRows; ++j)
        if (from[j]) x[j] = load<V>(from[j], columns.count);
    }
  }

  // sums += sum_j factor(s) * x[j], with s the row of x[j]. The sum over j is float32.
  template <class Factor>
  __device__ __forceinline__ void add_to(double (&sums)[V], int64_t S, int64_t batch,
                                         const Factor& factor) const {
    float part[V] = {};
#pragma unroll
    for (int j = 0; j < kHeldRows; ++j) {
      const int64_t s = row_of(blockDim.y, threadIdx.y, batch, j);
      const float f = s < S ? factor(s) : 0.0f;
      if (s < S)
#pragma unroll
        for (int v = 0; v < V; ++v) part[v] = fmaf(f, widened(x[j].at[v]), part[v]);
    }
#pragma unroll
    for (int v = 0; v < V; ++v) sums[v] = __dadd_rn(sums[v], static_cast<double>(part[v]));
  }
};

// Adds up the sums of all splits by a tree; every thread gets the result. All threads of a thread
// block must call it.
//   scratch   // [V * threads of the thread block] in shared memory
template <int V>
__device__ __forceinline__ void sum_over_splits(double (&sums)[V], double* scratch) {
  if (blockDim.y == 1) return;
  const auto at = [&](int v, unsigned y) -> double& {
    return scratch[(v * blockDim.y + y) * blockDim.x + threadIdx.x];
  };
#pragma unroll
  for (int v = 0; v < V; ++v) at(v, threadIdx.y) = sums[v];
  for (unsigned half = blockDim.y / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y < half)
#pragma unroll
      for (int v = 0; v < V; ++v)
        at(v, threadIdx.y) = __dadd_rn(at(v, threadIdx.y), at(v, threadIdx.y + half));
  }
  __syncthreads();
#pragma unroll
  for (int v = 0; v < V; ++v) sums[v] = at(v, 0);
  __syncthreads();
}

// The common factor of S weights (weight_scale.h). All threads of a warp must call it.
__device__ __forceinline__ double factor_of(const double* weights, int64_t S) {
  double smallest = INFINITY, largest = 0.0, total = 0.0;
  for (int64_t s = (threadIdx.y * blockDim.x + threadIdx.x) % kWarp; s < S; s += kWarp) {
    const double magnitude = fabs(weights[s]);
    if (magnitude > 0.0) smallest = fmin(smallest, magnitude);
    largest = fmax(largest, magnitude);
    total = __dadd_rn(total, magnitude);
  }
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    smallest = fmin(smallest, __shfl_xor_sync(kAllLanes, smallest, offset));
    largest = fmax(largest, __shfl_xor_sync(kAllLanes, largest, offset));
    total = __dadd_rn(total, __shfl_xor_sync(kAllLanes, total, offset));
  }
  return common_factor(smallest, largest, total);
}

// Raises peaks[s] to the largest `bits` of the threads of this warp that have row s. A maximum of
// integers is the same in any order. All threads of a warp must call it.
__device__ __forceinline__ void raise_peak(int32_t* peaks, int64_t s, int64_t S, int32_t bits) {
  const int lanes = min(static_cast<int>(blockDim.x), kWarp);  // a power of two
  for (int offset = lanes / 2; offset > 0; offset /= 2)
    bits = max(bits, __shfl_xor_sync(kAllLanes, bits, offset));
  if (threadIdx.x % lanes == 0 && s < S && bits > 0) atomicMax(peaks + s, bits);
}

template <int V>
__device__ __forceinline__ int32_t magnitude_bits(const Floats<V>& x) {
  int32_t bits = 0;
#pragma unroll
  for (int v = 0; v < V; ++v) bits = max(bits, magnitude_bits(x.at[v]));
  return bits;
}

// The largest magnitudes of a thread's rows over all its columns. With one batch, they are written
// at the end; with more batches, after each.
struct PeaksOfRows {
  int32_t bits[kHeldRows] = {};

  template <class T, int V>
  __device__ __forceinline__ void add(const Batch<T, V>& batch, int32_t* peaks, int64_t S,
                                      int64_t number) {
#pragma unroll
    for (int j = 0; j < kHeldRows; ++j) bits[j] = max(bits[j], magnitude_bits(batch.row(j)));
    if (row_batches(S, blockDim.y) > 1) write(peaks, S, number);
  }
  __device__ __forceinline__ void write(int32_t* peaks, int64_t S, int64_t number) {
#pragma unroll
    for (int j = 0; j < kHeldRows; ++j) {
      raise_peak(peaks, row_of(blockDim.y, threadIdx.y, number, j), S, bits[j]);
      bits[j] = 0;
    }
  }
};

// The last step of a round, with the same bits in every kernel: p + lr * norm * total, or
// p + lr * (norm * total - p) if `models`.
__device__ __forceinline__ float apply_total(float p, double total, double lr, double norm,
                                             bool models) {
  const double old = p, mean = __dmul_rn(norm, total);
  return static_cast<float>(__dadd_rn(old, __dmul_rn(lr, models ? __dadd_rn(mean, -old) : mean)));
}

template <int V>
__device__ __forceinline__ void apply_total(float* params, const double (&total)[V],
                                            Columns<V> columns, double lr, double norm,
                                            bool models) {
  Floats<V> p = load<V>(params + columns.begin, columns.count);
#pragma unroll
  for (int v = 0; v < V; ++v) p.at[v] = apply_total(p.at[v], total[v], lr, norm, models);
  store<V>(params + columns.begin, p, columns.count);
}

// Load and store V doubles; only the first `columns.count` are accessed.
template <int V>
__device__ __forceinline__ void load_doubles(double (&x)[V], const double* from,
                                             Columns<V> columns) {
#pragma unroll
  for (int v = 0; v < V; ++v) x[v] = v < columns.count ? from[columns.begin + v] : 0.0;
}
template <int V>
__device__ __forceinline__ void store_doubles(double* to, const double (&x)[V],
                                              Columns<V> columns) {
#pragma unroll
  for (int v = 0; v < V; ++v)
    if (v < columns.count) to[columns.begin + v] = x[v];
}

// Launches kernel(tasks, args...) over d columns of S rows.
template <int V, class... Parameters, class... Args>
cudaError_t launch_rows(void (*kernel)(int64_t, Parameters...), int64_t S, int64_t d,
                        cudaStream_t stream, Args... args) {
  const RowBlock block = row_block(S);
  const int64_t tasks = ceil_div(d, int64_t{block.vectors} * V);
  if (tasks == 0) return cudaSuccess;
  int blocks = 0;
  if (cudaError_t error = resident_blocks(kernel, block.vectors * block.splits, tasks, &blocks))
    return error;
  kernel<<<blocks, dim3(block.vectors, block.splits), 0, stream>>>(tasks, args...);
  return cudaGetLastError();
}

}  // namespace fastagg::cuda
