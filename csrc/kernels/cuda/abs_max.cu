// SPDX-License-Identifier: Apache-2.0
#include "kernels.h"
#include "launch.cuh"

namespace fastagg::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVectors = 8;  // loads in flight for each thread

// A task is one chunk of kThreads * kVectors * V columns of one row.
template <int V>
__global__ void __launch_bounds__(kThreads)
    abs_max_kernel(const float* const* rows, int64_t d, int64_t chunks, int64_t tasks,
                   int32_t* out) {
  for (int64_t task = blockIdx.x; task < tasks; task += gridDim.x) {
    const int64_t s = task / chunks;
    const int64_t begin = (task % chunks) * kVectors * kThreads * V;
    const float* row = rows[s];
    Floats<V> x[kVectors];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const int64_t column = begin + (int64_t{j} * kThreads + threadIdx.x) * V;
      x[j] = load<V>(row + column, d - column);
    }
    int32_t bits = 0;
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
#pragma unroll
      for (int v = 0; v < V; ++v) bits = max(bits, magnitude_bits(x[j].at[v]));
    for (int offset = kWarp / 2; offset > 0; offset /= 2)
      bits = max(bits, __shfl_xor_sync(kAllLanes, bits, offset));
    if (threadIdx.x % kWarp == 0 && bits > 0) atomicMax(out + s, bits);
  }
}

}  // namespace

cudaError_t abs_max(const float* const* rows, int64_t S, int64_t d, float* out, int width,
                    cudaStream_t stream) {
  auto* bits = reinterpret_cast<int32_t*>(out);
  if (cudaError_t error = cudaMemsetAsync(bits, 0, S * sizeof(int32_t), stream)) return error;
  if (S == 0 || d == 0) return cudaSuccess;
  return with_width(width, [&](auto w) {
    constexpr int V = decltype(w)::value;
    const int64_t chunks = ceil_div(d, int64_t{kVectors} * kThreads * V);
    int blocks = 0;
    if (cudaError_t error = resident_blocks(abs_max_kernel<V>, kThreads, S * chunks, &blocks))
      return error;
    abs_max_kernel<V><<<blocks, kThreads, 0, stream>>>(rows, d, chunks, S * chunks, bits);
    return cudaGetLastError();
  });
}

}  // namespace fastagg::cuda
