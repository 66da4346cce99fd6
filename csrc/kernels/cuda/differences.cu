// SPDX-License-Identifier: Apache-2.0
// Models minus a base: the squared norms of the differences, and the differences as rows.
#include "kernels.h"
#include "launch.cuh"
#include "warp_sum.cuh"

namespace fastagg::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kOwn = 8;   // neighbouring columns of a thread
constexpr int kRuns = 2;  // of such columns, kThreads * kOwn apart, in one task
constexpr int64_t kChunk = int64_t{kRuns} * kThreads * kOwn;  // columns of one task, of one row

// parts[s][chunk]: the square of a chunk. The order of sums does not depend on V.
template <class T, int V>
__global__ void __launch_bounds__(kThreads)
    squares_kernel(const T* const* rows, const float* base, int64_t d, int64_t chunks,
                   int64_t tasks, double* parts) {
  __shared__ double of_warps[kWarps];
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const T* row = rows[task / chunks];
    const int64_t begin = task % chunks * kChunk;
    Vector<T, V> x[kRuns][kOwn / V];
    Floats<V> from[kRuns][kOwn / V];
#pragma unroll
    for (int r = 0; r < kRuns; ++r)
#pragma unroll
      for (int q = 0; q < kOwn / V; ++q) {
        const int64_t column = begin + (int64_t{r} * kThreads + threadIdx.x) * kOwn + q * V;
        x[r][q] = load<V>(row + column, d - column);
        from[r][q] = load<V>(base + column, d - column);
      }
    float lanes[kOwn] = {};
#pragma unroll
    for (int r = 0; r < kRuns; ++r)
#pragma unroll
      for (int c = 0; c < kOwn; ++c) {
        const float difference =
            __fsub_rn(widened(x[r][c / V].at[c % V]), from[r][c / V].at[c % V]);
        lanes[c] = fmaf(difference, difference, lanes[c]);
      }
#pragma unroll
    for (int half = kOwn / 2; half > 0; half /= 2)
#pragma unroll
      for (int c = 0; c < half; ++c) lanes[c] += lanes[c + half];
    double square = lanes[0];
    for (int offset = kWarp / 2; offset > 0; offset /= 2)
      square += __shfl_xor_sync(kAllLanes, square, offset);
    if (lane_of_warp() == 0) of_warps[threadIdx.x / kWarp] = square;
    __syncthreads();
    if (threadIdx.x == 0) {
      double total = 0.0;
      for (double one : of_warps) total += one;
      parts[task] = total;
    }
    __syncthreads();  // the next task overwrites them
  }
}

// A warp takes a row.
__global__ void __launch_bounds__(kThreads)
    add_squares_kernel(const double* parts, int64_t S, int64_t chunks, double* squares) {
  const int64_t warps = int64_t{gridDim.x} * kWarps;
  for (int64_t s = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp; s < S; s += warps) {
    const double* own = parts + s * chunks;
    const double square = warp_sum(chunks, [&](int64_t chunk) { return own[chunk]; });
    if (lane_of_warp() == 0) squares[s] = square;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    differences_kernel(const T* const* rows, const float* base, int64_t n, int64_t chunks,
                       int64_t tasks, float* out, int64_t stride) {
  constexpr int kLoads = 8;  // in flight
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t s = task / chunks, begin = task % chunks * kChunk;
    const T* row = rows[s];
    const int64_t end = at_most(begin + kChunk, n);
    for (int64_t first = begin + threadIdx.x; first < end; first += kLoads * kThreads) {
      float x[kLoads];
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        const int64_t k = first + int64_t{j} * kThreads;
        x[j] = k < end ? __fsub_rn(widened(row[k]), base[k]) : 0.0f;
      }
#pragma unroll
      for (int j = 0; j < kLoads; ++j) {
        const int64_t k = first + int64_t{j} * kThreads;
        if (k < end) out[s * stride + k] = x[j];
      }
    }
  }
}

}  // namespace

int64_t squares_workspace(int64_t S, int64_t d) {
  return S * ceil_div(d, kChunk) * int64_t{sizeof(double)};
}

template <class T>
cudaError_t difference_squares(double* squares, const T* const* rows, const float* base, int64_t S,
                               int64_t d, double* parts, int width, cudaStream_t stream) {
  if (S == 0) return cudaSuccess;
  return with_width<16 / sizeof(T)>(width, [&](auto w) {
    constexpr int V = decltype(w)::value;
    const int64_t chunks = ceil_div(d, kChunk);
    int blocks = 0;
    if (d > 0) {
      if (cudaError_t error = resident_blocks(squares_kernel<T, V>, kThreads, S * chunks, &blocks))
        return error;
      squares_kernel<T, V>
          <<<blocks, kThreads, 0, stream>>>(rows, base, d, chunks, S * chunks, parts);
      if (cudaError_t error = cudaGetLastError()) return error;
    }
    if (cudaError_t error =
            resident_blocks(add_squares_kernel, kThreads, ceil_div(S, kWarps), &blocks))
      return error;
    add_squares_kernel<<<blocks, kThreads, 0, stream>>>(parts, S, chunks, squares);
    return cudaGetLastError();
  });
}

template <class T>
cudaError_t differences(float* out, int64_t stride, const T* const* rows, const float* base,
                        int64_t S, int64_t n, cudaStream_t stream) {
  const int64_t chunks = ceil_div(n, kChunk), tasks = S * chunks;
  if (tasks == 0) return cudaSuccess;
  int blocks = 0;
  if (cudaError_t error = resident_blocks(differences_kernel<T>, kThreads, tasks, &blocks))
    return error;
  differences_kernel<T><<<blocks, kThreads, 0, stream>>>(rows, base, n, chunks, tasks, out, stride);
  return cudaGetLastError();
}

#define FASTAGG_INSTANTIATE(T)                                                              \
  template cudaError_t difference_squares(double*, const T* const*, const float*, int64_t,  \
                                          int64_t, double*, int, cudaStream_t);             \
  template cudaError_t differences(float*, int64_t, const T* const*, const float*, int64_t, \
                                   int64_t, cudaStream_t);
FASTAGG_INSTANTIATE(float)
FASTAGG_INSTANTIATE(Bfloat16)
FASTAGG_INSTANTIATE(Half)

}  // namespace fastagg::cuda
