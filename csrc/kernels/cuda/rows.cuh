// SPDX-License-Identifier: Apache-2.0
// Shared by the one-pass row operations: how a thread block passes over its columns of S rows. It
// copies the addresses and weights of rows to shared memory once, and then takes tasks: columns of
// all rows. The vectors that an operation changes are loaded before the rows, so that nobody waits
// for them at the end. The arithmetic is written with intrinsics (fmaf, __fsub_rn, ...), because
// two kernels must have the same bits.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "../weight_scale.h"
#include "launch.cuh"
#include "row_layout.h"

namespace fastagg::cuda {

// The columns of one thread in one task. A task is the columns that a thread block takes at a time.
template <int V>
struct Columns {
  int64_t begin;
  int count;  // of them that exist: V, or less at the end of d (0 and below: none)

  __device__ static Columns of(int64_t task, int64_t d) {
    const int64_t begin = (task * blockDim.x + threadIdx.x) * V;
    return {begin, static_cast<int>(at_most(d - begin, V))};
  }
};

__device__ __forceinline__ int thread_of_block() {
  return static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
}
__device__ __forceinline__ RowBlock shape_of_block() {
  return {static_cast<int>(blockDim.x), static_cast<int>(blockDim.y)};
}

// The places of the tables of a thread block in its shared memory.
class TablePlaces {
 public:
  __device__ TablePlaces(float4* shared, int width, int S)
      : shared_(reinterpret_cast<char*>(shared)),
        next_(row_shared(shape_of_block(), width, S, 0).tables),
        S_(S) {}
  __device__ int S() const { return S_; }
  template <class T>
  __device__ T* take() {
    static_assert(sizeof(T) <= 8);
    T* const place = reinterpret_cast<T*>(shared_ + next_);
    next_ += S_ * 8;
    return place;
  }

 private:
  char* shared_;
  int next_;
  int S_;
};

// A table: entry s is make(s), which a thread block computes once if it has a place for the table.
// __syncthreads is needed before the first use.
template <class Make>
class Staged {
 public:
  using T = std::decay_t<decltype(std::declval<const Make&>()(int{}))>;
  __device__ Staged(TablePlaces& places, const Make& make)
      : make_(make), here_(places.take<T>()), staged_(places.S() <= kStagedRows) {
    if (staged_)
      for (int s = thread_of_block(); s < places.S(); s += blockDim.x * blockDim.y)
        here_[s] = make(s);
  }
  __device__ __forceinline__ T operator[](int s) const { return staged_ ? here_[s] : make_(s); }

 private:
  Make make_;
  T* here_;
  bool staged_;
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

  // The rows minus `base`, rounded to float32.
  __device__ __forceinline__ Batch<float, V> minus(const Floats<V>& base) const {
    Batch<float, V> result;
#pragma unroll
    for (int j = 0; j < kHeldRows; ++j)
#pragma unroll
      for (int v = 0; v < V; ++v) result.x[j].at[v] = __fsub_rn(widened(x[j].at[v]), base.at[v]);
    return result;
  }

