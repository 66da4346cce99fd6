// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include "../sort_keys.h"
#include "../sort_network.h"
#include "kernels.h"
#include "launch.cuh"
#include "sort_layout.h"

namespace fastagg::cuda {
namespace {

// What is computed from a sorted column of S keys, `stride` apart: the mean of positions
// [begin, begin + count), or, if `around_median`, of the `count` values nearest to the median.
struct Statistic {
  bool around_median;
  int64_t begin, count;

  // The operations and their order are those of cpu/sorted_columns.cpp, so the bits are, too.
  __device__ __forceinline__ float of(const int32_t* keys, int stride, int64_t S) const {
    const auto at = [&](int64_t s) { return static_cast<double>(float_of_key(keys[s * stride])); };
    int64_t first = begin;
    if (around_median) {
      const double median = __dadd_rn(at((S - 1) / 2), at(S / 2)) / 2.0;
      first = 0;
      for (int64_t s = 0; s + count < S; ++s)
        first += __dadd_rn(median, -at(s)) > __dadd_rn(at(s + count), -median);
    }
    double sum = 0.0;
    for (int64_t s = first; s < first + count; ++s) sum = __dadd_rn(sum, at(s));
    return static_cast<float>(sum / static_cast<double>(count));
  }
};

__device__ __forceinline__ void exchange(int32_t& a, int32_t& b) {
  const int32_t low = min(a, b), high = max(a, b);
  a = low;
  b = high;
}

// Sorts N keys in registers: every index is known to the compiler.
template <int N, std::size_t... kPairs>
__device__ __forceinline__ void sort_run(int32_t (&x)[N], std::index_sequence<kPairs...>) {
  constexpr SortNetwork<N> network;
  (exchange(x[network.low[kPairs]], x[network.high[kPairs]]), ...);
}
template <int N>
__device__ __forceinline__ void sort_run(int32_t (&x)[N]) {
  sort_run(x, std::make_index_sequence<SortNetwork<N>().count>());
}

// A pass of kStages stages over a tile, in blocks of `block` rows. Positions from S on hold
// kLastKey and stay where they are.
template <int kStages>
__device__ __forceinline__ void halve(int32_t* tile, SortTile size, int64_t S, int block) {
  constexpr int kHeld = 1 << kStages;
  const int distance = block >> kStages, step = distance * size.columns;
  const int units = size.rows / kHeld * size.columns;
  for (int unit = static_cast<int>(threadIdx.x); unit < units; unit += kSortThreads) {
    const int first = halved(unit / size.columns, block, kStages);
    if (first + distance >= S) continue;
    int32_t* const from = tile + first * size.columns + unit % size.columns;
    int32_t x[kHeld];
#pragma unroll
    for (int k = 0; k < kHeld; ++k) x[k] = from[k * step];
#pragma unroll
    for (int apart = kHeld / 2; apart > 0; apart /= 2)
#pragma unroll
      for (int k = 0; k < kHeld; ++k)
        if ((k & apart) == 0) exchange(x[k], x[k + apart]);
#pragma unroll
    for (int k = 0; k < kHeld; ++k) from[k * step] = x[k];
  }
  __syncthreads();
}

// Merges the sorted runs of kMostRun rows of a tile. All threads of a thread block must call it.
__device__ __forceinline__ void merge_runs(int32_t* tile, SortTile size, int64_t S) {
  for (int m = kMostRun; m < size.rows; m *= 2) {
    const int units = size.rows / 2 * size.columns;
    for (int unit = static_cast<int>(threadIdx.x); unit < units; unit += kSortThreads) {
      const SortPair pair = mirrored(unit / size.columns, m);
      if (pair.high >= S) continue;
      const int column = unit % size.columns;
      exchange(tile[pair.low * size.columns + column], tile[pair.high * size.columns + column]);
    }
    __syncthreads();
    for (int block = m; block > 1;) {
      const int stages = stages_of(block);
      if (stages == 4) halve<4>(tile, size, S, block);
      if (stages == 3) halve<3>(tile, size, S, block);
      if (stages == 2) halve<2>(tile, size, S, block);
      if (stages == 1) halve<1>(tile, size, S, block);
      block >>= stages;
    }
  }
}

// A task is a tile. kRun is the number of its rows, or kMostRun if there are more.
template <int kRun, class T>
__global__ void __launch_bounds__(kSortThreads, 2)
    sorted_columns_kernel(float* out, int32_t* peak, const T* const* rows, int64_t S, int64_t d,
                          const double* scales, SortTile size, int64_t tasks, Statistic statistic) {
  __shared__ int32_t tile[kTileKeys];
  const int thread = static_cast<int>(threadIdx.x), units = size.rows / kRun * size.columns;
  int32_t largest = 0;
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    for (int unit = thread; unit < units; unit += kSortThreads) {
      const int column = unit % size.columns, run = unit / size.columns * kRun;
      const int64_t k = task * size.columns + column;
      int32_t x[kRun];
#pragma unroll
      for (int j = 0; j < kRun; ++j) {
        x[j] = kLastKey;
        if (run + j < S && k < d) x[j] = __float_as_int(widened(rows[run + j][k]));
      }
#pragma unroll
      for (int j = 0; j < kRun; ++j)
        if (run + j < S && k < d) {
          if (scales) {
            const float value = __uint_as_float(static_cast<uint32_t>(x[j]));
            x[j] = __float_as_int(value * static_cast<float>(scales[run + j]));
          }
          largest = max(largest, x[j] & 0x7fffffff);
          x[j] = sort_key(x[j]);
        }
      sort_run(x);
#pragma unroll
      for (int j = 0; j < kRun; ++j) tile[(run + j) * size.columns + column] = x[j];
    }
    __syncthreads();
    merge_runs(tile, size, S);
    const int64_t k = task * size.columns + thread;
    if (thread < size.columns && k < d) out[k] = statistic.of(tile + thread, size.columns, S);
    __syncthreads();  // before the next tile is written
  }
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    largest = max(largest, __shfl_xor_sync(kAllLanes, largest, offset));
  if (thread % kWarp == 0 && largest > 0) atomicMax(peak, largest);
}

template <class T>
cudaError_t sorted_columns(float* out, float* peak, const T* const* rows, int64_t S, int64_t d,
                           const double* scales, Statistic statistic, cudaStream_t stream) {
  auto* bits = reinterpret_cast<int32_t*>(peak);
  if (cudaError_t error = cudaMemsetAsync(bits, 0, sizeof(int32_t), stream)) return error;
  if (d == 0) return cudaSuccess;
  const SortTile size = sort_tile(S);
  const int64_t tasks = ceil_div(d, size.columns);
  const auto kernel = size.rows == 8    ? sorted_columns_kernel<8, T>
                      : size.rows == 16 ? sorted_columns_kernel<16, T>
                                        : sorted_columns_kernel<kMostRun, T>;
  int blocks = 0;
  if (cudaError_t error = resident_blocks(kernel, kSortThreads, tasks, &blocks)) return error;
  kernel<<<blocks, kSortThreads, 0, stream>>>(out, bits, rows, S, d, scales, size, tasks,
                                              statistic);
  return cudaGetLastError();
}

}  // namespace

template <class T>
cudaError_t trimmed_mean(float* out, float* peak, const T* const* rows, int64_t S, int64_t d,
                         int64_t trim, const double* scales, cudaStream_t stream) {
  return sorted_columns(out, peak, rows, S, d, scales, {false, trim, S - 2 * trim}, stream);
}

template <class T>
cudaError_t meamed(float* out, float* peak, const T* const* rows, int64_t S, int64_t d,
                   int64_t keep, const double* scales, cudaStream_t stream) {
  return sorted_columns(out, peak, rows, S, d, scales, {true, 0, keep}, stream);
}

template cudaError_t trimmed_mean(float*, float*, const float* const*, int64_t, int64_t, int64_t,
                                  const double*, cudaStream_t);
template cudaError_t trimmed_mean(float*, float*, const Bfloat16* const*, int64_t, int64_t, int64_t,
                                  const double*, cudaStream_t);
template cudaError_t trimmed_mean(float*, float*, const Half* const*, int64_t, int64_t, int64_t,
                                  const double*, cudaStream_t);
template cudaError_t meamed(float*, float*, const float* const*, int64_t, int64_t, int64_t,
                            const double*, cudaStream_t);
template cudaError_t meamed(float*, float*, const Bfloat16* const*, int64_t, int64_t, int64_t,
                            const double*, cudaStream_t);
template cudaError_t meamed(float*, float*, const Half* const*, int64_t, int64_t, int64_t,
                            const double*, cudaStream_t);

}  // namespace fastagg::cuda