  // Loads batch `batch`, with zeros past S: all addresses first, then all loads.
  template <class Table>
  __device__ __forceinline__ void load_rows(const Table& rows, int S, int batch,
                                            Columns<V> columns) {
    const T* from[kHeldRows];
#pragma unroll
    for (int j = 0; j < kHeldRows; ++j) {
      const int s = row_of(blockDim.y, threadIdx.y, batch, j);
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
  __device__ __forceinline__ void add_to(double (&sums)[V], int S, int batch,
                                         const Factor& factor) const {
    float part[V] = {};
#pragma unroll
    for (int j = 0; j < kHeldRows; ++j) {
      const int s = row_of(blockDim.y, threadIdx.y, batch, j);
      const float f = s < S ? factor(s) : 0.0f;
      if (s < S)
#pragma unroll
        for (int v = 0; v < V; ++v) part[v] = fmaf(f, widened(x[j].at[v]), part[v]);
    }
#pragma unroll
    for (int v = 0; v < V; ++v) sums[v] = __dadd_rn(sums[v], static_cast<double>(part[v]));
  }
};

// Adds up the sums of splits.
template <int V>
class SplitSums {
 public:
  __device__ SplitSums(float4* shared, int S)
      : shared_(reinterpret_cast<char*>(shared)), at_(row_shared(shape_of_block(), V, S, 0)) {}

  // sums[n] = the sum over all splits for column n of the thread's share, of the sums of V columns
  // that its threads have. All threads of a thread block must call it, for one task after the
  // other.
  __device__ __forceinline__ void add_up(double (&sums)[V]) {
    if (blockDim.y == 1) return;
    auto* const place = reinterpret_cast<double*>(shared_ + turn_ * at_.place);
    turn_ ^= 1;
    Vector<double, V> own;
#pragma unroll
    for (int v = 0; v < V; ++v) own.at[v] = sums[v];
    reinterpret_cast<Vector<double, V>*>(place)[thread_of_block()] = own;
    __syncthreads();
    constexpr int kLeaves = V < 2 ? 2 : V;
    if constexpr (kLeaves > 4)
      if (blockDim.y == 4) return add<4>(sums, place);
    if constexpr (kLeaves > 2)
      if (blockDim.y == 2) return add<2>(sums, place);
    add<kLeaves>(sums, place);
  }

  // The numbers of the thread's own V columns, from those that threads have for their shares. All
  // threads of a thread block must call it, after add_up.
  __device__ __forceinline__ Floats<V> of_columns(const Floats<V>& of_share) {
    if (blockDim.y == 1) return of_share;
    auto* const means = reinterpret_cast<float*>(shared_ + at_.means);
    const Share share =
        share_of(shape_of_block(), V, 0, int64_t{blockDim.x} * V, thread_of_block());
#pragma unroll
    for (int n = 0; n < V; ++n)
      if (share.has(n)) means[share.column(n)] = of_share.at[n];
    __syncthreads();
    return reinterpret_cast<const Floats<V>*>(means)[threadIdx.x];
  }

 private:
  template <int kLeaves>
  __device__ __forceinline__ void add(double (&sums)[V], const double* place) {
    const int columns = static_cast<int>(blockDim.x) * V;
    const int parts = static_cast<int>(blockDim.y) / kLeaves, part = thread_of_block() % parts;
    const int apart = static_cast<int>(blockDim.x) * kLeaves;  // columns of the shares of a thread
#pragma unroll
    for (int n = 0; n < (V + kLeaves - 1) / kLeaves; ++n) {
      const int k = thread_of_block() / parts + n * apart;
      double x[kLeaves];
#pragma unroll
      for (int m = 0; m < kLeaves; ++m)
        x[m] = k < columns ? place[(part + m * parts) * columns + k] : 0.0;
#pragma unroll
      for (int half = kLeaves / 2; half > 0; half /= 2)
#pragma unroll
        for (int m = 0; m < half; ++m) x[m] = __dadd_rn(x[m], x[m + half]);
      for (int half = parts / 2; half > 0; half /= 2)
        x[0] = __dadd_rn(x[0], __shfl_xor_sync(kAllLanes, x[0], half));
      sums[n] = x[0];
    }
  }

  char* shared_;
  RowShared at_;
  int turn_ = 0;
};

// Load and store what a thread has of a vector.
template <int V>
__device__ __forceinline__ Share share_of_thread(int64_t task, int64_t d) {
  return share_of(shape_of_block(), V, task, d, thread_of_block());
}
template <int V>
__device__ __forceinline__ Floats<V> load_share(const float* from, Share share) {
  if (share.stride == 1) return load<V>(from + share.begin, share.count);
  Floats<V> x;
#pragma unroll
  for (int n = 0; n < V; ++n) x.at[n] = share.has(n) ? from[share.column(n)] : 0.0f;
  return x;
}
template <int V>
__device__ __forceinline__ void store_share(float* to, const Floats<V>& x, Share share) {
  if (share.stride == 1) return store<V>(to + share.begin, x, share.count);
#pragma unroll
  for (int n = 0; n < V; ++n)
    if (share.has(n)) to[share.column(n)] = x.at[n];
}
template <int V>
__device__ __forceinline__ void load_share(double (&x)[V], const double* from, Share share) {
#pragma unroll
  for (int n = 0; n < V; ++n) x[n] = share.has(n) ? from[share.column(n)] : 0.0;
}
template <int V>
__device__ __forceinline__ void store_share(double* to, const double (&x)[V], Share share) {
#pragma unroll
  for (int n = 0; n < V; ++n)
    if (share.has(n)) to[share.column(n)] = x[n];
}

// The common factor of S weights (weight_scale.h). All threads of a warp must call it.
__device__ __forceinline__ double factor_of(const double* weights, int S) {
  double smallest = INFINITY, largest = 0.0, total = 0.0;
  for (int s = (threadIdx.y * blockDim.x + threadIdx.x) % kWarp; s < S; s += kWarp) {
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
  __device__ __forceinline__ void add(const Batch<T, V>& batch, int32_t* peaks, int S, int number) {
#pragma unroll
    for (int j = 0; j < kHeldRows; ++j) bits[j] = max(bits[j], magnitude_bits(batch.row(j)));
    if (row_batches(S, blockDim.y) > 1) write(peaks, S, number);
  }
  // Raises peaks[s] to the largest bits of the threads of this warp that have row s. A maximum of
  // integers is the same in any order. Most tasks find a peak that is high enough: reading it costs
  // less than raising it, and an old value only costs the raising. All threads of a warp must call
  // this.
  __device__ __forceinline__ void write(int32_t* peaks, int S, int number) {
    const int lanes = min(static_cast<int>(blockDim.x), kWarp);  // a power of two
    int32_t before[kHeldRows];
#pragma unroll
    for (int j = 0; j < kHeldRows; ++j) {
      for (int offset = lanes / 2; offset > 0; offset /= 2)
        bits[j] = max(bits[j], __shfl_xor_sync(kAllLanes, bits[j], offset));
      const int s = row_of(blockDim.y, threadIdx.y, number, j);
      const bool writes = threadIdx.x % lanes == 0 && s < S;
      before[j] = writes ? __ldcg(peaks + s) : 0x7fffffff;
    }
#pragma unroll
    for (int j = 0; j < kHeldRows; ++j) {
      if (bits[j] > before[j])
        atomicMax(peaks + row_of(blockDim.y, threadIdx.y, number, j), bits[j]);
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

// params = apply_total(p, total, ...), for a share, whose old parameters are p.
template <int V>
__device__ __forceinline__ void apply_total(float* params, Floats<V> p, const double (&total)[V],
                                            Share share, double lr, double norm, bool models) {
#pragma unroll
  for (int n = 0; n < V; ++n) p.at[n] = apply_total(p.at[n], total[n], lr, norm, models);
  store_share<V>(params, p, share);
}

// Launches kernel(tasks, args...) over d columns of S rows, of which it has `tables` tables.
template <int V, class... Parameters, class... Args>
cudaError_t launch_rows(RowBlock block, void (*kernel)(int64_t, Parameters...), int tables,
                        int64_t S, int64_t d, cudaStream_t stream, Args... args) {
  const int64_t tasks = ceil_div(d, int64_t{block.vectors} * V);
  if (tasks == 0) return cudaSuccess;
  const int64_t shared = row_shared(block, V, S, tables).bytes;
  if (shared > kUnaskedShared) {
    // The limit is one of the kernel, not of this launch, and other threads may launch the kernel
    // for other numbers of rows at the same time. So all of them set the most that it ever needs.
    const int64_t most = row_shared(row_block(kStagedRows), V, kStagedRows, tables).bytes;
    if (cudaError_t error =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(std::max(shared, most))))
      return error;
  }
  int blocks = 0;
  if (cudaError_t error =
          resident_blocks(kernel, block.vectors * block.splits, tasks, &blocks, shared))
    return error;
  kernel<<<blocks, dim3(block.vectors, block.splits), shared, stream>>>(tasks, args...);
  return cudaGetLastError();
}
template <int V, class... Parameters, class... Args>
cudaError_t launch_rows(void (*kernel)(int64_t, Parameters...), int tables, int64_t S, int64_t d,
                        cudaStream_t stream, Args... args) {
  return launch_rows<V>(row_block(S), kernel, tables, S, d, stream, args...);
}

}  // namespace fastagg::cuda
